"""Pyro's interface of guides: parameters, the param store, plates, and state dicts."""

import copy
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Self
from weakref import WeakValueDictionary

import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.runtime import am_i_wrapped, effectful
from torch import Tensor, nn

from pyro_structvi._checks import brief, checked, naming, warn_user
from pyro_structvi._pyro import (
    forget_parameters,
    has_parameters,
    is_given,
    loaded_parameter,
    mirror_parameter,
    unwrapped,
)
from pyro_structvi.nn.likelihood import Likelihood
from pyro_structvi.nn.random_module import buffers_that_change
from pyro_structvi.sites.family import KEY, CreatePlates, InitLocFn, check_options
from pyro_structvi.sites.latent_site import Plate

_NAMED: WeakValueDictionary[str, nn.Module] = WeakValueDictionary()


def declare_parameters(guide: nn.Module) -> None:
    """Declare the trainable parameters of a guide to Pyro, and mirror them in the param store.

    The entries of the store are removed with the guide.

    Raises:
        RuntimeError: If the store has other values, as after it was loaded. Nothing has changed then.
    """
    mirror = not pyro.settings.get("module_local_params")
    named = [*guide.named_parameters(_name_of(guide))]
    for key, parameter in named if mirror else ():
        loaded = loaded_parameter(key)
        if loaded is not None and not _is_equal(loaded, parameter):
            raise RuntimeError(
                f"Pyro's param store has another value than the guide for its parameter '{key}', as "
                "after `pyro.get_param_store().load(...)`. A guide owns its parameters: save "
                "`guide.state_dict()`, and restore it by `guide.load_state_dict(...)`. To go on with "
                "the values of the guide, call `pyro.clear_param_store()`."
            )
    if not am_i_wrapped():
        return
    for key, parameter in named:
        if not parameter.requires_grad:
            continue
        parameter.__dict__["unconstrained"] = weakref.ref(parameter)
        if mirror:
            mirror_parameter(key, parameter)
        _declare(parameter, name=key)


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and bool((one.to(other) == other).all()))


_declare = effectful(lambda parameter: parameter, type="param")


def _name_of(guide: nn.Module) -> str:
    """Return the name of a guide in the param store, unique among the guides in it."""
    kind = type(guide).__name__
    names = itertools.chain([kind], (f"{kind}_{number}" for number in itertools.count(2)))
    name = next(
        name
        for name in names
        if _NAMED.get(name) in (guide, None) or not has_parameters(f"{name}.")
    )
    if _NAMED.get(name) is not guide:
        _NAMED[name] = guide
        weakref.finalize(guide, _forget, name).atexit = False
    return name


def _forget(name: str) -> None:
    if name not in _NAMED:  # a later guide may have the name
        forget_parameters(f"{name}.")


def check_not_given(groups: Iterable[tuple[Sequence[str], str | None]]) -> None:
    """Raise a ``NotImplementedError`` if a handler gives values to sites that share draws.

    A group has the names of these sites, and of the draw's own site, which may be given too, or None.
    """
    for names, whole in groups:
        given = [name for name in names if is_given(name)]
        if given and (whole is None or not is_given(whole)):
            raise NotImplementedError(
                f"The sites {[*names]} are drawn together, so the guide has no density at values of "
                f"{given} from `poutine.replay` or `poutine.condition`. Give the weights a family with "
                "`join_bias=False` and without shared draws, such as MeanField(). For "
                "`ReweightedWakeSleep`, `insomnia=1.0` gives the guide no values."
            )


class LocalLatentWarning(UserWarning):
    """Latents of single examples are sampled from the posterior or from the model."""


def warn_of_local_latents(kept: Sequence[str], new: Sequence[str]) -> None:
    """Warn of latents of single examples."""
    if kept:
        warn_user(
            f"The latents {[*kept]} of single examples take the values of the posterior, since it was "
            "fitted to as many examples as there are here. If these are other examples, predict by "
            "`predict` with draws of the other sites only, so that the model draws these.",
            LocalLatentWarning,
        )
    if new:
        warn_user(
            f"The latents {[*new]} of single examples are drawn from the model, since these are not the "
            "examples that the posterior was fitted to, or not all of them at once.",
            LocalLatentWarning,
        )


