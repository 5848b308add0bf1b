"""The contract of a family, its memory limit, and its options in state dicts."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor, nn

from pyro_structvi._checks import Positive, check_fields
from pyro_structvi.sites.latent_site import LatentSite
from pyro_structvi.sites.parameterization import unit_of_lower


@dataclass(frozen=True)
class Family:
    """A kind of posterior for one site, with its options; the parameters live in a SitePosterior.

    A family defines ``init`` and ``distribution``, in this order, and narrows ``fits`` where it
    cannot serve every site. See "Write your own family" in the documentation.

    Attributes:
        needs: In words, what sites it serves.
        constants: The names among those of ``init`` that are not trained.
        keeps_factors: Whether its distributions factor matrices, which are then kept between calls
            without gradients for as long as the parameters stay equal.
        delayed: The names of parameters that an optimizer had better move slowly at first, since they
            fit the others as these are: ``warm_up`` of :class:`~pyro_structvi.infer.StructuredAdam`.
        moves_in_own_coordinates: Whether means gain by a move along the correlations, where there are
            any: ``posterior_lr`` of :class:`~pyro_structvi.infer.StructuredAdam`.
        is_ensemble: Whether it has ``size`` points, all of which a step of such a guide runs.
    """

    needs: ClassVar[str]
    constants: ClassVar[tuple[str, ...]] = ()
    keeps_factors: ClassVar[bool] = False
    delayed: ClassVar[tuple[str, ...]] = ()
    moves_in_own_coordinates: ClassVar[bool] = True
    is_ensemble: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the options against their annotations."""
        check_fields(self)

    def fits(self, site: LatentSite) -> bool:
        """Whether this family can serve the site; ``needs`` says in words what it takes."""
        raise NotImplementedError

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Return the starting values of the unconstrained parameters, by name.

        Args:
            site: The site.
            loc: Where the posterior shall be centred, a value of the site.
            scale: Its standard deviation per (unconstrained) element.

        Returns:
            Tensors that nobody else holds. Of a site in plates each ends with the dimensions of the
            plates and of an unconstrained event, so that a subsample can take its rows.
        """
        raise NotImplementedError

    def distribution(self, site: LatentSite, **parameters: Tensor) -> TorchDistribution:
        """Return the posterior that the unconstrained parameters stand for."""
        raise NotImplementedError

    def unit(self, site: LatentSite, name: str, value: Tensor) -> float:
        """Return the size of a change of a parameter that matters, in which an optimizer steps.

        Unless a family says otherwise: 1 for a logarithm, ``log_...``; by the length of their rows for
        entries of a Cholesky factor, ``...lower``; and for others, which are then values of the site,
        the site's own.

        Args:
            site: The site.
            name: The parameter's name.
            value: The parameter.
        """
        if name.endswith("lower"):
            return unit_of_lower(value)
        return 1.0 if "log_" in name else site.unit


@dataclass(frozen=True)
class MatrixFamily(Family):
    """A family for weights seen as matrices ``(out, in)``, which can take their biases along.

    Args:
        join_bias: Whether the bias of a layer becomes a further column of its weight, so that the
            posterior is one over both. The bias of ``<name>weight<suffix>`` is the site
            ``<name>bias<suffix>`` of shape ``(out,)``; a weight without one stays by itself.
    """

    join_bias: bool = field(default=False, kw_only=True, repr=False)
    needs: ClassVar[str] = "a real weight of at least two dimensions, (out, *rest)"

    def fits(self, site: LatentSite) -> bool:
        """Whether the site is a weight matrix, or can be seen as one."""
        return site.is_real and not site.is_batch and len(site.shape) >= 2


@dataclass(frozen=True)
class MemoryLimitedFamily(MatrixFamily):
    """A family with dense covariances, which refuses a site where they would take too much.

    Args:
        max_memory: The most that a site may take by the formula of :meth:`check_memory`, in GiB.
        join_bias: As for :class:`MatrixFamily`.

    Raises:
        ValueError: If ``max_memory`` is not a positive number.
    """

    max_memory: Positive = field(default=8.0, compare=False)  # no part of what a posterior is

    def check_memory(
        self, site: LatentSite, elements: str, factors: int, size: int, bytes_each: int
    ) -> None:
        """Raise a ``MemoryError`` if training the site would take more than ``max_memory``.

        With P parameters, counted are 4 P numbers for these, their gradients and Adam's two moments,
        and twice the dense factors, for their gradients too.

        Args:
            site: The site.
            elements: What has one covariance, in words that go before the site's names.
            factors: How many covariances there are.
            size: The elements of each.
            bytes_each: The bytes of a number.

        Raises:
            MemoryError: If it would.
        """
        parameters = size + size * (size + 1) // 2
        gibibytes = factors * (4 * parameters + 2 * size**2) * bytes_each / 2**30
        if gibibytes > self.max_memory:
            raise MemoryError(
                f"A full covariance of {elements} {' and '.join(site.names)} would take "
                f"{_memory_text(gibibytes)} in training, and `max_memory` allows "
                f"{_memory_text(self.max_memory)}. Use AutoLowRankLRT, or a StructuredGuide with "
                f"another family for this site, such as {{'{site.name}': LowRank(rank=2), '*': "
                f"{type(self).__name__}()}}; or pass a larger `max_memory`."
            )


def _memory_text(gibibytes: float) -> str:
    if gibibytes >= 1024:
        return f"{gibibytes / 1024:.3g} TiB"
    return f"{gibibytes:.3g} GiB"


KEY = "_extra_state"  # torch's own, for what `get_extra_state` returns
MOST_NAMED = 5


def as_tensor(family: Family) -> Tensor:
    """Return a family's class and options as the bytes of a JSON text, uint8.

    A state dict then holds tensors only: ``torch.load(..., weights_only=True)`` reads it, and so do
    formats that know nothing else, such as safetensors.
    """
    text = json.dumps(_options_of(family), default=_plain)
    return torch.tensor([*text.encode()], dtype=torch.uint8, device="cpu")


def check_options(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Raise unless the families of a module, and their options, are those of a state dict.

    What the state does not have is not compared: whether it may be missing is torch's question. As a
    hook before loading it runs before anything of the module has changed.

    Args:
        module: What the state is to be loaded into.
        state: The state.
        prefix: What the module's names begin with there.

    Raises:
        RuntimeError: If they differ, or cannot be read.
    """
    found = []
    for name, part in module.named_modules():
        family, site = getattr(part, "family", None), getattr(part, "site", None)
        key = f"{prefix}{name}.{KEY}" if name else f"{prefix}{KEY}"
        if isinstance(family, Family) and site is not None and key in state:
            own, given = _read(key, as_tensor(family)), _read(key, state[key])
            found += [f"{each} at the site '{site.name}'" for each in _differences(given, own)]
    if found:
        more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        raise RuntimeError(
            "`state_dict` must be that of a guide with the same families and options, but it has "
            f"{'; '.join(found[:MOST_NAMED])}{more}. Make the guide with the options of the state dict. "
            "Nothing was loaded."
        )


