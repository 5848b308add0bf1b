"""Moments of sums and products; two random terms count as independent."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_structvi.moments.nonlinear import NONLINEARITIES, propagate
from pyro_structvi.moments.random_tensor import RandomTensor, moments, settings_of


def _add(input: Any, other: Any, *, alpha: float = 1, sign: float = 1) -> RandomTensor:
    """Return the moments of ``input + sign * alpha * other``."""
    factor = sign * alpha
    if input is other:
        return _mul(input, 1 + factor)
    (a, va), (b, vb) = moments(input), moments(other)
    loc = a + factor * b
    own = None if va is None else va.expand(loc.shape)
    variance = _total(own, None if vb is None else factor**2 * vb)
    covariance = _total(
        _covariance(input, loc), _scaled(_covariance(other, loc), loc.new_tensor(factor))
    )
    return RandomTensor(loc, variance.expand(loc.shape), settings_of(input, other), covariance)


def _rsub(input: Any, other: Any) -> RandomTensor:
    return _add(other, input, sign=-1)


def _neg(input: RandomTensor) -> RandomTensor:
    return RandomTensor(-input.loc, input.variance, input.settings, input.covariance)


def _mul(input: Any, other: Any) -> RandomTensor:
    """Return the moments of a product, exact for independent factors and for a square."""
    if input is other:
        return propagate(NONLINEARITIES["square"](), input)
    (a, va), (b, vb) = moments(input), moments(other)
    loc = a * b
    terms = []
    if va is not None:
        terms.append(va * (b * b))
    if vb is not None:
        terms.append(vb * (a * a))
    if va is not None and vb is not None:
        terms.append(va * vb)
    variance = sum(terms[1:], terms[0]).expand(loc.shape)
    settings = settings_of(input, other)
    covariance = None
    if settings.full_covariance and (va is None or vb is None):
        random, factor = (input, b) if vb is None else (other, a)
        covariance = _scaled(
            _covariance(random, loc),
            loc.new_tensor(factor) if not isinstance(factor, Tensor) else factor,
        )
    return RandomTensor(loc, variance, settings, covariance)


def _div(input: Any, other: Any, *, rounding_mode: None = None) -> RandomTensor:
    if isinstance(other, RandomTensor):
        raise NotImplementedError("A division by what is random has no moments")
    return _mul(input, 1 / other)


def _lerp(input: Any, end: Any, weight: Any) -> RandomTensor:
    """Return the moments of ``input + weight * (end - input)``, exact for independent arguments."""
    (a, va), (b, vb), (w, vw) = moments(input), moments(end), moments(weight)
    loc = torch.lerp(a, b, w)
    of_weight = 0 if vw is None else vw
    variance = of_weight * (b - a).square()
    for own, share in ((va, 1 - w), (vb, w)):
        if own is not None:
            variance = variance + (share * share + of_weight) * own
    return RandomTensor(loc, variance.expand(loc.shape), settings_of(input, end, weight))


def _covariance(x: Any, loc: Tensor) -> Tensor | None:
    """Return the covariance of a term that has the shape of the sum, where it is kept."""
    if not isinstance(x, RandomTensor) or not x.settings.full_covariance or loc.dim() != 2:
        return None
    if x.covariance is None:
        return torch.diag_embed(x.variance.expand(loc.shape))
    return x.covariance.expand(*loc.shape, loc.shape[-1])


def _scaled(covariance: Tensor | None, factor: Tensor) -> Tensor | None:
    """Return the covariance of a tensor times a known factor."""
    if covariance is None:
        return None
    if factor.dim() == 0:
        return factor.square() * covariance
    factor = factor.expand(covariance.shape[:-1])
    return covariance * factor.unsqueeze(-1) * factor.unsqueeze(-2)


def _total(first: Tensor | None, second: Tensor | None) -> Any:
    """Return the sum of what is there."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _matmul(input: Any, other: Any) -> RandomTensor:
    """Return the moments of a product of matrices with independent elements."""
    (a, va), (b, vb) = moments(input), moments(other)
    loc, variance = a @ b, None
    if va is not None:
        variance = va @ (b.square() if vb is None else b.square() + vb)
    if vb is not None:
        variance = _total(variance, a.square() @ vb)
    assert variance is not None
    return RandomTensor(loc, variance, settings_of(input, other))


