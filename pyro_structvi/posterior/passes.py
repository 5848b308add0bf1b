"""Runs of a model at many joint draws of a posterior, several draws in one pass."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import pyro.poutine as poutine
import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.constraints import is_dependent
from torch.nn.modules.module import register_module_forward_hook

from pyro_structvi._checks import Program, brief, check_tensors
from pyro_structvi._nested import map_nested, nested_tensors
from pyro_structvi._pyro import unwrapped
from pyro_structvi._torch import own_tensors, take_apart
from pyro_structvi.posterior.runs import (
    BatchStatistics,
    check_whole,
    find_observation,
    is_unused,
    run_at_draw,
    sites_from_model,
    warn_of_averaged_statistics,
    warn_of_shared_statistics,
)
from pyro_structvi.sites.autoguide import give_model
from pyro_structvi.sites.finding import modules_of, separate_randomness
from pyro_structvi.sites.site_posterior import are_plain, in_one_pass, stack_draws
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.structures.global_inducing.guide import GlobalInducingGuide
from pyro_structvi.structures.points import SameMember, are_points
from pyro_structvi.weights.lazy import as_drawn
from pyro_structvi.weights.site_role import SiteRole, sample_nodes

Posterior = Program | Mapping[str, Tensor]
Values = dict[str, Tensor]
Draws = tuple[Values, Values]  # values of sites, and statistics of batch normalization
D = TypeVar("D")
Batch = tuple[tuple[Any, ...], Tensor | None]
# From the observed node, the model's return value and the observations to what is kept.
Read = Callable[[Any, Any, Tensor | None], Values]

DEFAULT_NUM_SAMPLES = 100
_VALID = "is valid"  # among the outputs of a run


def check_posterior(model: Callable[..., Any], posterior: Any) -> None:
    """Raise a ``TypeError`` unless a posterior of a model is a guide or draws by site.

    A guide that was unpickled gets its model.
    """
    if isinstance(posterior, type):
        got = f"the class {posterior.__name__}. Make a guide of the model, `{posterior.__name__}(model)`"
    elif isinstance(posterior, Mapping):
        return
    elif not callable(posterior):
        got = f"a {type(posterior).__name__}. Pass the guide that was fitted"
    elif unwrapped(posterior) is unwrapped(model):
        got = "the model. Pass the guide that was fitted to it"
    else:
        if isinstance(posterior, StructuredGuide):
            give_model(posterior, model)
            posterior.warn_of_other_model()
        return
    raise TypeError(f"`posterior` must be a guide or a dict of draws by site, but got {got}.")


def as_arguments(x: Any, name: str = "x") -> tuple[Any, ...]:
    """Return a model's arguments, given a single input or a tuple of inputs."""
    check_tensors(name, x)
    return x if isinstance(x, tuple) else (x,)


def as_batches(args: tuple[Any, ...], y: Tensor | None, batch_size: int | None) -> list[Batch]:
    """Split a model's arguments and observations into mini-batches along the first dimension."""
    if y is not None:
        check_tensors("y", y)
    # Tensors in a mapping may have another length unless they are split, as the edges of a graph.
    split = args if batch_size is not None else [each for each in args if isinstance(each, Tensor)]
    lengths = [len(value) for value in nested_tensors((split, y))]
    size = max(lengths, default=1)
    if set(lengths) - {size} or size == 0:
        raise ValueError(f"`x` and `y` must have one length, but got {lengths}.")
    if batch_size is None:
        return [map_nested(lambda tensor: tensor, (args, y))]
    parts = [slice(start, start + batch_size) for start in range(0, size, batch_size)]
    return [map_nested(itemgetter(part), (args, y)) for part in parts]


