"""The table from a function of torch to its moments."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_structvi._torch import put_together, take_apart
from pyro_structvi.maps.calls import (
    Application,
    FactorApplication,
    Lookup,
    parse_application,
    rewritten,
)
from pyro_structvi.moments.layers import LAYER_RULES
from pyro_structvi.moments.linear import (
    distribution_of,
    linear_moments,
    lookup_moments,
    origin_of,
)
from pyro_structvi.moments.nonlinear import NONLINEARITIES, propagate
from pyro_structvi.moments.random_tensor import (
    ElementFunction,
    RandomTensor,
    moments,
    random_among,
)

# ---- functions that move elements: means and variances move alike ---------------------------------


def _move(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Apply a function to means and to variances; a known tensor has variances of zero."""
    leaves, structure = take_apart((args, kwargs))
    sources = [*dict.fromkeys(random_among(leaves))]
    x = sources[0]

    def apply(
        of_random: Callable[[RandomTensor], Tensor], of_known: Callable[[Tensor], Tensor]
    ) -> tuple[list[Any], Any]:
        def part(leaf: Any) -> Any:
            if isinstance(leaf, RandomTensor):
                return of_random(leaf)
            return of_known(leaf) if _is_known(leaf) else leaf

        args, kwargs = put_together([*map(part, leaves)], structure)
        return take_apart(function(*args, **kwargs))

    locs, outputs = apply(lambda leaf: leaf.loc, lambda leaf: leaf)
    if function.__name__ in _KEEP_ORDER and locs[0].shape == x.shape:
        return x  # as nn.Flatten in a dense net; reads no values, so that it can be exported
    variances, _ = apply(lambda leaf: leaf.variance, torch.zeros_like)
    covariances: list[Tensor | None] = [None for _ in locs]
    joint = _joint_covariance(sources, any(map(_is_known, leaves)))
    if joint is not None:
        numbers = _numbers(sources, joint.shape[-1])
        moved, _ = apply(
            lambda leaf: numbers[id(leaf)],
            lambda leaf: torch.full_like(leaf, -1, dtype=torch.long),
        )
        covariances = [_covariance_at(joint, part) for part in moved]
    parts = zip(locs, variances, covariances, strict=True)
    found = [RandomTensor(m, v, x.settings, own) for m, v, own in parts]
    for each in found:
        each.map_of = x.map_of
    return put_together(found, outputs)


def _is_known(leaf: Any) -> bool:
    is_tensor = isinstance(leaf, Tensor) and not isinstance(leaf, RandomTensor)
    return is_tensor and leaf.is_floating_point()


def _joint_covariance(sources: list[RandomTensor], has_known: bool) -> Tensor | None:
    """Return the covariance of all columns of several tensors ``(batch, size)``.

    With known elements the last column has variance 0. Different tensors count as independent. None if
    no covariance is kept.
    """
    first = sources[0]
    if all(each.covariance is None for each in sources) or any(
        each.dim() != 2 or len(each) != len(first) for each in sources
    ):
        return None
    if len(sources) == 1 and not has_known:
        return first.covariance
    sizes = [each.shape[-1] for each in sources]
    width = sum(sizes) + has_known
    joint = first.loc.new_zeros(len(first), width, width)
    for each, size, end in zip(sources, sizes, accumulate(sizes), strict=True):
        own = slice(end - size, end)
        known = each.covariance
        joint[:, own, own] = torch.diag_embed(each.variance) if known is None else known
    return joint


def _numbers(sources: list[RandomTensor], width: int) -> dict[int, Tensor]:
    """Return the number of each element, row times ``width`` plus the column in the joint covariance."""
    device, start, found = sources[0].device, 0, {}
    for each in sources:
        rows, columns = (torch.arange(size, device=device) for size in each.shape)
        found[id(each)] = rows.unsqueeze(-1) * width + start + columns
        start += each.shape[-1]
    return found


def _covariance_at(joint: Tensor, numbers: Tensor) -> Tensor | None:
    """Return the covariance between elements ``(batch, size)`` by number, if rows stay together.

    Known elements have the number -1, and so the last column.
    """
    if numbers.dim() != 2 or not numbers.numel():
        return None
    rows, columns = numbers // joint.shape[-1], numbers % joint.shape[-1]
    row = rows.amax(-1, keepdim=True)
    if bool(((rows != row) & (numbers >= 0)).any()):
        return None
    return joint[row.unsqueeze(-1), columns.unsqueeze(-1), columns.unsqueeze(-2)]


def _view(function: Callable[..., Any], x: RandomTensor, *args: Any, **kwargs: Any) -> Any:
    """Move elements of a tensor without a copy; the results share its memory."""
    found = _move(function, x, *args, **kwargs)
    for each in random_among(found):
        if each is not x:
            each.make_view_of(x)
    return found


