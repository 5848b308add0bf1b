"""Runs of a model at a draw of its latent sites, and what they tell of its observation."""

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
from pyro_structvi.linalg.precision import at_least_single, autocast_off
from pyro_structvi.sites.autoguide import warn_of_local_latents
from pyro_structvi.weights.placeholders import CountedWeight
from pyro_structvi.weights.site_role import SiteRole, SiteUse
from pyro_structvi.weights.torch_distributions import base_of, in_single


class _AtDraw(Messenger):
    """Gives a model's latent sites the values of a draw, where these have the sites' shapes.

    What the model observes, or is conditioned on, stays. A value of another shape is left out: it may be
    that of a local latent, for other examples.

    Args:
        values: The draw, by site.
        unused: A site of which the model makes no use: it is not drawn, and NaN stands in its place.
        counts: Whether to count the uses of what is drawn from the model.
    """

    def __init__(self, values: Mapping[str, Tensor], unused: str | None, counts: bool) -> None:
        super().__init__()
        self.values, self.unused, self.counts = values, unused, counts

    def _pyro_sample(self, msg: Any) -> None:
        msg["infer"]["own_mask"] = msg["mask"]  # the model's, before that of the handlers around it
        if msg["is_observed"]:
            return
        value = self.values.get(msg["name"])
        if value is not None and value.shape == msg["fn"].shape():
            if value.is_leaf and value.is_floating_point() and not inside_transform():
                value.requires_grad_()  # as a parameter does, of which a model may take derivatives
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
    """Run the model at a draw of its latent sites and return the trace.

    Sites without a value, and the ``new`` ones, are drawn from the model; not so an ``unused`` one. With
    ``counts`` the trace tells of what is drawn whether it :func:`is_unused`.
    """
    given = {name: value for name, value in values.items() if name not in new}
    try:
        with poutine.block(), poutine.mask(mask=False):
            return poutine.trace(_AtDraw(given, unused, counts)(model)).get_trace(*args)
    except RuntimeError as error:
        _explain_mismatch(values, args, error)
        raise


def is_unused(trace: Any, node: Any) -> bool:
    """Whether a model neither uses nor returns what it drew at a node of a trace that counts."""
    value = node["value"]
    returned, _ = take_apart(trace.nodes["_RETURN"]["value"])
    is_counted = isinstance(value, CountedWeight)
    return is_counted and value.use.count == 0 and not any(each is value for each in returned)


def _explain_mismatch(
    values: dict[str, Tensor], args: tuple[Any, ...], error: RuntimeError
) -> None:
    """Raise a clear error if an input is of another device or dtype than the draws."""
    name, draw = next(iter(values.items()), ("", None))
    for index, value in enumerate(args if draw is not None else ()):
        if isinstance(value, Tensor) and value.is_floating_point():
            try:
                assert draw is not None
                check_same_kind(f"x[{index}]" if len(args) > 1 else "x", value, name, draw)
            except ValueError as mismatch:
                raise mismatch from error


def find_observation(trace: Any, values: dict[str, Tensor], site: str | None) -> str:
    """Return the name of the observed site of a model that was run at a draw without observations.

    Args:
        trace: The trace of that run.
        values: The draw, by site.
        site: The name if the caller gave it.

    Returns:
        The name.

    Raises:
        ValueError: If there is no such site, if several could be meant, or if the draw does not have
            exactly the model's latent sites, those of single examples aside.
    """
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
        _refuse_draw(nodes, values, [], unknown)
        raise ValueError(
            f"The observed site must be one of {free}"
            + (f", but got `site='{site}'`." if site else ": pass its name as `site=`.")
        )
    observed = str(candidates[0])
    plates = _plates_of(nodes[observed])
    missing = [name for name in drawn if name != observed and not plates & _plates_of(nodes[name])]
    _refuse_draw(nodes, values, missing, unknown)
    return observed


def _plates_of(node: Any) -> set[str]:
    return {frame.name for frame in node["cond_indep_stack"] if frame.vectorized}


def _refuse_draw(
    nodes: Mapping[str, Any],
    values: Mapping[str, Tensor],
    missing: Sequence[str],
    unknown: Sequence[str],
) -> None:
    """Raise a ``ValueError`` if a draw lacks sites of the model, or has sites that it does not have."""
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


def left_to_the_model(
    trace: Any, observed: Any, values: Mapping[str, Tensor], is_whole: bool
) -> set[str]:
    """Return the latents of single examples that are to be drawn from the model, and say so.

    Args:
        trace: The trace of a run of the model at a draw.
        observed: Its node of the observation.
        values: The draw, by site.
        is_whole: Whether the run had all examples, and not a mini-batch of them.

    Returns:
        Their names: none where the posterior was fitted to as many examples as there are here.
    """
    plates = _plates_of(observed)
    local = [name for name in values if plates & _plates_of(trace.nodes[name])]
    kept = [name for name in local if is_whole and trace.nodes[name]["is_observed"]]
    new = [name for name in local if name not in kept]
    warn_of_local_latents(kept, new)
    return {*new}


def observed_log_prob(node: Any, y: Tensor) -> Tensor:
    """Return the log density of observations, in single precision at least, if they have its shape.

    It is zero where the model masks its observation.

    Args:
        node: The trace's node of the observed site.
        y: The observations.
    """
    likelihood, mask = node["fn"], node["infer"]["own_mask"]
    check_no_nan("y", y)
    check_shape("y", y, likelihood.batch_shape + likelihood.event_shape, "that of the predictions")
    y, likelihood = at_least_single(y), in_single(likelihood)
    if not likelihood.support.is_discrete:
        check_same_kind("y", y, "prediction.mean", likelihood.mean)
    elif _is_of_labels(likelihood):  # zeros and ones of any dtype, of which torch wants its own
        y = y.to(likelihood.mean)
    with autocast_off(y):
        log_density: Tensor = scale_and_mask(likelihood.log_prob(y), mask=mask)
    return log_density


def _is_of_labels(likelihood: Any) -> bool:
    return isinstance(base_of(likelihood), Bernoulli)


def tensors_in(model: Any) -> list[Tensor]:
    """Return the parameters and buffers of a model, which may be a function or under handlers."""
    return [tensor for module in modules_of(model) for tensor in own_tensors(module)]


def modules_of(model: Any) -> list[nn.Module]:
    """Return the modules of a model, which may be a function or under handlers."""
    module = poutine.unwrap(model)
    return [*module.modules()] if isinstance(module, nn.Module) else []


@contextmanager
def evaluation_mode(model: Any, differentiable: bool = False) -> Iterator[None]:
    """Switch dropout off and freeze running statistics, gradients off unless asked; put back after."""
    training = [module for module in modules_of(model) if module.training]
    try:
        for module in training:
            module.training = False
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            yield
    finally:
        for module in training:
            module.training = True
