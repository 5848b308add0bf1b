"""Scores for choosing the elements of a net that get a posterior."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_structvi._checks import Count, Program, check_no_nan, checked
from pyro_structvi._nested import map_nested
from pyro_structvi._pyro import ONE_THREAD
from pyro_structvi._torch import kernels_for_vmap, over_draws
from pyro_structvi.linalg.matrices import at_least_single
from pyro_structvi.nn.random_module import transient_pass
from pyro_structvi.posterior.passes import Values, as_arguments, as_batches
from pyro_structvi.posterior.runs import (
    evaluation_mode,
    find_observation,
    run_at_draw,
)
from pyro_structvi.sites.finding import modules_of
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.weights.site_distributions import PointMass
from pyro_structvi.weights.site_role import sample_nodes


@checked
def marginal_variances(guide: StructuredGuide) -> dict[str, Tensor]:
    """Return the posterior variance of each element, by site, without transformed sites.

    Raises:
        RuntimeError: If the guide is not initialized, or its weights have only a joint distribution.

    Example:
        >>> from pyro_structvi import Classifier, MeanFieldGuide, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> {name: tuple(v.shape) for name, v in marginal_variances(MeanFieldGuide(model)).items()}
        {'net.weight': (3, 4), 'net.bias': (3,)}
    """
    variances: dict[str, Tensor] = {}
    with torch.no_grad():
        for site, posterior in guide.joint_posterior().conditionals("mean"):
            if site.is_real:
                drawn_together = isinstance(posterior, PointMass) and not posterior.is_known
                variance = posterior.variance if drawn_together else guide[site.name]().variance
                variances |= site.split(variance.clone())
    return variances


@checked
def laplace_variances(
    model: Program,
    center: StructuredGuide,
    x: Any,
    *,
    num_samples: Count = 1,
    batch_size: Count = 32,
    site: str | None = None,
) -> dict[str, Tensor]:
    r"""Return the variances of a diagonal Laplace approximation around a guide's medians.

    .. math:: v_j = \left( \sum_n \mathrm{E}_{y \sim p(y \mid x_n, w)}
        \left[ (\partial_{w_j} \log p(y \mid x_n, w))^2 \right] + 1 / s_j^2 \right)^{-1}

    with the prior variances :math:`s_j^2`: the inverse diagonal of the Fisher information plus the prior
    precision. The expectation uses y sampled from the model; gradients at the observed y vanish at a
    good fit. Weights of classes and of examples, and handlers that scale or mask, do not count.

    Args:
        model: A model that samples its observations when called with inputs only.
        center: The fitted guide, such as a ``MAPGuide``.
        x: All training inputs with the examples first; a tuple for several inputs.
        num_samples: Samples of y for each input.
        batch_size: Number of examples whose gradients, each of the size of the net, are in memory.
        site: The name of the observed site, if ambiguous.

    Returns:
        Variances by site, for sites with real support.

    Raises:
        ValueError: If the observed site is ambiguous.
        RuntimeError: If :func:`torch.func.vmap` cannot vectorize the model.

    Example:
        >>> from pyro_structvi import Classifier, MAPGuide, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> variances = laplace_variances(model, MAPGuide(model), torch.randn(10, 4))
        >>> bool((variances["net.weight"] < 1).all())
        True

    References:
        Daxberger et al. (2021), "Bayesian deep learning via subnetwork inference", for the choice of
        a subnetwork.
    """
    batches = as_batches(as_arguments(x), None, batch_size)
    own = center.median()
    values = {name: value for name, value in own.items() if not center[name].site.is_local}
    chosen = {name: value for name, value in values.items() if center[name].site.is_real}

    def log_prob(observed: str, changed: Values, own: Values, *example: Any) -> Tensor:
        """Return the log density of one example."""
        own, inputs = map_nested(lambda value: value.unsqueeze(0), (own, example))
        node = run_at_draw(model, values | changed | own, inputs).nodes[observed]
        return node["fn"].log_prob(node["value"]).sum()

    information = {name: torch.zeros_like(at_least_single(value)) for name, value in chosen.items()}
    like = next(iter(own.values()))
    with ONE_THREAD, evaluation_mode(model):
        for args, _ in batches * num_samples:
            trace = run_at_draw(model, values, args)
            observed = find_observation(trace, values, site)
            nodes = sample_nodes(trace).items()  # drawn are observations and local latents
            drawn = {name: node["value"] for name, node in nodes if name not in values}
            gradient_of = torch.func.grad(partial(log_prob, observed))
            in_dims = (None, 0, *(0 for _ in args))
            each = over_draws(gradient_of, in_dims)
            kernels, own_pass = kernels_for_vmap(like), transient_pass(modules_of(model))
            # Under vmap there are no values to validate.
            with pyro.validation_enabled(False), kernels, own_pass:
                gradients: Values = each(chosen, drawn, *args)  # (batch, *shape) by site
            for name, gradient in gradients.items():
                information[name] += at_least_single(gradient).square().sum(0) / num_samples
    variances = {}
    for name, squares in information.items():
        if name in trace.nodes:
            precision = 1 / trace.nodes[name]["fn"].variance
            precision = torch.nan_to_num(precision, nan=0.0)  # a Cauchy prior has no variance
            variances[name] = 1 / (squares + precision)
    return variances


@checked
def largest(variances: Mapping[str, Tensor], size: Count) -> dict[str, Tensor]:
    """Choose the elements with the largest variances, over all sites together.

    Args:
        variances: Variances or other scores, by site.
        size: Number of elements, at most all.

    Returns:
        Masks by site, for :class:`~pyro_structvi.SubnetworkGuide`.

    Example:
        >>> largest({"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([[2.0]])}, size=2)
        {'a': tensor([ True, False]), 'b': tensor([[True]])}
    """
    if not variances:
        raise ValueError("`variances` must hold at least one site, but is empty.")
    flat = torch.cat([value.flatten() for value in variances.values()])
    check_no_nan("variances", flat)
    if size > len(flat):
        raise ValueError(f"`size` must be at most the {len(flat)} elements, but got {size}.")
    mask = torch.zeros_like(flat, dtype=torch.bool)
    mask[flat.topk(size).indices] = True
    parts = mask.split([value.numel() for value in variances.values()])
    return {
        name: part.reshape(value.shape)
        for (name, value), part in zip(variances.items(), parts, strict=True)
    }
