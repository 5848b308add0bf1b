"""Runs of a model at a draw of its latent sites."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import Bernoulli

from pyro_structvi._checks import check_no_nan, check_same_kind, check_shape, shape_text
from pyro_structvi._torch import inside_transform, own_tensors, take_apart
from pyro_structvi.linalg.matrices import at_least_single, autocast_off
from pyro_structvi.sites.autoguide import warn_of_local_latents
from pyro_structvi.weights.placeholders import CountedWeight
from pyro_structvi.weights.site_role import SiteRole, SiteUse
from pyro_structvi.weights.torch_distributions import base_of, in_single


class _AtDraw(Messenger):
    """Gives latent sites the values of a draw if the shapes agree; observed sites keep their values.

    A value of another shape is left out, since it may belong to a local latent of other examples.
    """

    def __init__(self, values: Mapping[str, Tensor], unused: str | None, counts: bool) -> None:
        super().__init__()
        self.values, self.unused, self.counts = values, unused, counts

    def _pyro_sample(self, msg: Any) -> None:
        msg["infer"]["own_mask"] = msg["mask"]  # the model's, without masks of outer handlers
        if msg["is_observed"]:
            return
        value = self.values.get(msg["name"])
        if value is not None and value.shape == msg["fn"].shape():
            if value.is_leaf and value.is_floating_point() and not inside_transform():
                value.requires_grad_()  # as a parameter: a model may differentiate by its weights
            msg["value"], msg["is_observed"] = value, True
        elif msg["name"] == self.unused:
            msg["value"] = torch.tensor(torch.nan).expand(msg["fn"].shape())
        elif self.counts and msg["value"] is None and not site_is_subsample(msg):
            drawn = msg["fn"](*msg["args"], **msg["kwargs"])
            msg["value"] = CountedWeight(drawn, SiteUse(msg["name"]))


def run_at_draw(
    model: Callable[..., Any],
    values: dict[str, Tensor],
    args: tuple[Any, ...],
    new: Collection[str] = (),
    unused: str | None = None,
    counts: bool = False,
) -> Any:
    """Run the model at a draw of its latent sites and return the trace."""
    given = {name: value for name, value in values.items() if name not in new}
    try:
        with poutine.block(), poutine.mask(mask=False):
            return poutine.trace(_AtDraw(given, unused, counts)(model)).get_trace(*args)
    except RuntimeError as error:
        _explain_mismatch(values, args, error)
        raise


def is_unused(trace: Any, node: Any) -> bool:
    """Whether the model neither uses nor returns the value of a node of a counting run."""
    value = node["value"]
    returned, _ = take_apart(trace.nodes["_RETURN"]["value"])
    is_counted = isinstance(value, CountedWeight)
    return is_counted and value.use.count == 0 and not any(each is value for each in returned)


def _explain_mismatch(
    values: dict[str, Tensor], args: tuple[Any, ...], error: RuntimeError
) -> None:
    """Raise a clear error if the device or dtype of an input differs from the draw."""
    if not values:
        return
    name, draw = next(iter(values.items()))
    for index, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point():
            try:
                check_same_kind(f"x[{index}]" if len(args) > 1 else "x", value, name, draw)
            except ValueError as mismatch:
                raise mismatch from error


def find_observation(trace: Any, values: dict[str, Tensor], site: str | None) -> str:
    """Return the name of the observed site of a model that ran without observations."""
    nodes = {
        name: node
        for name, node in trace.nodes.items()
        if node["type"] == "sample" and not site_is_subsample(node)
    }
    unknown = [name for name in values if name not in nodes]
    drawn = [name for name, node in nodes.items() if not node["is_observed"]]
    free = [name for name in drawn if name not in values]
    marked = [name for name in free if SiteRole.of(nodes[name]).is_observation]
    candidates = [name for name in free if name == site] if site else marked or free
    if len(candidates) != 1:
        _check_sites(nodes, values, [], unknown)
        raise ValueError(
            f"The observed site must be one of {free}"
            + (f", but got `site='{site}'`." if site else ": pass its name as `site=`.")
        )
    observed = str(candidates[0])
    plates = _plates_of(nodes[observed])
    missing = [name for name in drawn if name != observed and not plates & _plates_of(nodes[name])]
    _check_sites(nodes, values, missing, unknown)
    return observed


def _plates_of(node: Any) -> set[str]:
    return {frame.name for frame in node["cond_indep_stack"] if frame.vectorized}


def _check_sites(
    nodes: Mapping[str, Any],
    values: Mapping[str, Tensor],
    missing: Sequence[str],
    unknown: Sequence[str],
) -> None:
    """Raise a ``ValueError`` if a draw lacks sites of the model or has unknown sites."""
    for name in missing:
        if name in values:
            expected = shape_text(nodes[name]["fn"].shape())
            raise ValueError(
                f"`posterior` must give the site '{name}' values of the model's shape {expected}, but "
                f"got {shape_text(values[name].shape)}."
            )
    if missing or unknown:
        raise ValueError(
            "`posterior` must have the latent sites of the model, but these are missing in it: "
            f"{[*missing]}, and these are not in the model: {[*unknown]}. Pass the guide of this very "
            "model, or rename the draws."
        )


def sites_from_model(
    trace: Any, observed: Any, values: Mapping[str, Tensor], is_whole: bool
) -> set[str]:
    """Return the local latent sites of a draw that must be sampled from the model, and warn of them."""
    plates = _plates_of(observed)
    local = [name for name in values if plates & _plates_of(trace.nodes[name])]
    kept = [name for name in local if is_whole and trace.nodes[name]["is_observed"]]
    new = [name for name in local if name not in kept]
    warn_of_local_latents(kept, new)
    return {*new}


def observed_log_prob(node: Any, y: Tensor) -> Tensor:
    """Return the log density of observations, in at least single precision, zero if masked by the model."""
    likelihood, mask = node["fn"], node["infer"]["own_mask"]
    check_no_nan("y", y)
    check_shape("y", y, likelihood.batch_shape + likelihood.event_shape, "that of the predictions")
    y, likelihood = at_least_single(y), in_single(likelihood)
    if not likelihood.support.is_discrete:
        check_same_kind("y", y, "prediction.mean", likelihood.mean)
    elif isinstance(base_of(likelihood), Bernoulli):
        y = y.to(likelihood.mean)  # torch needs labels in the dtype of the probabilities
    with autocast_off(y):
        log_density: Tensor = scale_and_mask(likelihood.log_prob(y), mask=mask)
    return log_density


def tensors_in(model: Any) -> list[Tensor]:
    """Return the parameters and buffers of a model, which may be a function or under handlers."""
    return [tensor for module in modules_of(model) for tensor in own_tensors(module)]


def modules_of(model: Any) -> list[nn.Module]:
    """Return the modules of a model, which may be a function or under handlers."""
    module = poutine.unwrap(model)
    return [*module.modules()] if isinstance(module, nn.Module) else []


@contextmanager
def evaluation_mode(model: Any, differentiable: bool = False) -> Iterator[None]:
    """Run a block in evaluation mode, without gradients unless ``differentiable``."""
    training = [module for module in modules_of(model) if module.training]
    try:
        for module in training:
            module.training = False
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            yield
    finally:
        for module in training:
            module.training = True