def _options_of(family: Family) -> dict[str, Any]:
    """Return the class and the options that decide what the parameters mean."""
    options = {field.name: getattr(family, field.name) for field in fields(family) if field.compare}
    return {"family": type(family).__name__, **options}


def _plain(value: Any) -> Any:
    """Return what JSON has in the place of a value that it does not know."""
    if isinstance(value, Family):
        return _options_of(value)
    if isinstance(value, (Integral, Real)):  # of NumPy
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Tensor):
        return value.tolist()
    return type(value).__name__  # a function has no value that a file could hold


def _read(key: str, value: Any) -> dict[str, Any]:
    """Read what ``as_tensor`` wrote, also where arithmetic on a whole state dict went over it."""
    try:
        codes = value.double().round().to(torch.uint8).tolist()
        options: dict[str, Any] = dict(json.loads(bytes(codes)))
    except (AttributeError, TypeError, ValueError) as error:
        raise RuntimeError(
            f"`state_dict['{key}']` must be the options of a family as `guide.state_dict()` has them, "
            "but they cannot be read. Leave the entry as it is, or drop it and pass `strict=False`."
        ) from error
    return options


def _differences(given: Any, own: Any, name: str = "") -> Iterator[str]:
    """Say where the options of a state and of a family differ, with both values."""
    if isinstance(given, dict) and isinstance(own, dict):
        families = given.get("family"), own.get("family")
        if families[0] != families[1]:
            yield f"{name or 'family'} = {families[0]} instead of {families[1]}"
            return
        for each in dict.fromkeys([*given, *own]):
            if given.get(each) != own.get(each) or (each in given) != (each in own):
                yield from _differences(
                    given.get(each, "nothing"),
                    own.get(each, "nothing"),
                    f"{name}.{each}".lstrip("."),
                )
    elif given != own:
        yield f"{name} = {_text(given)} instead of {_text(own)}"


def _text(value: Any) -> str:
    text = str(value["family"]) if isinstance(value, dict) and "family" in value else str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
