"""Dependence of observations on weights and on other examples, traced through a model."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Self

import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_structvi._torch import BatchOrInstanceNorm
from pyro_structvi.maps.calls import Application, FactorApplication, Lookup
from pyro_structvi.sites.finding import (
    ValuesWithoutDraws,
    in_evaluation,
    modules_of,
    separate_randomness,
    trial_run,
)
from pyro_structvi.weights.lazy import WeightPlaceholder, as_drawn
from pyro_structvi.weights.site_role import SiteRole, SiteUse

Value = Callable[[str, Tensor], Tensor]  # from a site and a leaf of the graph to its value


def trace_gradient_paths(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    uses: Mapping[str, SiteUse],
) -> None:
    """Record in ``uses`` which weights must be sampled for gradients, and whether examples interact.

    A run with placeholders shows which weights receive gradients of the observations; if some receive
    none, a run with ordinary weights shows whether the placeholder is the reason. A run on the same
    samples with another first row of each layer's outputs shows whether other examples depend on it.
    Batch normalizations use their running statistics here.
    """
    values: dict[str, Tensor] = {}
    normalizations = [part for part in modules_of(model) if isinstance(part, BatchOrInstanceNorm)]

    def run(value_of: Value) -> _Probe:
        probe = _Probe(values, value_of)
        with trial_run(model), in_evaluation(normalizations), separate_randomness():
            with torch.enable_grad(), probe:
                model(*args, **kwargs)
            probe.find_reached()
        return probe

    if torch.is_inference_mode_enabled() or not uses:
        return
    plain = run(partial(_ProbedWeight, changed=()))
    used = {name for name, use in uses.items() if use.count and not use.eager_reason}
    if used - plain.reached:
        drawn = run(lambda name, leaf: leaf.clone())  # which a model may change in place
        _refuse(used - drawn.reached, drawn, run)
        for name in (used & drawn.reached) - plain.reached:
            uses[name].eager_reason = "an operation below autograd"
    changed = [
        name
        for name, use in uses.items()
        if use.local_reparam is not True or not use.has_unknown_rows  # which a warning names
    ]
    if any(uses[name].allows_outputs for name in changed):
        meet = plain.differs(run(partial(_ProbedWeight, changed=changed)), 1)
        for use in uses.values():
            use.examples_interact |= meet


def _refuse(names: set[str], drawn: "_Probe", run: Callable[[Value], "_Probe"]) -> None:
    """Raise if observations depend on sites that receive no gradient."""

    def with_another(other: str) -> _Probe:
        return run(lambda name, leaf: 1.5 * leaf if name == other else leaf.clone())

    wrong = [name for name in sorted(names) if drawn.differs(with_another(name), 0)]
    if wrong:
        raise RuntimeError(
            f"The observations depend on the sites {wrong}, and no gradient leads back to them: the "
            "model uses them under `torch.no_grad()`, by `detach()`, or in an operation without a "
            "gradient. Their posteriors would go to their priors. Let gradients through, or leave these "
            'weights out, as by `bayesianize(net, prior={"name": None, "*": 1.0})`.'
        )


class _Probe(ValuesWithoutDraws):
    """Records the log densities of observations."""

    def __init__(self, values: dict[str, Tensor], value_of: Value) -> None:
        super().__init__()
        self.values, self._value_of = values, value_of
        self.log_probs: dict[str, Tensor] = {}
        self.reached: set[str] = set()
        self._leaves: dict[int, str] = {}

    def _pyro_post_sample(self, msg: Any) -> None:
        name = msg["name"]
        value = self.values.setdefault(name, msg["value"].detach())
        if SiteRole.of(msg).is_observation:
            log_prob = _log_prob(msg["fn"], value).nan_to_num()
            self.log_probs[name] = log_prob.reshape(log_prob.shape[:1].numel(), -1)
        elif not msg["is_observed"] and not site_is_subsample(msg):
            leaf = value.detach().requires_grad_()
            self._leaves[id(leaf)] = name
            msg["value"] = self._value_of(name, leaf)

    def find_reached(self) -> None:
        """Find the sites that receive gradients of the log densities, and free the graph."""
        waiting: list[Any] = [value.grad_fn for value in self.log_probs.values()]
        nodes = set[Any]()
        while waiting:
            node = waiting.pop()
            if node is not None and node not in nodes:
                nodes.add(node)
                waiting += [each for each, _ in node.next_functions]
        ends = {id(getattr(node, "variable", None)) for node in nodes}
        self.reached = {name for leaf, name in self._leaves.items() if leaf in ends}
        self.log_probs = {name: value.detach() for name, value in self.log_probs.items()}

    def differs(self, other: Self, first: int) -> bool:
        """Whether log densities of another run differ, from example ``first`` on."""
        pairs = ((value, other.log_probs[name]) for name, value in self.log_probs.items())
        return any(bool((own != others)[first:].any()) for own, others in pairs)


def _log_prob(likelihood: Any, value: Tensor) -> Tensor:
    """Return log densities; invalid values are replaced, since the first step refuses them."""
    try:
        is_possible = bool(likelihood.support.check(value).all())
    except NotImplementedError:
        is_possible = True
    log_prob: Tensor = likelihood.log_prob(value if is_possible else likelihood.sample())
    return log_prob


class _ProbedWeight(WeightPlaceholder):
    """A placeholder with a known weight, whose outputs may be changed in the first row."""

    _value: Tensor
    _changes: bool

    def __new__(cls, name: str, value: Tensor, changed: Collection[str]) -> Self:
        weight = cls._make(value, value.shape, SiteUse(name))
        weight._value, weight._changes = value.clone(), name in changed  # a model may write into it
        return weight

    def draw(self) -> Tensor:
        return self._value

    def sample_outputs(self, call: Application | Lookup | FactorApplication) -> Tensor:
        if isinstance(call, Lookup):
            return self._changed(call.shape_outputs(self._value[call.indices]))
        if isinstance(call, FactorApplication):
            return self._changed(call.function(call.x, self._value))
        linear_map, x, _, bias, arrangement = call
        stack = 0 if arrangement is None else arrangement.stack
        matrix = call.matrix_of(self._value)
        return self._changed(linear_map(as_drawn(x), matrix, as_drawn(bias)), stack)

    def _changed(self, outputs: Tensor, stack: int = 0) -> Tensor:
        if not self._changes:
            return outputs
        changed, row = outputs.clone(), (0,) * (stack + 1)
        changed[row] = 2 * outputs[row].abs() + 1
        return changed