def batches_of(
    inputs: tuple[Any, ...], y: Tensor | None, batch_size: int | None, posterior: Posterior
) -> list[Batch]:
    """Return the mini-batches of inputs, or of a loader of inputs or tuples ``(*inputs, y)``."""
    if not inputs or any(isinstance(each, (int, float)) for each in inputs):
        raise TypeError(
            f"`inputs` must be tensors or mini-batches, but got {brief(inputs)}. Write "
            "`predict(model, guide, x, num_samples=100)`."
        )
    x = inputs if inputs[1:] else inputs[0]
    is_given = isinstance(x, (Tensor, tuple, list, str, Mapping)) or hasattr(x, "__array__")
    if is_given or not isinstance(x, Iterable):
        return as_batches(as_arguments(x), y, batch_size)
    if y is not None or batch_size is not None:
        raise ValueError(
            "`y` and `batch_size` must be left out where `x` is a loader. Its mini-batches have a size, "
            "and may be tuples `(x, y)`."
        )
    device = next((p.device for p in getattr(posterior, "parameters", tuple)()), None)
    found: list[Batch] = []
    with separate_randomness():  # a loader draws a seed
        batches = [map_nested(lambda value: value.to(device), batch) for batch in x]
    for batch in batches:
        parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        found += as_batches(parts[:-1] or parts, parts[-1] if parts[1:] else None, None)
    if not found:
        raise ValueError("`x` must give at least one mini-batch, but is a loader that gives none.")
    return found


