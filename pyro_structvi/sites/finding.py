"""The latent sites of a model and their uses, from its declarations and from a run."""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Self

import pyro
import pyro.poutine as poutine
import torch
from pyro.nn import PyroModule
from pyro.ops.tensor_utils import periodic_repeat
from pyro.poutine.util import site_is_subsample
from pyro.util import get_rng_state, set_rng_state
from torch import Tensor, nn

from pyro_structvi._checks import brief, check, warn_user
from pyro_structvi._nested import modules_reached_by
from pyro_structvi._pyro import (
    ONE_THREAD,
    declared_name,
    declared_samples,
    outside_plates,
    unwrapped,
    without_handlers,
)
from pyro_structvi._torch import inside_checkpoint, inside_forward_derivative, inside_transform
from pyro_structvi.linalg.matrices import shrink
from pyro_structvi.maps.calls import Call
from pyro_structvi.nn.conversion import layout_of, parametrized
from pyro_structvi.nn.likelihood import Likelihood
from pyro_structvi.nn.priors import TiedPrior
from pyro_structvi.nn.random_module import buffers_that_change, prior_of
from pyro_structvi.sites.family import InitLocFn
from pyro_structvi.sites.latent_site import LatentSite, Plate, bijection_onto, has_bijection
from pyro_structvi.sites.trial_handlers import TrialHandler
from pyro_structvi.weights.lazy import WeightPlaceholder
from pyro_structvi.weights.site_role import CHECKPOINT, TRANSFORM, SiteRole, SiteUse
from pyro_structvi.weights.torch_distributions import (
    base_of,
    example_of,
    is_positive,
    log_density,
    median,
)

LAYOUT = ("fan_in", "input_dim", "groups")


class UnusedSiteWarning(UserWarning):
    """Some sites are unused in the run that counts uses."""


class OtherRowsWarning(UserWarning):
    """Outputs are sampled independently for rows that are not examples."""


@dataclass
class FoundSite:
    """A latent site of a model; ``initial`` is its value before the net was made Bayesian, if any."""

    site: LatentSite
    prior: Any
    initial: Tensor | None
    use: SiteUse
    is_declared: bool = False
    given_plate: str = ""  # around it, whose subsample the model receives


def find_declared_sites(model: Any) -> dict[str, FoundSite]:
    """Find the ``PyroSample`` attributes of a module tree, without running it.

    A batch belongs in a plate, which only a run shows.
    """
    found: dict[str, FoundSite] = {}
    if not isinstance(model, nn.Module):  # such as a handler, which may hide sites
        return found
    computed = parametrized(model.modules())
    for module in model.modules():
        if not isinstance(module, PyroModule):
            continue
        for attribute, given in declared_samples(module).items():
            if isinstance(given, TiedPrior):  # another module's site
                continue
            prior = prior_of(module, attribute)
            # A tensor is a deterministic function of other sites.
            if isinstance(prior, Tensor) or prior.batch_shape:
                continue
            name = declared_name(module, attribute)
            if name in found:
                raise ValueError(
                    f"Two modules of the model declare the site '{name}', since a plain module around "
                    "them gives no names. Put the net into a `Classifier` or another PyroModule, or "
                    "call `pyro.nn.module.to_pyro_module_(net)`."
                )
            initial = module.__dict__.get("initial_values", {}).get(attribute)
            shape = torch.Size(prior.shape())
            layout = layout_of(computed.get(id(module), module), shape)
            site = _describe(name, shape, prior, **vars(layout))
            found[name] = FoundSite(site, prior, initial, SiteUse(name), is_declared=True)
    return found


def modules_of(model: Any) -> list[nn.Module]:
    """Return the modules of a model, which may be under handlers, or a function that names them."""
    roots = modules_reached_by(model)
    return [*dict.fromkeys(part for root in roots for part in root.modules())]


