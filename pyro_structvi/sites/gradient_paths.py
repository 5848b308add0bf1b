"""Dependence of observations on weights and on other examples, traced through a model."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_structvi._torch import BatchOrInstanceNorm
from pyro_structvi.linalg.matrices import at_least_single
from pyro_structvi.maps.calls import Application, FactorApplication, Lookup
from pyro_structvi.sites.finding import in_evaluation, modules_of, separate_randomness, trial_run
from pyro_structvi.sites.latent_site import bijection_onto
from pyro_structvi.sites.trial_handlers import TrialHandler
from pyro_structvi.weights.lazy import WeightPlaceholder, as_drawn
from pyro_structvi.weights.site_role import SiteRole, SiteUse
from pyro_structvi.weights.torch_distributions import in_single, log_density, may_depend

_ROUNDING = 1000  # units of the last digit, by which sums over examples may differ

Value = Callable[[str, Tensor], Tensor]  # from a site and a leaf of the graph to its value


def trace_gradient_paths(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    uses: Mapping[str, SiteUse],
    joint: Iterable[Collection[str]] = (),
) -> None:
    """Record in ``uses`` which weights must be sampled for gradients, and whether examples interact.

    A run with placeholders shows which weights receive gradients of the observations; if some receive
    none, a run with ordinary weights shows whether the placeholder is the reason. Runs on the same
    samples with other outputs of half of the examples show whether log densities, also of latents given
    others, are sums over examples. Batch normalizations use their running statistics here.

    A prior that depends on another site of one of the ``joint`` posteriors is recorded, too.

    Raises:
        RuntimeError: If observations depend on a site that receives no gradient.
    """
    values: dict[str, Tensor] = {}
    normalizations = [part for part in modules_of(model) if isinstance(part, BatchOrInstanceNorm)]

    def run(value_of: Value) -> _Probe:
        probe = _Probe(values, value_of)
        with trial_run(model), in_evaluation(normalizations), separate_randomness():
            with torch.enable_grad():
                probe.run(model, args, kwargs)
            probe.find_reached()
        return probe

    if torch.is_inference_mode_enabled() or not uses:
        return
    plain = run(partial(_ProbedWeight, changed=()))
    for names in joint:
        _note_dependent_priors(names, plain, uses)
    used = {name for name, use in uses.items() if use.count and not use.eager_reason}
    if used - plain.reached:
        drawn = run(lambda name, leaf: leaf.clone())  # which a model may change in place
        _refuse(used - drawn.reached, drawn, run)
        for name in (used & drawn.reached) - plain.reached:
            uses[name].eager_reason = "an operation below autograd"
    changed = [
        name
        for name, use in uses.items()
        if use.allows_outputs and not (use.local_reparam is True and use.has_unknown_rows)
    ]  # a warning names those with unknown rows
    if changed:
        halves = [run(partial(_ProbedWeight, changed=changed, half=half)) for half in (0, 1)]
        if plain.is_changed_by_each(halves):
            both = run(partial(_ProbedWeight, changed=changed, half=None))
            for use in uses.values():
                use.examples_interact |= not plain.is_sum_of_changes(halves, both)


def _note_dependent_priors(
    names: Collection[str], probe: "_Probe", uses: Mapping[str, SiteUse]
) -> None:
    """Let sites of one posterior be sampled if the prior of one depends on another."""
    for child in names:
        parents = (probe.parents.get(child, set()) & {*names}) - {child}
        for name in (child, *parents) if parents else ():
            uses[name].is_dependent |= name == child
            uses[name].eager_reason = "a prior given another site of its posterior"


def _refuse(names: set[str], drawn: "_Probe", run: Callable[[Value], "_Probe"]) -> None:
    """Raise if observations depend on sites that receive no gradient."""

    def with_another(other: str) -> _Probe:
        bijection = bijection_onto(drawn.supports[other])

        def value_of(name: str, leaf: Tensor) -> Tensor:
            return bijection(bijection.inv(leaf) + 0.5) if name == other else leaf.clone()

        return run(value_of)

    wrong = [name for name in sorted(names) if drawn.differs_from(with_another(name))]
    if wrong:
        raise RuntimeError(
            f"The observations depend on the sites {wrong}, and no gradient leads back to them: the "
            "model uses them under `torch.no_grad()`, by `detach()`, or in an operation without a "
            "gradient. Their posteriors would go to their priors. Let gradients through, or leave these "
            'weights out, as by `bayesianize(net, prior={"name": None, "*": 1.0})` by the net\'s names.'
        )


class _Probe(TrialHandler):
    """Records the log densities of observations, and of latents whose prior may depend on others."""

    def __init__(self, values: dict[str, Tensor], value_of: Value) -> None:
        super().__init__()
        self.values, self._value_of = values, value_of
        self.log_probs: dict[str, Tensor] = {}
        self.observed: list[str] = []
        self.reached: set[str] = set()
        self.parents: dict[str, set[str]] = {}  # of latents, by their priors
        self.supports: dict[str, Any] = {}  # of latents
        self._leaves: dict[int, str] = {}

    def note_hidden(self, msg: Any) -> None:
        drawn = msg["value"]

        def fixed(name: str, leaf: Tensor) -> Tensor:
            # A draw passes gradients on to the weights that its prior depends on.
            return leaf + drawn - drawn.detach() if drawn.requires_grad else leaf.clone()

        self._note(msg, fixed)

    def _pyro_post_sample(self, msg: Any) -> None:
        self._note(msg, self._value_of)

    def _note(self, msg: Any, value_of: Value) -> None:
        name, value = msg["name"], msg["value"]
        if not msg["is_observed"]:  # an observation may depend on weights, such as a residual
            value = self.values.setdefault(name, value.detach())
        is_observation = SiteRole.of(msg).is_observation
        is_latent = not (is_observation or msg["is_observed"] or site_is_subsample(msg))
        if is_observation or (is_latent and may_depend(msg["fn"])):
            # In bfloat16 rounding would hide that examples interact.
            log_prob = log_density(in_single(msg["fn"]), at_least_single(value)).nan_to_num()
            # Which examples count, and how much, may depend on the others.
            log_prob = scale_and_mask(log_prob, msg["scale"], msg["mask"])
            self.log_probs[name] = log_prob.flatten()
        if is_observation:
            self.observed.append(name)
        if is_latent:
            leaf = value.detach().requires_grad_(value.is_floating_point())
            self._leaves[id(leaf)], self.supports[name] = name, msg["fn"].support
            msg["value"] = value_of(name, leaf)

    def find_reached(self) -> None:
        """Find the sites that receive gradients of the observations and of latents; free the graph."""
        self.reached = self._reached_from(self.observed)
        latents = [name for name in self._leaves.values() if name in self.log_probs]
        self.parents = {name: self._reached_from([name]) for name in latents}
        self.log_probs = {name: value.detach() for name, value in self.log_probs.items()}

    def _reached_from(self, names: Iterable[str]) -> set[str]:
        waiting: list[Any] = [self.log_probs[name].grad_fn for name in names]
        nodes = set[Any]()
        while waiting:
            node = waiting.pop()
            if node is not None and node not in nodes:
                nodes.add(node)
                waiting += [each for each, _ in node.next_functions]
        ends = {id(getattr(node, "variable", None)) for node in nodes}
        return {name for leaf, name in self._leaves.items() if leaf in ends}

    @property
    def flat(self) -> Tensor:
        """The recorded log densities, with digits for their sums."""
        return torch.cat([
            torch.zeros(0),
            *(each.cpu() for each in self.log_probs.values()),
        ]).double()

    def differs_from(self, other: Self) -> bool:
        """Whether log densities of the observations differ in another run."""
        pairs = ((self.log_probs[name], other.log_probs[name]) for name in self.observed)
        return any(bool((own != changed).any()) for own, changed in pairs)

    def is_changed_by_each(self, others: Sequence[Self]) -> bool:
        """Whether a log density changes in every other run."""
        changed = [self.flat != other.flat for other in others]
        return bool(torch.stack(changed).all(0).any())

    def is_sum_of_changes(self, halves: Sequence[Self], both: Self) -> bool:
        """Whether the changes of two runs add up to the change of a run with both.

        The expectation of such a log density needs the distribution of one example at a time.
        """
        first, second = (half.flat for half in halves)
        rounding = _ROUNDING * max(torch.finfo(each.dtype).eps for each in self.log_probs.values())
        sizes = torch.stack([each.flat.abs() for each in (self, *halves, both)]).amax(0)
        excess = first + second - self.flat - both.flat
        return bool((excess.abs() <= rounding * sizes).all())  # not where it is NaN


class _ProbedWeight(WeightPlaceholder):
    """A placeholder with a known weight, whose outputs may be changed in half of the rows or in all."""

    _value: Tensor
    _changes: bool
    _half: int | None

    def __new__(
        cls, name: str, value: Tensor, changed: Collection[str], half: int | None = None
    ) -> Self:
        weight = cls._make(value, value.shape, SiteUse(name))
        weight._value = value.clone()  # a model may write into it
        weight._changes, weight._half = name in changed, half
        return weight

    def draw(self) -> Tensor:
        return self._value

    def sample_outputs(self, call: Application | Lookup | FactorApplication) -> Tensor:
        if isinstance(call, Lookup):
            return self._changed(call.shape_outputs(self._value[call.indices]))
        if isinstance(call, FactorApplication):
            return self._changed(call.function(call.x, self._value))
        linear_map, x, _, bias, _ = call
        matrix = call.matrix_of(self._value)
        return self._changed(linear_map(as_drawn(x), matrix, as_drawn(bias)))

    def _changed(self, outputs: Tensor) -> Tensor:
        if not self._changes:
            return outputs
        changed = 2 * outputs.abs() + 1
        if self._half is None:
            return changed
        is_second = _is_in_second_half(outputs.shape[:1].numel()).to(outputs.device)
        rows = is_second if self._half else ~is_second
        return torch.where(rows.reshape(-1, *[1] * (outputs.dim() - 1)), changed, outputs)


def _is_in_second_half(size: int) -> Tensor:
    """Divide rows by the Thue-Morse sequence.

    It divides pairs of neighbours, of equal halves, and of a row and its reflection.
    """
    found = torch.zeros(1, dtype=torch.bool)
    while len(found) <= size:
        found = torch.cat([found, ~found])
    rows = found[:size]
    # The first 4, 16, 64, ... entries are their own reflection.
    return found[1 : size + 1] if torch.equal(rows, rows.flip(0)) else rows
