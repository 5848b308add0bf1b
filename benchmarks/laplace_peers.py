"""Laplace approximations by laplace-torch, of the same model as NUTS samples."""

import time
from typing import TYPE_CHECKING, Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import pyro_structvi as ps

if TYPE_CHECKING:
    from benchmarks.league_problems import LeagueProblem

MISSING = "The posteriors of laplace-torch need that package: pip install laplace-torch"


def laplace(
    subset: str, structure: str, predictive: str, problem: "LeagueProblem", options: Any
) -> tuple[Any, dict[str, Tensor], dict[str, float]]:
    """Return a model, draws of its weights, and the seconds.

    The net is at the posterior mode, where ``fit`` ends with ``MAPGuide``, for as many steps as the
    league's guides have. Prior precisions and noise are the model's, and nothing is tuned: what
    ``optimize_prior_precision`` would find is another model, of which NUTS has no draws. The curvature
    is the package's default, the generalized Gauss-Newton matrix of all examples by curvlinops.

    Weights are drawn by the package. The predictive "glm", its default, linearizes the net in them: so
    does the model returned, whose functions are joint draws over inputs; at each input they have the
    distribution of the package's ``functional_samples``. Class probabilities are averages over draws,
    not the probit approximation. The predictive "nn" runs the net itself at the draws.

    Args:
        subset: The package's ``subset_of_weights``.
        structure: Its ``hessian_structure``.
        predictive: "glm" or "nn".
        problem: The problem.
        options: Numbers of steps and draws.

    Raises:
        ImportError: If the package is not installed.
        ValueError: If it has no such likelihood or prior.
    """
    try:
        from laplace import Laplace
    except ImportError as error:
        raise ImportError(MISSING) from error
    start, model = time.process_time(), problem.model
    kind, noise = likelihood_of(model)
    precisions = prior_precisions(model, problem.x)
    guide, data = ps.MAPGuide(model), (problem.x, problem.y)
    ps.fit(
        *(model, guide, data),
        num_steps=options.steps,
        batch_size=problem.batch_size,
        progress=False,
    )
    net = guide.to_net()
    names = [name for name, _ in net.named_parameters()]
    own = [precisions[f"net.{name}"] for name in names]
    own = own[-2:] if subset == "last_layer" else own
    approximation = Laplace(
        # The package finds no last layer in a net that is a single one.
        net if isinstance(net, nn.Sequential) else nn.Sequential(nn.Identity(), net),
        kind,
        subset_of_weights=subset,
        hessian_structure=structure,
        sigma_noise=noise,
        prior_precision=each_layer(own) if structure == "kron" else torch.cat(own),
    )
    approximation.fit(DataLoader(TensorDataset(*data), batch_size=len(problem.x)))
    mode = parameters_to_vector(net.parameters()).detach()
    draws = mode.repeat(options.draws, 1)
    sampled = approximation.sample(options.draws).detach()
    draws[:, len(mode) - sampled.shape[1] :] = sampled  # a last layer's weights come last
    found = {"seconds": time.process_time() - start}
    if predictive == "glm":
        return LinearizedModel(model, net), {"weights": draws}, found
    parts = draws.split([value.numel() for value in net.parameters()], 1)
    shapes = [value.shape for value in net.parameters()]
    by_site = {
        f"net.{name}": part.unflatten(1, shape)
        for name, part, shape in zip(names, parts, shapes, strict=True)
    }
    return model, by_site, found


def likelihood_of(model: Any) -> tuple[str, float]:
    """Return the package's name of a model's likelihood, and the standard deviation of its noise.

    Raises:
        ValueError: If the package has none.
    """
    if isinstance(model, ps.Classifier):
        return "classification", 1.0
    scale = getattr(model, "noise_scale", None)
    if isinstance(scale, Tensor) and scale.numel() == 1 and model.df is None:
        return "regression", float(scale)
    raise ValueError(
        "laplace-torch has classes, and regressions with one given scale of normal noise."
    )


def prior_precisions(model: Any, x: Tensor) -> dict[str, Tensor]:
    """Return the prior precision of each weight, in a vector for each site.

    Raises:
        ValueError: If a prior is no independent normal around zero, the only one that the package has.
    """
    with torch.no_grad(), poutine.block():
        nodes = poutine.trace(model).get_trace(x[:1]).nodes
    found = {}
    for name, node in nodes.items():
        if node["type"] != "sample" or not name.startswith("net."):
            continue
        prior = node["fn"]
        while isinstance(prior, torch.distributions.Independent):
            prior = prior.base_dist
        if not isinstance(prior, torch.distributions.Normal) or bool(prior.loc.any()):
            raise ValueError(f"laplace-torch has normal priors around zero only, unlike {name}.")
        found[name] = prior.scale.expand(node["value"].shape).flatten() ** -2
    return found


def each_layer(precisions: list[Tensor]) -> Tensor:
    """Return a precision for each parameter of the net, as Kronecker factors need it.

    Raises:
        ValueError: If a parameter has several.
    """
    if any(bool((own != own[0]).any()) for own in precisions):
        raise ValueError("Kronecker factors need one prior precision for each parameter.")
    return torch.stack([own[0] for own in precisions])


class LinearizedModel(nn.Module):
    """A model whose net is linear in its weights: the first two terms at given ones.

    Its only latent site is ``weights``, a vector of them all.

    Args:
        model: The model, whose likelihood it has.
        net: The plain net at the given weights.
    """

    def __init__(self, model: Any, net: nn.Module) -> None:
        super().__init__()
        self.likelihood, self.plain = model, net
        self.at = {name: value.detach() for name, value in net.named_parameters()}

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Run the linearized net and observe."""
        mode = parameters_to_vector(self.at.values())
        # Draws take the place of this distribution, which is no prior.
        weights = pyro.sample("weights", dist.Normal(mode, 1.0).to_event(1))
        parts = (weights - mode).split([value.numel() for value in self.at.values()])
        change = {
            name: part.reshape(value.shape)
            for (name, value), part in zip(self.at.items(), parts, strict=True)
        }
        output, first = jvp(
            lambda values: functional_call(self.plain, values, (x,)), (self.at,), (change,)
        )
        observed: Tensor = self.likelihood.observe(output + first, 0, y)
        return observed