@contextmanager
def in_evaluation(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run a block with modules in evaluation mode."""
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def check_call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise a ``TypeError`` unless a model accepts these arguments."""
    if refusal := _refusal(model, args, kwargs):
        program = unwrapped(model)
        is_net = isinstance(program, nn.Module) and not isinstance(program, Likelihood) and args
        net = "A net alone is no model of observations: wrap it, as in `Regressor(net)`."
        others = "Give the model's arguments, such as `(x, y)` or `{'x': inputs, 'y': y}`."
        raise TypeError(
            f"`model` must take the {len(args) + len(kwargs)} arguments given, but {brief(program)} "
            f"says: {refusal}. {net if is_net else others}"
        )


def check_runs_on_inputs(model: Any, args: tuple[Any, ...]) -> None:
    """Raise a ``TypeError`` unless a model accepts inputs without observations."""
    if refusal := _refusal(model, args, {}):
        raise TypeError(
            f"`model` must run on inputs alone, but {brief(unwrapped(model))} says: {refusal}. "
            "Give its observations a default, as in `def forward(self, x, y=None)`."
        )


def _refusal(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the words by which the signature of a model refuses arguments, None if it takes them."""
    program = without_handlers(model)
    try:
        signature(getattr(program, "forward", program)).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def find_sites_by_running(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, FoundSite]:
    """Run the model once on samples of its prior, and record its latent sites and their uses.

    Positive sites, such as scales, are at their median. Buffers of the model, such as running
    statistics, are restored.
    """
    check_call(model, args, kwargs)
    recorder = _SiteRecorder()
    with trial_run(model):
        recorder.run(model, args, kwargs)
    for counted in recorder.counted.values():
        counted.check_unchanged()
    declared = find_declared_sites(unwrapped(model))
    reasons = {found.use.eager_reason for found in recorder.found.values()} - {""}
    for name, found in recorder.found.items():
        use, counted, examples = found.use, recorder.counted[name], recorder.num_examples
        use.has_unknown_rows = bool(examples and counted.num_examples - examples)
        use.is_read = use.count != counted.num_lookups
        use.is_uncompared = counted.num_examples == {1} or not recorder.has_observation
        use.has_other_rows = use.has_unknown_rows or counted.is_indexed
        # Another pass may use unused sites in a checkpoint or a transform as well.
        if reasons and use.count == 0:
            use.eager_reason = min(reasons)
        further: dict[str, Any] = {
            "is_local": any(each.name in recorder.observed_plates for each in found.site.plates)
        }
        if name in declared:
            found.is_declared, found.initial = True, declared[name].initial
            further |= {key: getattr(declared[name].site, key) for key in LAYOUT}
        found.site = replace(found.site, **further)
    return recorder.found


def warn_of_unused(found: Mapping[str, FoundSite], uses: Mapping[str, SiteUse]) -> None:
    """Warn of unused sites, unless a function uses none at all."""
    own = [name for name in found if not found[name].site.plates]
    unused = [name for name in own if uses[name].count == 0]
    if unused and (len(unused) < len(own) or any(found[name].is_declared for name in own)):
        warn_user(
            f"The model samples {unused}, and the pass that counts uses does not use them. If other "
            "passes do, all is well. If none does, a net may reach its layers past the module tree, "
            "for instance by a closure.",
            UnusedSiteWarning,
        )


def warn_of_other_rows(uses: Mapping[str, SiteUse]) -> None:
    """Warn of weights whose outputs would be sampled for rows that are not examples."""
    named = [name for name, use in uses.items() if use.has_unknown_rows and use.allows_outputs]
    if named:
        warn_user(
            f"The input rows of the weights at {named} are not the examples that the model observes, "
            "but, for instance, nodes of graphs or time steps. Their outputs are drawn independently, "
            'which drops the correlation between rows of one example. Pass `local_reparam="exact"` to '
            "draw these weights instead.",
            OtherRowsWarning,
        )


class CountedWeight(WeightPlaceholder):
    """A value that counts the calls it is an argument of, in its use."""

    _value: Tensor
    _copy: Tensor
    _counts: Counter[int | None]
    num_examples: set[int]
    is_indexed: bool
    num_lookups: int

    def __new__(cls, value: Tensor, use: SiteUse) -> Self:
        use.count = 0
        own = {"_counts": Counter(), "num_examples": set(), "is_indexed": False, "num_lookups": 0}
        copy = value.detach().clone()
        return cls._make(value, value.shape, use, _value=value, _copy=copy, **own)

    def draw(self) -> Tensor:
        self.add_use(None)
        return self._value

    def materialize(self) -> Tensor:
        self.use.eager_reason = "a reader of `parameters()`"
        return self.draw()

    def note_lookup(self) -> None:
        self.num_lookups += 1

    def item_of_stack(self, index: int) -> WeightPlaceholder:
        return _CountedItem(self, index)

    def check_unchanged(self) -> None:
        """Raise a ``ValueError`` if the model has written into the value."""
        if not (self._copy.is_meta or torch.equal(self._value, self._copy)):
            raise ValueError(
                f"The model writes into the value of the site '{self.use.name}', past autograd, so that "
                "its gradients and density would be those of another value. Compute the changed value, "
                "such as `F.linear(x, self.weight * mask)` for `self.weight.data *= mask`."
            )

    def add_use(self, index: int | None) -> None:
        """Count a use of the whole value, or of one weight of a stack; the most used weight decides.

        A use that may be repeated or differentiated counts twice.
        """
        if inside_checkpoint():
            self.use.eager_reason = CHECKPOINT
        elif inside_transform():  # where a sample would belong to the transform
            self.use.eager_reason = TRANSFORM
        self.is_indexed |= index is not None
        # The counting run has gradients off, unless the model differentiates its own net.
        is_repeated = torch.is_grad_enabled() or inside_transform() or inside_forward_derivative()
        self._counts[index] += 2 if is_repeated else 1
        items = (count for item, count in self._counts.items() if item is not None)
        self.use.count = self._counts[None] + max(items, default=0)

    def sample_outputs(self, call: Call) -> None:
        self.num_examples.add(call.num_examples)


class _CountedItem(WeightPlaceholder):
    """One weight of a counted stack."""

    _stack: CountedWeight
    _index: int

    def __new__(cls, stack: CountedWeight, index: int) -> Self:
        return cls._make(stack, stack.shape[1:], stack.use, _stack=stack, _index=index)

    def draw(self) -> Tensor:
        self._stack.add_use(self._index)
        return self._stack._value[self._index]


class _SiteRecorder(TrialHandler):
    """Records each latent site, with a value that counts its uses; scales are at their median."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, FoundSite] = {}
        self.has_observation = False
        self.observed_plates: set[str] = set()
        self.given_plates: set[str] = set()
        self.num_examples: set[int] = set()
        self.counted: dict[str, CountedWeight] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) and msg["value"] is not None and not _is_in_order(msg):
            self.given_plates.add(msg["name"])
        is_given = msg["value"] is not None
        super()._pyro_sample(msg)
        if not is_given and not site_is_subsample(msg) and is_positive(msg["fn"]):
            # Priors with this scale are described at it, and give the units of steps.
            msg["value"] = median(msg["fn"]).expand_as(msg["value"]).clone()

    def note_hidden(self, msg: Any) -> None:
        self._note_observation(msg)

    def _note_observation(self, msg: Any) -> None:
        if SiteRole.of(msg).is_observation:
            self.has_observation, frames = True, _vectorized(msg)
            self.observed_plates.update(frame.name for frame in frames)
            self.num_examples.update(frame.size for frame in frames)
            self.num_examples.update(msg["fn"].batch_shape[:1])
            if not isinstance(msg["value"], Tensor):
                raise TypeError(
                    f"The observation of '{msg['name']}' must be a tensor, but got "
                    f"{brief(msg['value'])}. Write `obs=torch.as_tensor(...)`."
                )
            log_density(msg["fn"], msg["value"])  # which may use a weight, as `obs=weight` does

    def _pyro_post_sample(self, msg: Any) -> None:
        name = msg["name"]
        if site_is_subsample(msg):
            return
        frames = _vectorized(msg)
        self._note_observation(msg)
        if SiteRole.of(msg).is_observation or msg["is_observed"]:
            return
        value: Tensor = msg["value"]
        if value.is_leaf and value.is_floating_point():
            value.requires_grad_()  # a model may differentiate by its parameters
        shape, plates = list(value.shape), list[Plate]()
        for frame in frames:
            size = frame.full_size or frame.size  # the number of all examples
            subsample_size = frame.size if size != frame.size else None
            plates.append(Plate(frame.name, size, frame.dim, subsample_size))
            shape[frame.dim - msg["fn"].event_dim] = size
        site = _describe(name, torch.Size(shape), msg["fn"], plates=tuple(plates))
        use = SiteUse(name)
        given = next((each.name for each in plates if each.name in self.given_plates), "")
        self.found[name] = FoundSite(site, msg["fn"], None, use, given_plate=given)
        msg["value"] = self.counted[name] = CountedWeight(value, use)


def _is_in_order(msg: Any) -> bool:
    """Whether the given subsample of a plate consists of all examples, in their order."""
    indices = torch.as_tensor(msg["value"])
    return torch.equal(indices, torch.arange(msg["fn"].size, device=indices.device))


def _vectorized(msg: Any) -> list[Any]:
    return [frame for frame in msg["cond_indep_stack"] if frame.vectorized]


def _describe(name: str, shape: torch.Size, prior: Any, **further: Any) -> LatentSite:
    scale = _scale_of(prior)
    return LatentSite(name, shape, prior.event_dim, prior.support, prior_scale=scale, **further)


def _scale_of(prior: Any) -> float | None:
    """Return the standard deviation of a prior, the root mean square over elements."""
    try:
        deviation = base_of(prior).stddev
        scales = shrink(deviation, deviation.dim())
    except (NotImplementedError, AttributeError):
        return None
    if scales.is_meta:
        return None
    scales = scales.detach()
    scale = float(scales.square().mean().sqrt() if scales.numel() > 1 else scales)
    return scale if 0 < scale < math.inf else None


@contextmanager
def naming_derivatives() -> Iterator[None]:
    """Let a model that differentiates say so in a block without gradients."""
    try:
        yield
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise RuntimeError(
            "`model` takes derivatives, and it runs without gradients where its sites are found and "
            "where it predicts. Write `with torch.enable_grad():` around what it differentiates."
        ) from error


@contextmanager
def trial_run(model: Callable[..., Any]) -> Iterator[None]:
    """Hide runs of a model from Pyro's handlers, and restore its buffers."""
    with (
        naming_derivatives(),
        warnings.catch_warnings(),
        pyro.validation_enabled(False),  # values do not matter here
        ONE_THREAD,
        torch.no_grad(),
        buffers_kept(model),
        outside_plates(),
        poutine.block(),
    ):
        # A warning of activation checkpoints, which need no gradients here.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        yield


@contextmanager
def buffers_kept(model: Any) -> Iterator[None]:
    """Restore changing buffers of a model, such as running statistics, and numbers after a block.

    Flags stay, since what they say was made in a block may stay, too.
    """
    parts = modules_of(model)
    buffers = [(part, name, buffer) for part in parts for name, buffer in buffers_that_change(part)]
    numbers = [
        (own, {name: value for name, value in own.items() if type(value) in (int, float)})
        for own in map(vars, parts)
    ]
    try:
        for part, name, buffer in buffers:
            setattr(part, name, buffer.clone())
        yield
    finally:
        for part, name, buffer in buffers:
            setattr(part, name, buffer)
        for own, before in numbers:
            own.update(before)


@contextmanager
def separate_randomness() -> Iterator[None]:
    """Use a separate random stream, derived from the global state, which is restored after the block.

    Numbers in the block are independent of the next numbers outside, such as simulated data. The states
    of Python's and NumPy's generators are restored too.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        state, seed = get_rng_state(), int(torch.randint(2**62, (), device="cpu"))
        torch.default_generator.manual_seed(seed)  # of no device that is not yet in use
        if devices:
            torch.cuda.manual_seed_all(seed)
        try:
            yield
        finally:
            set_rng_state(state)


Start = Callable[[LatentSite, Tensor], Tensor]
_START: ContextVar[Start] = ContextVar("start", default=lambda site, start: start)


@contextmanager
def starting_at(start: Start) -> Iterator[None]:
    """Replace default starts in a block, by a function of a site and its default start."""
    token = _START.set(start)
    try:
        yield
    finally:
        _START.reset(token)


def start_of(found: FoundSite, init_loc_fn: InitLocFn | None) -> Tensor:
    """Return the initial center of the posterior of a site."""
    site = found.site
    if torch.get_default_device().type == "meta":
        dtype = None if found.initial is None else found.initial.dtype
        return torch.empty(site.shape, dtype=dtype, device="meta")
    given = None
    if init_loc_fn is not None:
        with suppress(NotImplementedError):  # Pyro's functions begin with a sample
            given = init_loc_fn({"name": site.name, "fn": found.prior})
    if given is None:
        loc = _START.get()(site, _default_start(found))
    else:
        check("init_loc_fn(site)", given, Tensor)
        loc = given.to(example_of(found.prior))
    for plate in site.plates:
        dim = plate.dim - site.event_dim
        if plate.subsample_size is not None and loc.dim() >= -dim and loc.shape[dim] < plate.size:
            loc = periodic_repeat(loc, plate.size, dim)
    if loc.shape != site.shape:
        raise ValueError(
            f"`init_loc_fn` must return a value of shape {tuple(site.shape)} for the site "
            f"'{site.name}', but got {tuple(loc.shape)}."
        )
    if given is not None and not _is_inside(given, site.support):
        raise ValueError(
            f"`init_loc_fn` must return finite numbers inside of {site.support} for the site "
            f"'{site.name}', but some are outside or on the boundary."
        )
    return loc.detach()


def _is_inside(value: Tensor, support: Any) -> bool:
    """Whether a value has finite unconstrained values."""
    inside = support.check(value).all() & value.isfinite().all()
    if has_bijection(support):
        inside &= bijection_onto(support).inv(value).isfinite().all()
    return bool(inside)


def _default_start(found: FoundSite) -> Tensor:
    """Return the value in the original net, or a He sample for a weight, or the prior's median."""
    site, like = found.site, example_of(found.prior)
    if found.initial is not None and site.is_real:
        return found.initial.to(like)
    if site.is_real and not site.plates and len(site.shape) >= 2:
        deviation = math.sqrt(2 / (site.fan_in or site.shape[1:].numel()))
        return deviation * like.new_empty(site.shape).normal_()
    return median(found.prior)