def _sum(
    input: RandomTensor, dim: Any = None, keepdim: bool = False, mean: bool = False, **kwargs: Any
) -> RandomTensor:
    """Return the moments of a sum or a mean over dimensions."""
    dims = tuple(range(input.dim())) if dim is None else dim
    of_terms = input.variance
    if input.covariance is not None and {-1, input.dim() - 1} & {
        *((dims,) if isinstance(dims, int) else dims)
    }:
        of_terms = input.covariance.sum((-2, -1)).unsqueeze(-1)
    loc, variance = (part.sum(dims, keepdim) for part in (input.loc, of_terms))
    if mean:
        count = math.prod(input.shape) / max(1, math.prod(loc.shape))
        loc, variance = loc / count, variance / count**2
    return RandomTensor(loc, variance, input.settings)


_PRODUCTS = ("matmul", "bmm", "mm")

SUM_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "radd"), _add),
    **dict.fromkeys(("sub", "subtract"), partial(_add, sign=-1)),
    **dict.fromkeys(("rsub",), _rsub),
    **dict.fromkeys(("mul", "rmul", "multiply"), _mul),
    **dict.fromkeys(("div", "truediv", "divide"), _div),
    **dict.fromkeys(("neg", "negative"), _neg),
    **dict.fromkeys(_PRODUCTS, _matmul),
    "lerp": _lerp,
    "rmatmul": lambda input, other: _matmul(other, input),
    "sum": _sum,
    "mean": partial(_sum, mean=True),
}


