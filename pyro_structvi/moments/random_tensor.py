"""A tensor with moments in place of values, which a net takes like any other tensor."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor

from pyro_structvi._torch import METADATA, take_apart, without_storage


class Settings(NamedTuple):
    """How moments are propagated.

    Attributes:
        full_covariance: Whether the covariance between the units of a layer is kept.
        linearize: Whether a function without a rule is replaced by its tangent at the mean.
    """

    full_covariance: bool = False
    linearize: bool = False


class ElementFunction(NamedTuple):
    """A function of the single elements of a source, composed of so many functions of torch.

    The source is the tuple of a random tensor's arguments. Results of affine functions are normal.
    """

    source: tuple[Tensor, Tensor, Settings, Tensor | None]
    function: Callable[[Tensor], Tensor]
    length: int
    is_affine: bool


class RandomTensor(Tensor):
    """A tensor of normal elements with known means and variances, and without values.

    Functions of torch return the moments of their result, by the table in
    :mod:`pyro_structvi.moments.rules`; one without a rule raises a ``NotImplementedError``.

    Args:
        loc: Means.
        variance: Variances, of the same shape.
        settings: How moments are propagated.
        covariance: The covariance between the elements of the last dimension of a tensor ``(*batch,
            size)``, ``(*batch, size, size)``, or None, if they are independent.

    Attributes:
        form_covariance: A function that forms the covariance of outputs of a dense map on demand.
        of_weight: A random weight with correlated elements and the linear function of it that this
            tensor is, or None.
        of_elements: The function of the elements of another tensor that this tensor is, or None.
        of_scores: The variances of the scores, if this tensor is a softmax over the last dimension.
        map_of: The distribution of the correlated weight of a linear map that this tensor is, or None.

    Example:
        >>> import torch
        >>> x = RandomTensor(torch.zeros(2), torch.ones(2), Settings())
        >>> y = 3 * x + 1
        >>> y.loc, y.variance
        (tensor([1., 1.]), tensor([9., 9.]))
    """

    _loc: Tensor
    _variance: Tensor
    settings: Settings
    covariance: Tensor | None
    form_covariance: Callable[[], Tensor] | None = None
    of_elements: ElementFunction | None = None
    of_scores: Tensor | None = None
    map_of: Any = None
    of_weight: Any = None
    _bases: "tuple[tuple[RandomTensor, int], ...]" = ()  # and how often each had been changed
    _changes: int = 0
    _has_changed_view: bool = False
    moments_of_call: ClassVar[Callable[..., Any]]  # set by the table of rules

    def __new__(
        cls, loc: Tensor, variance: Tensor, settings: Settings, covariance: Tensor | None = None
    ) -> Self:
        tensor = without_storage(cls, loc.shape, loc)
        if settings.full_covariance and loc.dim() == 2 and loc.shape[1] == 1:
            covariance = variance.unsqueeze(-1)  # of one unit, which others may be copies of
        tensor._loc, tensor._variance = loc, variance
        tensor.settings, tensor.covariance = settings, covariance
        return tensor

    @property
    def loc(self) -> Tensor:
        self._check_memory()
        return self._loc

    @property
    def variance(self) -> Tensor:
        self._check_memory()
        return self._variance

    def make_view_of(self, base: "RandomTensor") -> Self:
        """Share memory with a tensor, which has no moments after this one is changed, nor vice versa."""
        self._bases = ((base, base._changes), *base._bases)
        return self

    def _check_memory(self) -> None:
        """Raise a ``NotImplementedError`` if a tensor with the same memory was changed in place."""
        is_old = any(base._changes != count for base, count in self._bases)
        if self._has_changed_view or is_old:
            raise NotImplementedError(
                "A tensor that is used after its view, or after the tensor that it is a view of, was "
                "changed in place has no moments. Write `y = y * 2` in place of `y *= 2`, or predict "
                "with draws."
            )

    def become(self, other: "RandomTensor") -> Self:
        """Take another tensor's moments, as operations in place do."""
        self._changes += 1
        for base, _ in self._bases:
            base._has_changed_view = True
        self._loc, self._variance = other.loc, other.variance
        for name in ("covariance", "form_covariance", *_ORIGINS):
            setattr(self, name, getattr(other, name))
        return self

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"RandomTensor(loc={self.loc!r}, variance={self.variance!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the moments of the result of ``func``."""
        if func in _KNOWN:
            return super().__torch_function__(func, types, args, kwargs)
        return cls.moments_of_call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        """Refuse calls inside torch's own kernels, without ``__torch_function__``."""
        raise NotImplementedError(f"`{func}` has no rule for the moments of a random input.")


_ORIGINS = ("of_weight", "of_elements", "of_scores", "map_of")


def random_among(values: Any) -> Iterator[RandomTensor]:
    """Yield the random tensors among nested arguments."""
    return (leaf for leaf in take_apart(values)[0] if isinstance(leaf, RandomTensor))


def settings_of(*values: Any) -> Settings:
    """Return the settings of the first random tensor among arguments."""
    return next(random_among(values)).settings


def moments(value: Any) -> tuple[Any, Tensor | None]:
    """Return mean and variance of an argument; the variance of a known value is None."""
    return (value.loc, value.variance) if isinstance(value, RandomTensor) else (value, None)


def total(*terms: Tensor | None) -> Any:
    """Return the sum of the terms that are not None, or None."""
    found = [term for term in terms if term is not None]
    return sum(found[1:], found[0]) if found else None


# Layers of torch read these attributes before they call a function.
_KNOWN = METADATA | {
    getattr(Tensor, name).__get__ for name in ("is_nested", "requires_grad", "grad_fn")
}