MODEL_SUMS = "model_sums"
# Of a tensor's norm; a state may have been float16 on its way.
CHANGED = torch.finfo(torch.float16).eps
BLOCK = 2**16  # elements, of which a copy in double precision is made at a time
NOT_PICKLED = ("_model", "master", "init_loc_fn", "create_plates")


class NewParametersWarning(UserWarning):
    """A guide makes parameters after others were passed to an optimizer."""


class ModelStateWarning(UserWarning):
    """A guide was loaded without the other parameters and buffers of its model.

    The state dict of a guide has a weighted sum of the elements of each of these tensors. A sum has
    changed if it differs by more than 0.1 % of the tensor's norm, in bfloat16 by more than 0.8 %.
    """


class OwningAutoGuide(AutoGuide):
    """An ``AutoGuide`` that owns its parameters, with the attribute access of a torch module.

    A ``PyroModule`` reads its parameters from the param store, so that two guides of one class would
    train the same parameters. A copy is a guide of the same model; a pickled guide has no model.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        init_loc_fn: InitLocFn | None,
        create_plates: CreatePlates | None,
    ) -> None:
        super().__init__(model, create_plates=create_plates)
        self.init_loc_fn = init_loc_fn
        self.handed_out = set[str]()  # names of the parameters that `parameters()` has returned
        self.register_load_state_dict_pre_hook(_complete)
        self.register_load_state_dict_pre_hook(check_options)
        self.register_state_dict_post_hook(_add_model_sums)
        self.register_load_state_dict_pre_hook(_take_model_sums)
        self._model_sums: tuple[Tensor, Tensor] | None = None  # when saved, and after loading

    __getattr__ = nn.Module.__getattr__
    __setattr__ = nn.Module.__setattr__
    __delattr__ = nn.Module.__delattr__
    # AutoGuide's makes a guide the master of its members.
    __setstate__ = nn.Module.__setstate__

    @property
    def model(self) -> Callable[..., Any] | None:
        """The model, or None after unpickling."""
        return self._model[0]

    @property
    def needed_model(self) -> Callable[..., Any]:
        """The model, or a ``RuntimeError`` after unpickling."""
        if self.model is None:
            raise RuntimeError(
                "This guide was unpickled without its model. Pass both to `predict(model, guide, x)` or "
                "`fit`, which give the guide its model; or make a new guide from the model and call "
                "`new.load_state_dict(old.state_dict())`."
            )
        return self.model

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the existing parameters, and record that an optimizer may have them."""
        self.handed_out.update(name for name, _ in self.named_parameters(recurse=recurse))
        return super().parameters(recurse)

    @contextmanager
    def warning_of_new_parameters(self) -> Iterator[None]:
        """Warn of parameters that a block makes after others were returned."""
        before = {parameter for _, parameter in self.named_parameters()}
        yield
        new = [name for name, parameter in self.named_parameters() if parameter not in before]
        if self.handed_out and new:
            warn_user(
                f"The first call of the guide, or a state dict, makes the parameters {new}, which an "
                "optimizer of the `guide.parameters()` of before does not train. Call "
                "`guide.initialize(...)` with the model's arguments, or load the state, first, and make "
                "the optimizer then.",
                NewParametersWarning,
            )
            self.handed_out.update(new)

    def _lacks(self, state: Mapping[str, Any], prefix: str) -> bool:
        """Whether a state dict has parameters that ``_make_lacking`` makes."""
        return False

    def _make_lacking(self, state: Mapping[str, Any], prefix: str) -> None:
        """Make the parameters of a state dict that the guide would make at its first call."""

    def warn_of_other_model(self) -> None:
        """Warn if the guide was loaded, and its model was neither loaded nor trained."""
        if self._model_sums is None:
            return
        (own, error), (saved, loaded) = _model_sums(self), self._model_sums
        if not own.shape == saved.shape == loaded.shape or ((own - loaded).abs() > error).any():
            return
        if ((own - saved).abs() > error).any():
            warn_user(
                "The guide was loaded, and the parameters and buffers of its model are not those beside "
                "which it was saved. Load them too, `model.load_state_dict(...)`.",
                ModelStateWarning,
            )

    @checked
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the state dict of a guide with the same families and options; see torch.

        Raises:
            RuntimeError: If families, options or shapes differ, or names with ``strict``. Nothing has
                changed then.
        """
        _complete(self, state_dict, strict=strict)
        check_options(self, state_dict, "")
        own = self.state_dict()
        fitting = {
            name: own[name]
            for name, value in state_dict.items()
            # Options have any length.
            if name in own
            and (name.endswith(KEY) or getattr(value, "shape", None) == own[name].shape)
        }
        wrong_shapes = [name for name in state_dict if name in own and name not in fitting]
        with naming("state_dict", state_dict):
            if wrong_shapes or (strict and own.keys() != state_dict.keys()):
                # Torch raises the error, and can load current values only.
                super().load_state_dict({**state_dict, **fitting}, strict)
            return super().load_state_dict(state_dict, strict, assign)

    @property
    def are_plates_given(self) -> bool:
        """Whether the guide is told which examples its arguments hold, by ``create_plates``."""
        owner = self if self.master is None else self.master()
        return owner.create_plates is not None

    def _check_given_plates(self, plates: Mapping[str, str]) -> None:
        """Raise a ``ValueError`` for plates with a subsample that the guide would draw anew, by site."""
        if plates and not self.are_plates_given:
            site, plate = next(iter(plates.items()))
            raise ValueError(
                f"The model is given the subsample of the plate '{plate}', and the guide would draw "
                f"another one for the site '{site}'. Pass `create_plates=`, a function of the model's "
                f"arguments that returns `pyro.plate('{plate}', size, subsample=...)`, to the guide."
            )

    def make_plates(
        self, plates: Iterable[Plate], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return plates by name: of ``create_plates``, and around sites; or of an ``AutoGuideList``."""
        if self.master is not None:
            if self.create_plates is not None:
                raise ValueError(
                    "`create_plates` must be None for a guide in an AutoGuideList, whose parts have its "
                    "plates. Write `AutoGuideList(model, create_plates=...)`."
                )
            return self.master().plates
        created = () if self.create_plates is None else self.create_plates(*args, **kwargs)
        made = {}
        for given in [created] if isinstance(created, pyro.plate) else created:
            if not isinstance(given, pyro.plate):
                raise TypeError(
                    f"`create_plates` must return a pyro.plate or several, but got {given!r}."
                )
            made[given.name] = given
        for plate in plates:
            if plate.name not in made:
                made[plate.name] = pyro.plate(**asdict(plate))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the model and other attributes that may not pickle."""
        for _, parameter in self.named_parameters():
            parameter.__dict__.pop("unconstrained", None)
        none = {"_model": (None,), "handed_out": set()}
        return {**self.__dict__, **dict.fromkeys(NOT_PICKLED), **none}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the guide of the same model, or of its copy in ``deepcopy((model, guide))``."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        for name in {*NOT_PICKLED} - {"master"}:
            new.__dict__[name] = self.__dict__[name]
        new._model = (memo.get(id(self.model), self.model),)
        return new


def give_model(guide: OwningAutoGuide, model: Callable[..., Any]) -> None:
    """Give its model to a guide that was unpickled without one, and to its members."""
    for part in guide.modules():
        if isinstance(part, OwningAutoGuide) and part.model is None:
            part._model = (model,)


def check_made_of(guide: OwningAutoGuide, model: Any, call: str) -> None:
    """Raise a ``ValueError`` if a guide was made of a module that is not a model or a part of it."""
    own, model = unwrapped(guide.model), unwrapped(model)
    are_modules = isinstance(own, nn.Module) and isinstance(model, nn.Module)
    if are_modules and not any(part is own for part in model.modules()):
        raise ValueError(
            f"`guide` must be made of `model`, {brief(model)}, but was made of another module, "
            f"{brief(own)}. Write `{call}`, or `{type(guide).__name__}(model)`."
        )


def _complete(
    guide: OwningAutoGuide,
    state: Mapping[str, Any],
    prefix: str = "",
    *_: Any,
    strict: bool = False,
) -> None:
    """Make the parameters that a guide and its members lack of a state dict; on an error none."""
    own = {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}
    lacking = [each for each, part in _guides_in(guide).items() if part._lacks(own, each)]
    if not lacking:
        return
    trial = copy.deepcopy(guide)
    for each in lacking:
        _guides_in(trial)[each]._make_lacking(own, each)
    trial.load_state_dict(own, strict)
    with guide.warning_of_new_parameters():
        for each in lacking:
            _guides_in(guide)[each]._make_lacking(own, each)


def _guides_in(guide: OwningAutoGuide) -> dict[str, OwningAutoGuide]:
    """Return a guide and its members, by the prefix of their names in a state dict."""
    named = guide.named_modules()
    return {name and f"{name}.": part for name, part in named if isinstance(part, OwningAutoGuide)}


def _model_sums(guide: Any) -> tuple[Tensor, Tensor]:
    """Return sums of the parameters and changing buffers of a model, without its sites, and errors."""
    model = unwrapped(guide.model)
    if not isinstance(model, nn.Module):
        return torch.empty(0), torch.empty(0)
    nets = (part for part in model.modules() if not isinstance(part, Likelihood))
    buffers = [pair for part in nets for pair in buffers_that_change(part)]
    kept = {id(value) for name, value in buffers if "_prior_" not in name}
    kept |= {id(value) for value in model.parameters() if type(value) is nn.Parameter}
    state = model.state_dict(keep_vars=True).values()  # persistent buffers only
    whole = [value.detach() for value in state if id(value) in kept and not value.is_meta]
    pairs = [_weighted_sum(value).cpu() for value in whole]
    sums, errors = torch.stack(pairs, -1) if pairs else torch.empty(2, 0)
    return sums, errors


def _weighted_sum(value: Tensor) -> Tensor:
    """Return a sum of elements with fixed weights, and the smallest difference that is a change of them.

    The weights are positive, so that a shift of all elements does not cancel, and no two are equal, so
    that elements which change places do not either.
    """
    dense = value.to_dense()
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense).flatten()
    weights = _weights(min(BLOCK, len(flat)), flat.device)
    total, squares = torch.zeros(2, dtype=torch.float64, device=flat.device)
    factors = _weights(len(flat) // BLOCK + 1, "cpu").tolist()
    for factor, part in zip(factors, flat.split(BLOCK), strict=False):
        part = part.double().nan_to_num(1.0, 2.0, -2.0)
        total = total + factor * (part @ weights[: len(part)])
        squares = squares + part.square().sum()
    rounding = torch.finfo(flat.dtype).eps if flat.is_floating_point() else 0.0
    # Roundings of equal elements add up in the sum.
    error = max(CHANGED, rounding) * squares.sqrt() + rounding * total.abs()
    return torch.stack([total, error])


def _weights(number: int, device: Any) -> Tensor:
    """Return irregular numbers between 1/3 and 1; a single number is 1."""
    return (2 + torch.arange(number, dtype=torch.float64, device=device).square().cos()) / 3


def _add_model_sums(guide: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    sums, _ = _model_sums(guide)
    if len(sums):
        state[f"{prefix}{MODEL_SUMS}"] = sums


def _take_model_sums(guide: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    saved, own = state.pop(f"{prefix}{MODEL_SUMS}", None), _model_sums(guide)[0]
    guide._model_sums = None if saved is None else (saved.clone().to(own), own)