def count_draws(posterior: Posterior, num_samples: int | None) -> int:
    """Return the number of draws."""
    if not isinstance(posterior, Mapping):
        return num_samples or getattr(posterior, "num_points", 0) or DEFAULT_NUM_SAMPLES
    sizes = {name: len(draws) for name, draws in posterior.items()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise ValueError(
            f"All sites must have at least one and the same number of draws, but got {sizes}."
        )
    available = next(iter(sizes.values()))
    if num_samples is not None and num_samples > available:
        raise ValueError(
            f"`num_samples` must be at most the {available} draws given, but got {num_samples}."
        )
    return num_samples or available


def spaced(available: int, total: int) -> list[int]:
    """Return ``total`` evenly spaced indices of draws, so that successive chains have equal shares."""
    step = (available - 1) / max(total - 1, 1)
    return [round(step * number) for number in range(total)]


def _sampler(
    posterior: Posterior, total: int, args: tuple[Any, ...]
) -> Callable[[Sequence[int]], Values]:
    """Return a function from numbers of draws below ``total`` to draws ``(count, *shape)`` by site."""
    if isinstance(posterior, Mapping):
        chosen = spaced(count_draws(posterior, None), total)
        return lambda numbers: {
            name: draws[[chosen[number] for number in numbers]] for name, draws in posterior.items()
        }
    if isinstance(posterior, StructuredGuide):
        return partial(posterior.joint_posterior().draw_many, local=True)
    return lambda numbers: stack_draws([_draw_from_guide(posterior, args) for _ in numbers])


def _draw_from_guide(guide: Callable[..., Any], args: tuple[Any, ...]) -> Values:
    """Return the values of a guide's sites without auxiliary sites."""
    with poutine.block():
        trace = poutine.trace(poutine.mask(guide, mask=False)).get_trace(*args)
    sites = sample_nodes(trace)
    roles = {name: SiteRole.of(site) for name, site in sites.items()}
    observed = [name for name, role in roles.items() if role.is_observation]
    if observed:
        raise TypeError(
            f"`posterior` must be a guide, which samples latent sites only, but got a program with the "
            f"observations {observed}. Pass the guide, not the model."
        )
    return {
        name: as_drawn(sites[name]["value"])
        for name, role in roles.items()
        if not role.is_auxiliary
    }


class Pass(NamedTuple):
    """Several draws ``(draws, *shape)`` at the mini-batch of a number, and what was read there."""

    batch: int
    values: Values  # without sites sampled from the model
    outputs: Values


class Passes:
    """Runs of a model at draws of a posterior, vectorized by :func:`torch.func.vmap`.

    The first draw runs alone and determines the local latent sites, the memory of a draw and
    ``observed``, the name of the observed site. Nothing can be validated under vmap, so a pass with an
    invalid distribution or observation runs again one by one, which raises the usual error. A model that
    torch cannot vectorize also runs one by one. ``read`` returns what is kept of a run.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        posterior: Posterior,
        batches: Sequence[Batch],
        site: str | None,
        read: Read,
        max_memory: float,
        batch_statistics: Any = None,
    ) -> None:
        self._model, self._posterior, self._batches = model, posterior, batches
        self._site, self._read, self._max_bytes = site, read, max_memory * 2**30
        self._statistics: BatchStatistics | None = None
        if batch_statistics is not None:
            parts = posterior.modules() if isinstance(posterior, StructuredGuide) else ()
            if any(isinstance(part, GlobalInducingGuide) for part in parts):
                raise NotImplementedError(
                    "`batch_statistics` is not for a GlobalInducingGuide, since a draw runs the net on "
                    "the inducing points by its running statistics, and fits no others. Leave it out, "
                    "or use a normalization without running statistics, such as `torch.nn.GroupNorm`."
                )
            args = as_arguments(batch_statistics, "batch_statistics")
            self._statistics = BatchStatistics(model, args)
        self._selects = isinstance(posterior, StructuredGuide)  # whose draws are of all examples
        self._local = posterior.local_site_names if isinstance(posterior, StructuredGuide) else []
        self._absent: set[str] = set()  # local sites that the model samples in training only
        self._new: set[str] = set()
        self._unused: str | None = None
        self._seed: int | None = None  # of the last run, if runs sample sites from the model
        self._in_turn = False
        self.observed = ""

    def run(self, total: int) -> Iterator[Pass]:
        """Yield the passes of all draws; each draw runs on all mini-batches before the next one."""
        draw = _sampler(self._posterior, total, self._batches[0][0])
        values = draw(range(1))
        with counted_bytes() as layers:
            first = self._measured(values)
            outputs = self._run_first(first)
        self._warn_of_statistics()
        yield from self._run_batches(first, outputs)
        weights, outside = _bytes_of(values.values()), sum(layers) + _bytes_of(outputs.values())
        # The number of draws at once depends on no inputs, so that a seed determines the draws.
        at_once, in_pass = (
            max(1, int(self._max_bytes / max(1, size))) for size in (weights, weights + outside)
        )
        for start in range(1, total, at_once):
            for part in _split(draw(range(start, min(start + at_once, total))), in_pass):
                yield from self._run_batches(self._measured(part))

    def _warn_of_statistics(self) -> None:
        """Warn if the draws of a guide share running statistics that fit none of them."""
        guide = self._posterior
        if self._statistics or not isinstance(guide, StructuredGuide):
            return
        if guide.num_members > 1 or any(isinstance(part, SameMember) for part in guide.modules()):
            warn_of_shared_statistics(self._model)
        elif guide.local_site_names or are_points(guide.all_posteriors()):
            return  # whose statistics are of other examples, or of the only draw
        elif guide.is_initialized:
            warn_of_averaged_statistics(self._model, guide, self._batches[0][0])

    def _run_batches(self, draws: Draws, first: Values | None = None) -> Iterator[Pass]:
        """Yield the passes of draws, whose outputs at the first mini-batch may be known."""
        left_out = self._new | self._absent
        kept = {name: value for name, value in draws[0].items() if name not in left_out}
        for batch in range(len(self._batches)):
            known = first if batch == 0 else None
            yield Pass(batch, kept, self._run(draws, batch) if known is None else known)

    def _measured(self, values: Values) -> Draws:
        """Return draws with their statistics of batch normalization; none without inputs for them."""
        statistics = self._statistics
        if statistics is None:
            return values, {}

        def measure(own: Values) -> Values:
            return statistics.measure(partial(self._run_model, own))

        return values, self._run_each(measure, values)

    def _run_first(self, draws: Draws) -> Values:
        """Run the first draw, and again if it has sites that must be sampled from the model."""
        own, inputs = _only(draws), self._batches[0][0]
        state = (
            tensor for part in modules_of(self._model) for tensor in own_tensors(part).values()
        )
        self._in_turn = not are_plain([*own[0].values(), *inputs, *state])
        with separate_randomness():  # this run samples observations, which later runs may leave out
            trace, node = self._trace(own, 0, counts=True)
        check_whole(node, inputs)
        self._absent = {name for name in own[0] if name not in trace.nodes}
        self._unused = self.observed if is_unused(trace, node) else None
        self._new = sites_from_model(trace, node, own[0], len(self._batches) == 1)
        if self._new or self._unused is None:
            self._seed = int(torch.randint(2**62, ()))
        if self._new:
            return self._run(draws, 0)
        return stack_draws([self._outputs(trace, node, 0)])

    def _run(self, draws: Draws, batch: int) -> Values:
        """Return the outputs of the model at draws."""

        def run(own: Draws) -> Values:
            trace, node = self._trace(own, batch)
            is_valid = _is_valid(trace, node, self._batches[batch][1])
            return {**self._outputs(trace, node, batch), _VALID: is_valid}

        if self._seed is None:
            return self._run_each(run, draws)
        with separate_randomness():  # so that the draws to come do not depend on the inputs
            self._seed += 1  # `separate_randomness` has given the number itself to the first run
            torch.manual_seed(self._seed)
            return self._run_each(run, draws)

    def _run_each(self, run: Callable[[D], Values], draws: D) -> Values:
        """Run a function at several draws in one pass if possible, else one by one."""
        if not self._in_turn and len(next(nested_tensors(draws))) > 1:
            found = in_one_pass(run, draws, modules_of(self._model))
            self._in_turn = found is None
            if found is not None and found.pop(_VALID, torch.tensor(True)).all():
                return found
        found = stack_draws([run(_only(one)) for one in _split(draws, 1)])
        found.pop(_VALID, None)
        return found

    def _run_model(self, values: Values, args: tuple[Any, ...], counts: bool = False) -> Any:
        return run_at_draw(
            self._model, values, args, self._new, self._unused, counts, self._selects
        )

    def _trace(self, draw: Draws, batch: int, counts: bool = False) -> tuple[Any, Any]:
        """Run the model at a draw; return the trace and its observed node."""
        (values, statistics), (args, _) = draw, self._batches[batch]
        with self._statistics.used(statistics) if self._statistics else nullcontext():
            trace = self._run_model(values, args, counts)
        self.observed = find_observation(trace, values, self._site, self._local)
        return trace, trace.nodes[self.observed]

    def _outputs(self, trace: Any, node: Any, batch: int) -> Values:
        returned = as_drawn(trace.nodes["_RETURN"]["value"])
        return self._read(node, returned, self._batches[batch][1])


def _is_valid(trace: Any, observed: Any, y: Tensor | None) -> Tensor:
    """Whether sampled sites have valid arguments and the observations are in the support."""
    drawn = [node["fn"] for node in sample_nodes(trace).values() if not node["is_observed"]]
    checks = [check for distribution in drawn for check in _checks_of(distribution)]
    if y is not None:
        checks.append(observed["fn"].support.check(y).all())
    return reduce(torch.logical_and, checks) if checks else torch.tensor(True)


def _checks_of(distribution: Any) -> Iterator[Tensor]:
    """Yield whether each argument of a distribution and its parts obeys its constraint."""
    for name, constraint in distribution.arg_constraints.items():
        is_given = name in vars(distribution)
        if is_given and not is_dependent(constraint):
            yield constraint.check(getattr(distribution, name)).all()
    for value in vars(distribution).values():
        if isinstance(value, Distribution):
            yield from _checks_of(value)


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Collect the bytes of the outputs of all modules that run in this block."""
    found: list[int] = []
    handle = register_module_forward_hook(
        lambda module, args, outputs: found.append(_bytes_of(take_apart(outputs)[0]))
    )
    try:
        yield found
    finally:
        handle.remove()


def _bytes_of(values: Iterable[Any]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _split(draws: D, size: int) -> list[D]:
    """Split stacked draws into parts of a size."""
    starts = range(0, len(next(nested_tensors(draws))), size)
    return [map_nested(itemgetter(slice(start, start + size)), draws) for start in starts]


def _only(draws: D) -> D:
    """Return the single draw of a stack."""
    return map_nested(lambda value: value.squeeze(0), draws)
