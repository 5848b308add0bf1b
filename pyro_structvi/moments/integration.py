"""Expectations of a likelihood over a net's random output, by quadrature."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_structvi._pyro import declared_name, declared_samples, site_values
from pyro_structvi.linalg.factorizations import stable_root
from pyro_structvi.linalg.matrices import floored_sqrt
from pyro_structvi.linalg.quadrature import gauss_hermite, normal_points
from pyro_structvi.moments.random_tensor import RandomTensor
from pyro_structvi.nn.likelihood import Classifier, Likelihood
from pyro_structvi.structures.mean_field import TransformedNormal
from pyro_structvi.weights.torch_distributions import base_of

NODES = {1: 32, 2: 16}  # along each variable, by the number of variables
POINTS = 256  # for more variables
LARGEST_OUTPUT = torch.quasirandom.SobolEngine.MAXDIM
LARGEST_JOINT = 128  # outputs whose covariance is formed
BLOCK = 2**16  # logits at nodes that are held at once, and stay in the processor's cache


def nodes_of(size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes ``(count, size)`` and weights ``(count,)`` for standard normal variables."""
    if size > LARGEST_OUTPUT:
        raise NotImplementedError(
            f"Moments have nodes for up to {LARGEST_OUTPUT:,} logits, but there are {size:,}. Predict "
            "with draws."
        )
    if size not in NODES:
        return normal_points(POINTS, size, like)
    line, weights = gauss_hermite(NODES[size], like)
    grid = torch.cartesian_prod(*(line for _ in range(size))).reshape(-1, size)
    products = torch.cartesian_prod(*(weights for _ in range(size))).reshape(-1, size)
    return grid, products.prod(-1)


def joint_covariance(output: RandomTensor) -> Tensor | None:
    """Return the covariance between outputs, if it is known and small."""
    if output.covariance is not None:
        return output.covariance
    if output.form_covariance is None or output.shape[-1] > LARGEST_JOINT:
        return None
    return output.form_covariance()


class AtNodes(NamedTuple):
    """A likelihood at nodes of a random output.

    ``likelihood`` is ``(nodes, batch)``, ``scale`` the model's factor of its log likelihood, and ``y``
    NaN if no observations are given. The values of variables that all elements of an example ``shared``,
    such as a noise scale, vary fastest. Those of a variable that noise scales do not depend on have
    ``inner`` nodes and vary slowest; ``inner`` is 1 without such a grid.
    """

    likelihood: Any
    scale: Any
    y: Tensor
    site: str
    weights: Tensor
    shared: int
    inner: int


def likelihood_at_nodes(
    model: Likelihood, output: RandomTensor, posteriors: Mapping[str, Any], y: Tensor | None = None
) -> AtNodes:
    """Return a model's likelihood at nodes of its net's random output ``(batch, ...)``.

    With one or two variables in each term of the log likelihood the nodes are a grid of Gauss-Hermite
    quadrature, exact for polynomials up to degree 63 or 31. With more, such as the logits of classes,
    they are 256 fixed quasi-random points, antithetic and with exact variances. Sites of the likelihood,
    such as a noise scale, are variables with transformed normal ``posteriors``.
    """
    own = {
        name: posteriors[name]
        for attribute in declared_samples(model)
        if (name := declared_name(model, attribute)) in posteriors
    }
    if own and model.terms == "pairs":
        raise NotImplementedError(
            f"Heteroscedastic noise with the sites {[*own]} has no quadrature here. Predict with draws."
        )
    first = {"elements": 1, "pairs": 2, "last dimension": output.shape[-1]}[model.terms]
    nodes, weights = nodes_of(first + len(own), output.loc)
    values = {name: _at(q, nodes[:, first + i], name) for i, (name, q) in enumerate(own.items())}
    outputs = _outputs(output, nodes[:, :first], model.terms)
    is_shared = any((q.batch_shape + q.event_shape).numel() == 1 for q in own.values())
    shared = NODES.get(first + len(own), len(nodes)) if is_shared else 1
    inner = 1 if model.terms == "last dimension" else NODES.get(first + len(own), 1)
    observation = _Observation()
    with site_values(model) as cache, observation:
        cache.update(values)
        model.observe(outputs, 1, y)
    return AtNodes(*observation.found, weights, shared, inner)


def observation_at(model: Likelihood, output: Tensor, y: Tensor | None) -> AtNodes:
    """Return a model's likelihood at a known output ``(batch, ...)``, as one node."""
    observation = _Observation()
    with site_values(model), observation:
        model.observe(output, 0, y)
    return AtNodes(*observation.found, output.new_ones(1), 1, 1)


