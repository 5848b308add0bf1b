"""What Pyro asks of its automatic guides, for guides that own their parameters."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn

from pyro_structvi._checks import checked, naming, warn_user
from pyro_structvi.families import Plate
from pyro_structvi.families.saved_options import KEY, check_options
from pyro_structvi.guides.options import CreatePlates, InitLocFn
from pyro_structvi.nn.frozen import buffers_that_change
from pyro_structvi.nn.likelihoods import Likelihood

MODEL_SUM = "model_sum"
NOT_PICKLED = ("_model", "master", "init_loc_fn", "create_plates")


class NewParametersWarning(UserWarning):
    """A guide makes parameters after others were handed out, as to an optimizer."""


class ModelStateWarning(UserWarning):
    """A guide was loaded, and not what its model has beside its sites."""


class OwningAutoGuide(AutoGuide):
    """An ``AutoGuide`` whose attributes are those of a torch module.

    Pyro's module reads its parameters from the param store at every access, and hands its submodules to
    ``pyro.module``, by which two guides of one class would train the same parameters.

    A copy is a guide of the same model; a pickled guide has none.

    Args:
        model: The model.
        init_loc_fn: As for :class:`~pyro_structvi.guides.StructuredGuide`.
        create_plates: A function of the model's arguments that returns a plate or several, for data
            that are subsampled; other plates are made as the model has them.

    Attributes:
        handed_out: The names of the parameters that :meth:`parameters` has returned.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        init_loc_fn: InitLocFn | None,
        create_plates: CreatePlates | None,
    ) -> None:
        super().__init__(model, create_plates=create_plates)
        self.init_loc_fn = init_loc_fn
        self.handed_out: set[str] = set()
        self.register_load_state_dict_pre_hook(check_options)
        self.register_state_dict_post_hook(_add_model_sum)
        self.register_load_state_dict_pre_hook(_take_model_sum)
        self._model_sums: tuple[Tensor, Tensor] | None = None  # when saved, and after loading

    __getattr__ = nn.Module.__getattr__
    __setattr__ = nn.Module.__setattr__
    __delattr__ = nn.Module.__delattr__

    @property
    def model(self) -> Callable[..., Any] | None:
        """The model, or None after unpickling."""
        model: Callable[..., Any] | None = self._model[0]
        return model

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters that exist, and remember that an optimizer may have them."""
        self.handed_out.update(name for name, _ in self.named_parameters(recurse=recurse))
        existing: Iterator[nn.Parameter] = super().parameters(recurse)
        return existing

    @contextmanager
    def warning_of_new_parameters(self) -> Iterator[None]:
        """Name the parameters that a block makes, where others were handed out before."""
        yield
        new = [name for name, _ in self.named_parameters() if name not in self.handed_out]
        if self.handed_out and new:
            warn_user(
                f"The first call of the guide makes the parameters {new}. An optimizer of the "
                "`guide.parameters()` of before does not train them. Call `guide.initialize(...)` with "
                "the model's arguments first, and make the optimizer then.",
                NewParametersWarning,
            )
            self.handed_out.update(new)

    def warn_of_other_model(self) -> None:
        """Warn if the guide was loaded, and the rest of its model neither loaded nor trained."""
        own = _model_sum(self)
        if self._model_sums is None or own is None or own != self._model_sums[1]:
            return
        if not torch.isclose(own, self._model_sums[0].to(own), rtol=1e-4):
            warn_user(
                "The guide was loaded, and the parameters and buffers of its model are not those beside "
                "which it was saved. Load them too, `model.load_state_dict(...)`.",
                ModelStateWarning,
            )

    @checked
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what :meth:`state_dict` of a guide with the same families and options returned.

        Where it does not fit, nothing changes.

        Args:
            state_dict: Parameters, buffers and the families' options, by name.
            strict: Whether the names must be exactly the guide's.
            assign: Whether the guide takes the tensors themselves, not their values.

        Returns:
            The names that are missing, and those that are not known, as from torch's.

        Raises:
            RuntimeError: If families or options differ, whether strict or not; if names or shapes do.
        """
        check_options(self, state_dict, "")
        own = self.state_dict()
        fits = {name: _fits(name, value, own) for name, value in state_dict.items()}
        wrong_names = strict and (own.keys() != fits.keys())
        with naming("state_dict", state_dict):
            if wrong_names or not all(fit for name, fit in fits.items() if name in own):
                # Torch says what is wrong, and has only what is there already to load.
                kept = {name: own[name] if fit else state_dict[name] for name, fit in fits.items()}
                super().load_state_dict(kept, strict)
            return super().load_state_dict(state_dict, strict, assign)

    def make_plates(
        self, plates: Iterable[Plate], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return Pyro's plates for one pass, by name: those of ``create_plates`` and those asked for.

        As a part of an ``AutoGuideList`` a guide has the plates of the list.

        Args:
            plates: The plates of the sites that are sampled.
            args: The model's arguments.
            kwargs: Its keyword arguments.

        Raises:
            TypeError: If ``create_plates`` returns what is not a plate.
            ValueError: If a part of an ``AutoGuideList`` has ``create_plates``.
        """
        if self.master is not None:
            if self.create_plates is not None:
                raise ValueError(
                    "`create_plates` must be None for a guide in an AutoGuideList, whose parts have its "
                    "plates. Write `AutoGuideList(model, create_plates=...)`."
                )
            own: dict[str, Any] = self.master().plates
            return own
        created = () if self.create_plates is None else self.create_plates(*args, **kwargs)
        made = {}
        for plate in [created] if isinstance(created, pyro.plate) else created:
            if not isinstance(plate, pyro.plate):
                raise TypeError(
                    f"`create_plates` must return a pyro.plate or several, but got {plate!r}."
                )
            made[plate.name] = plate
        for plate in plates:
            if plate.name not in made:
                made[plate.name] = pyro.plate(
                    plate.name, plate.size, subsample_size=plate.subsample_size, dim=plate.dim
                )
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the model, and without what may not pickle."""
        for _, parameter in self.named_parameters():
            parameter.__dict__.pop("unconstrained", None)
        none = {"_model": (None,), "handed_out": set()}
        return {**self.__dict__, **dict.fromkeys(NOT_PICKLED), **none}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the parameters; the copy is a guide of the same model."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        for name in {*NOT_PICKLED} - {"master"}:
            new.__dict__[name] = self.__dict__[name]
        return new


def _model_sum(guide: Any) -> Tensor | None:
    """Return the sum of what a model has beside its sites, trained or counted; None if nothing."""
    module = poutine.unwrap(guide.model) if guide.model is not None else None
    if not isinstance(module, nn.Module):
        return None
    nets = (part for part in module.modules() if not isinstance(part, Likelihood))
    buffers = [pair for part in nets for pair in buffers_that_change(part)]
    kept = {id(value) for name, value in buffers if "_prior_" not in name}
    kept |= {id(value) for value in module.parameters() if type(value) is nn.Parameter}
    state = module.state_dict(keep_vars=True).values()  # without what is not persistent
    whole = [value.detach() for value in state if id(value) in kept and not value.is_meta]
    sums = [value.to(torch.complex64).abs().sum().cpu() for value in whole]
    return torch.stack(sums).sum() if sums else None


def _add_model_sum(guide: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    own = _model_sum(guide)
    if own is not None:
        state[f"{prefix}{MODEL_SUM}"] = own


def _take_model_sum(guide: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    saved, own = state.pop(f"{prefix}{MODEL_SUM}", None), _model_sum(guide)
    guide._model_sums = None if saved is None or own is None else (saved, own)


def _fits(name: str, value: Any, own: Mapping[str, Any]) -> bool:
    """Whether torch would load an entry of a state dict; options may be texts of any length."""
    shape = getattr(value, "shape", None)
    return name in own and (name.endswith(KEY) or shape == own[name].shape)