def _batch_norm(
    input: RandomTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> RandomTensor:
    """Scale and shift by running statistics, which is exact."""
    if training or running_mean is None or running_var is None:
        raise NotImplementedError(
            "Batch normalization by the statistics of a batch has no moments; call `model.eval()`"
        )
    ones = [1 for _ in range(input.dim() - 2)]
    centered = SUM_RULES["sub"](input, running_mean.reshape(-1, *ones))
    found = SUM_RULES["mul"](centered, (running_var + eps).rsqrt().reshape(-1, *ones))
    return _affine(found, weight, bias, ones)


def _affine(x: RandomTensor, weight: Any, bias: Any, ones: list[int]) -> RandomTensor:
    if weight is not None:
        x = SUM_RULES["mul"](x, weight.reshape(*weight.shape, *ones))
    return x if bias is None else SUM_RULES["add"](x, bias.reshape(*bias.shape, *ones))


def _standardized(x: RandomTensor, dims: list[int], eps: float) -> RandomTensor:
    """Center and scale by the statistics of many elements, whose own spread is left out.

    The expected square about the mean is exact; its root stands for the standard deviation, which is
    good where many elements enter it.
    """
    count = x.shape[dims[0] :].numel() if len(dims) > 1 else x.shape[dims[0]]
    center = x.loc.mean(dims, keepdim=True)
    mean_variance = x.variance.mean(dims, keepdim=True)
    about = x.loc - center
    square = about.square().mean(dims, keepdim=True) + (1 - 1 / count) * mean_variance
    own = (1 - 2 / count) * x.variance + mean_variance / count
    return RandomTensor(about * (square + eps).rsqrt(), own / (square + eps), x.settings)


def _layer_norm(
    input: RandomTensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> RandomTensor:
    dims = [*range(-len(normalized_shape), 0)]
    return _affine(_standardized(input, dims, eps), weight, bias, [])


def _group_norm(
    input: RandomTensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> RandomTensor:
    loc, variance = (
        part.reshape(len(part), num_groups, -1) for part in (input.loc, input.variance)
    )
    found = _standardized(RandomTensor(loc, variance, input.settings), [-1], eps)
    shaped = RandomTensor(
        found.loc.reshape(input.shape), found.variance.reshape(input.shape), input.settings
    )
    return _affine(shaped, weight, bias, [1 for _ in range(input.dim() - 2)])


def _rms_norm(
    input: RandomTensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> RandomTensor:
    dims = [*range(-len(normalized_shape), 0)]
    least = torch.finfo(input.dtype).eps if eps is None else eps
    square = (input.loc.square() + input.variance).mean(dims, keepdim=True) + least
    found = RandomTensor(input.loc * square.rsqrt(), input.variance / square, input.settings)
    return _affine(found, weight, None, [])


def _dropout(
    input: RandomTensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> RandomTensor:
    """Return the moments over the dropped elements, exact but for covariances between them."""
    if not training or p == 0:
        return input
    variance = (input.variance + p * input.loc.square()) / (1 - p)
    return RandomTensor(input.loc, variance, input.settings)


def _dropout_by_values(
    input: RandomTensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> RandomTensor:
    if training and p > 0:
        raise NotImplementedError("Alpha dropout has no moments; call `model.eval()`")
    return input


def _softmax(input: RandomTensor, dim: int, *args: Any, **kwargs: Any) -> RandomTensor:
    """Return the softmax of the means, and the variance of its tangent there."""
    p = input.loc.softmax(dim)
    own = (1 - 2 * p) * input.variance + (p.square() * input.variance).sum(dim, keepdim=True)
    return RandomTensor(p, (p.square() * own).clamp_min(0), input.settings)


def _log_softmax(input: RandomTensor, dim: int, *args: Any, **kwargs: Any) -> RandomTensor:
    p = input.loc.softmax(dim)
    variance = (1 - 2 * p) * input.variance + (p.square() * input.variance).sum(dim, keepdim=True)
    return RandomTensor(input.loc.log_softmax(dim), variance.clamp_min(0), input.settings)


LAYER_RULES: dict[str, Callable[..., Any]] = {
    "batch_norm": _batch_norm,
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), _dropout),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), _dropout_by_values),
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "log_softmax": _log_softmax,
    "rms_norm": _rms_norm,
    "softmax": _softmax,
}


State = tuple[Any, ...]
Step = Callable[..., State]


def _plain_step(
    activate: Callable[[Any], Any], of_input: Any, state: State, weight: Any, bias: Any
) -> State:
    return (activate(of_input + F.linear(state[0], weight, bias)),)


def _lstm_step(
    of_input: Any, state: State, weight: Any, bias: Any, projection: Any = None
) -> State:
    h, c = state
    i, f, g, o = (of_input + F.linear(h, weight, bias)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if projection is None else F.linear(h, projection)), c


def _gru_step(of_input: Any, state: State, weight: Any, bias: Any) -> State:
    (h,) = state
    r, z, n = of_input.chunk(3, -1)
    own_r, own_z, own_n = F.linear(h, weight, bias).chunk(3, -1)
    new = (n + (r + own_r).sigmoid() * own_n).tanh()
    return (torch.lerp(new, h, (z + own_z).sigmoid()),)


def _cell(step: Step, input: Any, hx: Any, weight: Any, own: Any, *biases: Any) -> Any:
    """Take one step, as torch's function of a cell does."""
    of_input, of_state = biases or (None, None)
    state = step(F.linear(input, weight, of_input), _as_state(hx), own, of_state)
    return state if len(state) > 1 else state[0]


def _layer(
    step: Step,
    input: Any,
    hx: Any,
    params: Any,
    has_biases: Any,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> tuple[Any, ...]:
    """Take all steps of all layers, as torch's function does, whose arguments these are."""
    if isinstance(has_biases, (list, tuple)):  # one argument later, behind the sizes of batches
        raise NotImplementedError(
            "A packed sequence has no moments. Pass a padded one, or predict with draws."
        )
    ways = 2 if bidirectional else 1
    size = len(params) // (num_layers * ways)
    sequence = input.transpose(0, 1) if batch_first else input
    ends: list[State] = []
    for layer in range(num_layers):
        if layer and train and dropout:
            sequence = F.dropout(sequence, dropout)
        found = []
        for way in range(ways):
            number = layer * ways + way
            state = tuple(part[number] for part in _as_state(hx))
            own = params[number * size : (number + 1) * size]
            outputs, state = _run(step, sequence, state, own, has_biases, bool(way))
            found.append(outputs)
            ends.append(state)
        sequence = torch.cat(found, -1) if bidirectional else found[0]
    output = sequence.transpose(0, 1) if batch_first else sequence
    return output, *(torch.stack([*parts]) for parts in zip(*ends, strict=True))


def _run(
    step: Step, sequence: Any, state: State, weights: Sequence[Any], has_biases: bool, back: bool
) -> tuple[Any, State]:
    """Return the outputs of all steps in one direction, ``(steps, batch, size)``, and the last state."""
    weight, own, *rest = weights
    of_input, of_state, *projection = rest if has_biases else (None, None, *rest)
    inputs = F.linear(sequence, weight, of_input).unbind(0)
    outputs = []
    for each in reversed(inputs) if back else inputs:
        state = step(each, state, own, of_state, *projection)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if back else outputs), state


def _as_state(hx: Any) -> State:
    return tuple(hx) if isinstance(hx, (list, tuple)) else (hx,)


_STEPS: dict[str, Step] = {
    "rnn_tanh": partial(_plain_step, torch.tanh),
    "rnn_relu": partial(_plain_step, torch.relu),
    "lstm": _lstm_step,
    "gru": _gru_step,
}

RECURRENT_RULES: dict[str, Callable[..., Any]] = {
    **{name: partial(_layer, step) for name, step in _STEPS.items()},
    **{f"{name}_cell": partial(_cell, step) for name, step in _STEPS.items()},
}