def _outputs(output: RandomTensor, nodes: Tensor, terms: str) -> Tensor:
    """Return outputs ``(count, batch, ...)`` at nodes ``(count, variables)``."""
    lead = [1 for _ in range(output.dim() - 1)]
    scale = floored_sqrt(output.variance)
    if terms == "elements":
        return output.loc + scale * nodes.reshape(-1, *(1 for _ in output.shape))
    covariance = joint_covariance(output)
    if terms == "last dimension":
        if covariance is None:
            return output.loc + scale * nodes.reshape(len(nodes), *lead, -1)
        return output.loc + torch.einsum("kj,bij->kbi", nodes, stable_root(covariance))
    first, second = (column.reshape(-1, *lead, 1) for column in nodes.unbind(-1))
    if covariance is not None:
        size = output.shape[-1] // 2
        own, partner = scale.chunk(2, -1)
        between = covariance.diagonal(size, -2, -1) / (own * partner)
        between = between.clamp(-1, 1)
        # The partner is a noise scale, given which densities integrate the first output exactly.
        first = between * second + floored_sqrt(1 - between.square()) * first
    steps = [part.expand(-1, *output.shape[:-1], output.shape[-1] // 2) for part in (first, second)]
    return output.loc + scale * torch.cat(steps, -1)


def _at(q: Any, nodes: Tensor, name: str) -> Tensor:
    """Return the values ``(count, 1, *shape)`` of a positive site at nodes of its normal."""
    base = base_of(q)
    if not isinstance(base, TransformedNormal):
        if getattr(base, "has_rsample", False) and not bool(base.variance.any()):
            return base.mean.expand(len(nodes), 1, *base.mean.shape)
        raise NotImplementedError(
            f"The site '{name}' of the likelihood has a {type(base).__name__} for a posterior, over "
            "which there is no quadrature here. Predict with draws."
        )
    return base.at(nodes).unsqueeze(1)


class _Observation(Messenger):
    """Record distribution, scale, value and name of the observations without a draw."""

    found: tuple[Any, Any, Tensor, str]

    def _pyro_sample(self, msg: Any) -> None:
        if msg["infer"].get("is_observation"):
            if msg["value"] is None:
                shape = msg["fn"].batch_shape + msg["fn"].event_shape
                msg["value"] = torch.full((), torch.nan).expand(shape)
            self.found = msg["fn"], msg["scale"], msg["value"], msg["name"]
            msg["is_observed"], msg["done"], msg["stop"] = True, True, True


def is_softmax(model: Likelihood) -> bool:
    """Whether the observations are classes, and the net's output is their logits."""
    return type(model).observe is Classifier.observe


def class_expectations(output: RandomTensor, y: Tensor | None) -> dict[str, Tensor]:
    """Return the moments of classes over random logits ``(batch, classes)``, by example.

    They are the fields of a prediction, with the entropy given the logits.
    """
    parts: list[dict[str, Tensor]] = []
    for rows, logits, weights in _blocks(output):
        logits.sub_(logits.detach().amax(1, keepdim=True))  # a shift that changes nothing below
        exponentials = logits.exp()
        total = exponentials.sum(1, keepdim=True)
        at_nodes = exponentials / total
        mean = at_nodes @ weights
        log_total = total.log().squeeze(1)
        found = {
            "mean": mean,
            "variance": mean * (1 - mean),
            "function_variance": (at_nodes - mean.unsqueeze(-1)).square() @ weights,
            "entropy": (log_total - (at_nodes * logits).sum(1)) @ weights,
        }
        if y is not None:
            index = y.long()[rows, None, None].expand(-1, 1, len(weights))
            chosen = logits.gather(1, index).squeeze(1)
            found["log_density"] = (chosen - log_total + weights.log()).logsumexp(-1)
        parts.append(found)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def excess_of_log_total(output: RandomTensor) -> Tensor:
    """Return the expectation of ``logsumexp`` minus its value at the mean logits, ``(batch,)``."""
    parts = [logits.logsumexp(1) @ weights for _, logits, weights in _blocks(output)]
    return torch.cat(parts) - output.loc.logsumexp(-1)


def _blocks(output: RandomTensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield blocks of rows, their logits ``(rows, classes, nodes)``, and the nodes' weights."""
    classes = output.shape[-1]
    nodes, weights = nodes_of(classes, output.loc)
    points = nodes.mT.contiguous()  # results of elementwise operations inherit the strides
    loc = output.loc.clamp_min(torch.finfo(output.loc.dtype).min / 4).unsqueeze(-1)
    covariance = joint_covariance(output)
    if covariance is None:
        factor = floored_sqrt(output.variance).unsqueeze(-1)
    else:
        factor = stable_root(covariance)
    step = max(1, BLOCK // points.numel())
    for start in range(0, len(loc), step):
        rows = slice(start, start + step)
        own = factor[rows]
        if covariance is None:
            logits = torch.addcmul(loc[rows], own, points)
        else:
            logits = torch.baddbmm(loc[rows], own, points.expand(len(own), -1, -1))
        yield rows, logits, weights