def _view_as(function: Callable[..., Any], x: Any, other: Any) -> Any:
    """Give a tensor the shape of another; either may be random."""
    like = moments(other)[0]
    return _view(function, x, like) if isinstance(x, RandomTensor) else function(x, like)


def _convert(function: Callable[..., Tensor], x: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Apply a conversion to means, variances and covariance."""
    args = tuple(moments(arg)[0] for arg in args)
    if not isinstance(x, RandomTensor):
        return function(x, *args, **kwargs)
    loc, variance = (function(part, *args, **kwargs) for part in (x.loc, x.variance))
    covariance = None if x.covariance is None else function(x.covariance, *args, **kwargs)
    found = RandomTensor(loc, variance, x.settings, covariance)
    found.of_scores = None if x.of_scores is None else function(x.of_scores, *args, **kwargs)
    is_same = loc is x.loc or function is Tensor.detach
    return found.make_view_of(x) if is_same else found


def _getitem(x: Any, index: Any) -> Any:
    if [*random_among(index)]:
        raise NotImplementedError("An index that is random has no moments")
    parts = index if isinstance(index, tuple) else (index,)
    copies = any(
        isinstance(part, (Tensor, Sequence)) or hasattr(part, "__array__") for part in parts
    )
    return (_move if copies else _view)(Tensor.__getitem__, x, index)


def _pad(x: RandomTensor, pad: Any, mode: str = "constant", value: Any = None) -> RandomTensor:
    variance = F.pad(x.variance, pad, mode, 0.0 if mode == "constant" else None)
    own = None
    if x.covariance is not None and mode == "constant" and len(pad) == 2:
        own = F.pad(x.covariance, (*pad, *pad))
    return RandomTensor(F.pad(x.loc, pad, mode, value), variance, x.settings, own)


def _where(condition: Any, input: Any, other: Any) -> Any:
    if isinstance(condition, RandomTensor):  # x.where(condition, other)
        return _where(input, condition, other)
    like = next(random_among((input, other)))
    values = (
        part if isinstance(part, Tensor) else torch.as_tensor(part).to(like.loc)
        for part in (input, other)
    )
    return _move(torch.where, condition, *values)


def _interpolate(
    x: RandomTensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    **kwargs: Any,
) -> RandomTensor:
    if mode not in ("nearest", "nearest-exact"):
        raise NotImplementedError(f"`interpolate` with `mode='{mode}'` has no moments")
    return _move(F.interpolate, x, size, scale_factor, mode, **kwargs)


_KEEP_ORDER = {"reshape", "flatten", "reshape_as", "squeeze", "expand", "expand_as"}
_VIEWS = (
    *("reshape", "flatten", "unflatten", "permute", "transpose", "swapaxes", "movedim"),
    *("squeeze", "unsqueeze", "expand", "chunk", "split", "unbind", "tensor_split", "narrow"),
    *("select", "moveaxis", "swapdims", "broadcast_to", "ravel", "t"),
)
_COPIES = (
    *("repeat", "repeat_interleave", "tile", "roll", "index_select", "gather", "flip"),
    "take_along_dim",
)
_CONVERSIONS = (
    *("to", "float", "double", "half", "bfloat16", "type_as"),
    *("contiguous", "clone", "detach"),
)
_LIKE = ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full")


def _known_like(name: str, x: RandomTensor, *args: Any, **kwargs: Any) -> Tensor:
    make: Callable[..., Tensor] = getattr(torch, name, None) or getattr(Tensor, name)
    return make(x.loc, *args, **kwargs)


# By torch's names and with torch's arguments; one name serves functions, methods and operators.
RULES: dict[str, Callable[..., Any]] = {
    **{name: partial(_view, getattr(Tensor, name)) for name in _VIEWS},
    **{name: partial(_move, getattr(Tensor, name)) for name in _COPIES},
    **{name: partial(_view, getattr(Tensor, name).__get__) for name in ("T", "mT")},
    **{name: partial(_view_as, getattr(Tensor, name)) for name in ("expand_as", "reshape_as")},
    **{name: partial(_convert, getattr(Tensor, name)) for name in _CONVERSIONS},
    **{name: partial(_known_like, name) for name in _LIKE},
    "cat": partial(_move, torch.cat),
    "concat": partial(_move, torch.cat),
    "getitem": _getitem,
    "interpolate": _interpolate,
    "masked_fill": lambda x, mask, value: _where(mask, value, x),
    "pad": _pad,
    "pixel_shuffle": partial(_move, F.pixel_shuffle),
    "stack": partial(_move, torch.stack),
    # Variances may be expanded where means are not, so that only means have the view.
    "view": partial(_view, Tensor.reshape),
    "view_as": partial(_view_as, Tensor.reshape_as),
    "where": _where,
    **LAYER_RULES,
}


# ---- calls ----------------------------------------------------------------------------------------


def moments_of_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the moments of the result of a function of torch."""
    outputs = None if _is_average(args) else rewritten(function, args, kwargs)
    if outputs is not None:
        return outputs
    reading = parse_application(function, args, kwargs)
    if isinstance(reading, Application):
        if function is F.bilinear and isinstance(reading.x, RandomTensor):
            raise NotImplementedError(
                "A bilinear layer of a random input has no moments, since products of its inputs are "
                "correlated. Predict with draws."
            )
        return linear_moments(reading)
    if isinstance(reading, Lookup):
        return lookup_moments(reading)
    if isinstance(reading, FactorApplication):
        return reading.function(reading.x, reading.weight)
    name = name_of(function)
    found = _apply(name.removesuffix("_"), Call(function, args, kwargs))
    if not name.endswith("_") and not kwargs.get("inplace", False):
        return found
    if not isinstance(args[0], RandomTensor):
        raise NotImplementedError(f"`{name}` would make a known tensor random in place")
    return args[0].become(found)


def _is_average(args: tuple[Any, ...]) -> bool:
    """Whether a softmax averages the rows of a stack of matrices without a correlated weight."""
    if len(args) < 2 or getattr(args[0], "of_scores", None) is None:
        return False
    values = args[1]
    return isinstance(values, Tensor) and values.dim() > 2 and distribution_of(values) is None


def name_of(function: Callable[..., Any]) -> str:
    """Return torch's name of a function, method, operator or property; in-place ones end in ``_``."""
    name: str = getattr(function, "__name__", repr(function))
    if name == "__get__":
        return str(getattr(function, "__self__").__name__)  # noqa: B009
    if name.startswith("__i") and name.endswith("__") and name != "__invert__":
        return f"{name[3:-2]}_"
    return name.strip("_") if name.startswith("__") else name


class Call(NamedTuple):
    """A call of a function of torch."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def replayed(self, inner: Mapping[int, Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Any]:
        """Return the call as a function of a source, given functions of its arguments by identity."""
        leaves, structure = take_apart((self.args, self.kwargs))

        def apply(values: Tensor) -> Any:
            parts = [inner[id(leaf)](values) if id(leaf) in inner else leaf for leaf in leaves]
            args, kwargs = put_together(parts, structure)
            return self.function(*args, **kwargs)

        return apply


def _apply(name: str, call: Call) -> Any:
    function, args, kwargs = call
    joint = _of_same_elements(call) if name in _OF_TWO else None
    if joint is not None:
        return joint
    x = args[0] if args else None
    if name in RULES:
        found = RULES[name](*args, **kwargs)
        if name in _LINEAR:
            _keep_weight(call, found)
    elif name in NONLINEARITIES and isinstance(x, RandomTensor):
        read = NONLINEARITIES[name]
        closed = None if read is None else read(*args[1:], **kwargs)
        found = _of_same_elements(call)
        if found is None:
            found = propagate(lambda values: function(values, *args[1:], **kwargs), closed, x)
    elif any(each.settings.linearize for each in random_among(call)):
        return linearized(call)
    else:
        raise NotImplementedError(
            f"The function `{name}` has no rule for the moments of a random input"
        )
    if name in _OF_ONE and isinstance(found, RandomTensor):
        _keep_elements(call, found)
    return found


def linearized(call: Call) -> RandomTensor:
    """Return the moments of a function's tangent at the mean, ``J S J'`` with its Jacobian J.

    The first argument must be the only random one, with independent examples first. The cost is one
    backward pass for each element of an example's result.
    """
    function, args, kwargs = call
    x = args[0] if args else None
    if not isinstance(x, RandomTensor) or len([*random_among(call)]) != 1:
        raise NotImplementedError(
            f"`linearize` takes functions of one random tensor, their first argument, but "
            f"`{name_of(function)}` has others"
        )
    loc = function(x.loc, *args[1:], **kwargs)
    if not isinstance(loc, Tensor) or not loc.is_floating_point() or loc.shape[:1] != x.shape[:1]:
        raise NotImplementedError(
            "`linearize` takes functions that return one tensor with the examples first, which "
            f"`{name_of(function)}` does not"
        )
    pull: Any = torch.func.vjp(lambda value: function(value, *args[1:], **kwargs), x.loc)[1]
    size = loc.shape[1:].numel()
    units = torch.eye(size, dtype=loc.dtype, device=loc.device).reshape(size, 1, *loc.shape[1:])
    rows = torch.func.vmap(lambda unit: pull(unit.expand_as(loc))[0], chunk_size=64)(units)
    rows = rows.flatten(2)
    if x.settings.full_covariance and x.dim() == loc.dim() == 2:
        own = torch.diag_embed(x.variance) if x.covariance is None else x.covariance
        covariance = torch.einsum("ibk,bkl,jbl->bij", rows, own, rows)
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        return RandomTensor(loc, variance, x.settings, covariance)
    variance = torch.einsum("ibk,bk->bi", rows.square(), x.variance.flatten(1))
    return RandomTensor(loc, variance.reshape(loc.shape), x.settings)


# ---- results as functions of another tensor --------------------------------------------------------

LONGEST = 64  # functions in a chain, which are all evaluated again in each product

# Functions that are linear in one random tensor if the other arguments are known.
_LINEAR = {
    *(*_VIEWS, *_COPIES, *_CONVERSIONS, "T", "mT", "view", "getitem"),
    *("mul", "rmul", "multiply", "div", "truediv", "divide", "neg", "negative"),
}
# Functions of single elements, of two tensors or of one.
_PRODUCTS = {"mul", "rmul", "multiply", "lerp"}
_OF_TWO = {"add", "radd", "sub", "subtract", "rsub", *_PRODUCTS}
_OF_ONE = {
    *(*_OF_TWO, *NONLINEARITIES, "div", "truediv", "divide", "neg", "negative"),
    *("clone", "contiguous", "detach", "to", "float", "double", "where", "masked_fill"),
}


def _keep_weight(call: Call, found: Any) -> None:
    """Tell the results of a linear function of a correlated weight where they come from."""
    sources = [*random_among(call)]
    own = origin_of(sources[0]) if len(sources) == 1 else None
    if own is None:
        return
    weight, former = own
    in_place = name_of(call.function).endswith("_")
    inner = (lambda values: former(values).clone()) if in_place else former
    apply = call.replayed({id(sources[0]): inner})

    def part(number: int, values: Tensor) -> Tensor:
        return take_apart(apply(values))[0][number]

    for number, each in enumerate(take_apart(found)[0]):
        if isinstance(each, RandomTensor) and each is not sources[0]:
            each.of_weight = weight, partial(part, number)


def _of_same_elements(call: Call) -> RandomTensor | None:
    """Return the moments of a function of single elements by quadrature over their source.

    Of a sum or product of two functions of the same elements, as in ``x * x.sigmoid()``, and of a
    nonlinear function of a nonlinear function, as in ``x.tanh() ** 2``. None for other calls.
    """
    functions = [_as_function(each) for each in random_among(call)]
    is_of_one = all(each is functions[0] for each in functions)
    if is_of_one and (functions[0].is_affine or _is_affine(call)):
        return None
    if any(each.source is not functions[0].source for each in functions):
        return None
    composed = _composed(call)
    found = propagate(composed.function, None, RandomTensor(*composed.source))
    found.of_elements = composed
    return found


def _is_affine(call: Call) -> bool:
    """Whether a function of single elements is affine in its random arguments."""
    name = name_of(call.function).removesuffix("_")
    is_of_one = len([*random_among(call)]) == 1
    return name not in NONLINEARITIES and (is_of_one or name not in _PRODUCTS)


def _keep_elements(call: Call, found: RandomTensor) -> None:
    """Record the function of single elements that a call computes, and its source, in its result."""
    random = [*random_among(call)]
    loc = found.loc  # whose shape takes less time than that of a subclass
    if any(each.loc.shape != loc.shape or each.loc.dtype != loc.dtype for each in random):
        return
    if len({id(_as_function(each).source) for each in random}) == 1:
        composed = _composed(call)
        found.of_elements = composed if composed.length <= LONGEST else None


def _as_function(x: RandomTensor) -> ElementFunction:
    """Return a tensor as a function of the elements of its source, which may be itself."""
    loc = x.loc  # raises where its memory has changed
    if x.of_elements is None:
        source = loc, x.variance, x.settings, x.covariance
        copy = Tensor.clone  # for operations in place
        x.of_elements = ElementFunction(source, copy, 0, is_affine=True)
    return x.of_elements


def _composed(call: Call) -> ElementFunction:
    """Return the result of a call as a function of the elements of its arguments' source."""
    inner = {id(each): _as_function(each) for each in random_among(call)}
    apply = call.replayed({key: each.function for key, each in inner.items()})
    first, *_ = inner.values()
    is_affine = _is_affine(call) and all(each.is_affine for each in inner.values())
    length = 1 + max(each.length for each in inner.values())
    return ElementFunction(first.source, apply, length, is_affine)


RandomTensor.moments_of_call = staticmethod(moments_of_call)
