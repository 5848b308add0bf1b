"""Moments of sums, products, pooling and layers; two random terms count as independent."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_structvi.linalg.matrices import floored_sqrt
from pyro_structvi.maps.convolution import for_each_dim
from pyro_structvi.moments.linear import covariance_of, distribution_of
from pyro_structvi.moments.nonlinear import (
    Moments,
    in_deviations,
    normal_cdf,
    normal_density,
    propagate,
    square,
)
from pyro_structvi.moments.random_tensor import (
    RandomTensor,
    moments,
    random_among,
    settings_of,
    total,
)
from pyro_structvi.moments.recurrent import RECURRENT_RULES

# ---- sums and products ---------------------------------------------------------------------------


def _add(input: Any, other: Any, *, alpha: float = 1, sign: float = 1) -> RandomTensor:
    """Return the moments of ``input + sign * alpha * other``."""
    factor = sign * alpha
    if input is other:
        return _mul(input, 1 + factor)
    for output, bias in ((input, other), (other, input)):
        own = getattr(output, "map_of", None)
        if own is not None and own is distribution_of(bias):
            raise NotImplementedError(
                "A weight and bias with a joint posterior have no moments where the bias is added after "
                "the layer. Use `join_bias=False`, or pass both to one call, such as `F.linear`."
            )
    (a, va), (b, vb) = moments(input), moments(other)
    loc = a + factor * b
    variance = total(va, None if vb is None else factor**2 * vb).expand(loc.shape)
    covariance = total(_covariance(input, loc), _covariance(other, loc, factor))
    return RandomTensor(loc, variance, settings_of(input, other), covariance)


def _mul(input: Any, other: Any) -> RandomTensor:
    """Return the moments of a product, exact for independent factors and for the square of a normal."""
    if input is other:
        return propagate(torch.square, square, input)
    (a, va), (b, vb) = moments(input), moments(other)
    loc = a * b
    variance = total(
        None if va is None else va * (b * b),
        None if vb is None else vb * (a * a),
        None if va is None or vb is None else va * vb,
    ).expand(loc.shape)
    own, others = _covariance(input, loc), _covariance(other, loc)
    covariance = total(
        _covariance(input, loc, b),
        _covariance(other, loc, a),
        None if own is None or others is None else own * others,
    )
    return RandomTensor(loc, variance, settings_of(input, other), covariance)


def _div(input: Any, other: Any, *, rounding_mode: str | None = None) -> RandomTensor:
    if rounding_mode is not None:
        raise NotImplementedError("A division that rounds has no moments")
    if isinstance(other, RandomTensor):
        raise NotImplementedError("A division by what is random has no moments")
    return _mul(input, 1 / other)


def _lerp(input: Any, end: Any, weight: Any) -> Any:
    """Return the moments of ``input + weight * (end - input)``, exact for independent arguments."""
    if not isinstance(weight, RandomTensor):
        return input * (1 - weight) + end * weight
    (a, va), (b, vb), (w, vw) = moments(input), moments(end), moments(weight)
    # Under autocast the dtypes differ, which `torch.lerp` refuses.
    loc, spread = a + w * (b - a), 0 if vw is None else vw
    variance = total(
        spread * (b - a).square(),
        None if va is None else ((1 - w) ** 2 + spread) * va,
        None if vb is None else (w**2 + spread) * vb,
    )
    return RandomTensor(loc, variance.expand(loc.shape), settings_of(input, end, weight))


def _covariance(x: Any, loc: Tensor, factor: Any = 1) -> Tensor | None:
    """Return the covariance of ``factor * x`` in the shape of a result, if it is kept."""
    if not isinstance(x, RandomTensor) or not x.settings.full_covariance or loc.dim() != 2:
        return None
    known = covariance_of(x) if x.shape[:-1].numel() == 1 else x.covariance
    if known is None:
        own = torch.diag_embed(x.variance.expand(loc.shape))
    else:
        own = known.expand(*loc.shape, loc.shape[-1])
    if isinstance(factor, Tensor):
        scale = factor.expand(loc.shape)
        return own * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    return own if factor == 1 else own * float(factor) ** 2


def _matmul(input: Any, other: Any) -> Any:
    """Return the moments of a product of matrices with independent elements, or with a vector.

    The rows of a softmax have the tangent of an average, whose weights sum to one.
    """
    if other.dim() == 1 < input.dim():  # a dense layer with one output
        return F.linear(input, other.unsqueeze(0)).squeeze(-1)
    (a, va), (b, vb) = moments(input), moments(other)
    scores = getattr(input, "of_scores", None)
    of_input = None
    if va is not None:
        of_input = va @ b.square() if scores is None else _of_average(a, scores, b)
    variance = total(
        of_input,
        None if va is None or vb is None else va @ vb,
        None if vb is None else a.square() @ vb,
    )
    return RandomTensor(a @ b, variance, settings_of(input, other))


def _of_average(weights: Tensor, of_scores: Tensor, values: Tensor) -> Tensor:
    """Return the variance of ``softmax(s) @ values`` from the variances of the scores s.

    It is the sum over j of ``p_j^2 Var(s_j) (values_j - average)^2``, with values about their mean and,
    so that a sharp softmax leaves no rounding, about the one with the largest weight.
    """
    values = values - values.mean(-2, keepdim=True)
    lead = torch.broadcast_shapes(weights.shape[:-2], values.shape[:-2])
    top = weights.argmax(-1, keepdim=True).expand(*lead, -1, -1)
    chosen = values.expand(*lead, -1, -1).take_along_dim(top, -2)
    spread = weights.square() * of_scores
    rest, of_rest = (part.expand(*lead, -1, -1).scatter(-1, top, 0) for part in (weights, spread))
    total_of_rest = of_rest.sum(-1, keepdim=True)
    shift = rest @ values - chosen * rest.sum(-1, keepdim=True)  # from the chosen to the average
    seen = of_rest @ values
    first = seen - chosen * total_of_rest
    second = of_rest @ values.square() - chosen * (seen + first)
    own = spread.expand(*lead, -1, -1).take_along_dim(top, -1)
    return (second - 2 * shift * first + (total_of_rest + own) * shift.square()).clamp_min(0)


def _sum(
    input: RandomTensor,
    dim: Any = None,
    keepdim: bool = False,
    *,
    axis: Any = None,
    keepdims: bool = False,
    dtype: torch.dtype | None = None,
    mean: bool = False,
) -> RandomTensor:
    """Return the moments of a sum or a mean over dimensions, by torch's names or by NumPy's."""
    given = axis if dim is None else dim
    dims = (given,) if isinstance(given, int) else tuple(given or range(input.dim()))
    of_terms = input.variance
    if input.covariance is not None and {-1, input.dim() - 1} & {*dims}:
        of_terms = input.covariance.sum((-2, -1)).unsqueeze(-1)
    keep = keepdim or keepdims
    loc, variance = (part.sum(dims, keep, dtype=dtype) for part in (input.loc, of_terms))
    if mean:
        count = math.prod(input.shape[each] for each in dims)
        loc, variance = loc / count, variance / count**2
    return RandomTensor(loc, variance, input.settings)


# ---- normalization, dropout, softmax, attention --------------------------------------------------


def _batch_norm(
    input: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Scale and shift by running statistics, which is exact."""
    if training or running_mean is None or running_var is None:
        raise NotImplementedError(
            "Batch normalization by the statistics of a batch has no moments; call `model.eval()`"
        )
    ones = [1 for _ in range(input.dim() - 2)]
    if not isinstance(input, RandomTensor):
        return _affine(F.batch_norm(input, running_mean, running_var, eps=eps), weight, bias, ones)
    centered = _add(input, running_mean.reshape(-1, *ones), sign=-1)
    found = _mul(centered, (running_var + eps).rsqrt().reshape(-1, *ones))
    return _affine(found, weight, bias, ones)


def _affine(x: Any, weight: Any, bias: Any, ones: Sequence[int] = ()) -> Any:
    """Scale and shift by parameters with further dimensions of size 1."""
    if weight is not None:
        scale = weight.reshape(*weight.shape, *ones)
        is_known = next(random_among((x, scale)), None) is None
        x = x * scale if is_known else _mul(x, scale)
    return x if bias is None else _add(x, bias.reshape(*bias.shape, *ones))


def _standardized(x: Any, start: int, num_groups: int, eps: float, center: bool = True) -> Any:
    """Center and scale groups of the elements from a dimension on by their own statistics.

    Variances are those of the tangent, ``(I - 1 1' / n - z z' / n) / s`` for the result z of n elements.
    The root of the expected square about the mean replaces the standard deviation s. A known input,
    before a random scale, gives a known result.
    """
    is_known = not isinstance(x, RandomTensor)
    start = start if is_known or x.covariance is None else -1

    def grouped(values: Tensor) -> Tensor:
        return values.flatten(start).unflatten(-1, (num_groups, -1))

    def centered(values: Tensor) -> Tensor:
        groups = grouped(values)
        return groups - _group_mean(groups) if center else groups

    loc = centered(x if is_known else x.loc)
    if is_known:
        return (loc * (_group_mean(loc.square()) + eps).rsqrt()).reshape(x.shape)
    covariance, of_mean = x.covariance, float(center) / loc.shape[-1]
    if covariance is not None:
        covariance = centered(centered(covariance).flatten(-2).mT).flatten(-2)
        variance = own = grouped(covariance.diagonal(dim1=-2, dim2=-1))
    else:
        own = grouped(x.variance)
        variance = (1 - 2 * of_mean) * own + of_mean * _group_mean(own)
    root = (_group_mean(loc.square() + variance) + eps).rsqrt()
    z = loc * root
    if covariance is None:
        with_scale = z * (2 * center * _group_mean(z * own) + z * _group_mean(z.square() * own))
        variance = variance + (with_scale - 2 * z.square() * own) / loc.shape[-1]
        variance = (variance.clamp_min(0) * root.square()).reshape(x.shape)
        return RandomTensor(z.reshape(x.shape), variance, x.settings)
    for _ in range(2):  # both sides
        rows = grouped(covariance)
        rows = rows - z.unsqueeze(1) * _group_mean(z.unsqueeze(1) * rows)
        covariance = (rows * root.unsqueeze(1)).flatten(-2).mT
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    return RandomTensor(z.reshape(x.shape), variance, x.settings, covariance)


def _group_mean(values: Tensor) -> Tensor:
    """Return means over the last dimension, which is kept."""
    return values.mean(-1, keepdim=True)


def _layer_norm(
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Any:
    return _affine(_standardized(input, -len(normalized_shape), 1, eps), weight, bias)


def _rms_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: Any = None
) -> Any:
    least = torch.finfo(input.dtype).eps if eps is None else eps
    found = _standardized(input, -len(normalized_shape), 1, least, center=False)
    return _affine(found, weight, None)


def _group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    found = _standardized(input, 1, num_groups, eps)
    return _affine(found, weight, bias, [1 for _ in range(input.dim() - 2)])


def _dropout(
    input: RandomTensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    train: bool = True,
) -> RandomTensor:
    """Return the moments over dropped elements, exact but for covariances between them."""
    if not (training and train) or p == 0:
        return input
    if p == 1:
        zero = torch.zeros_like(input.loc)
        return RandomTensor(zero, zero.clone(), input.settings)
    variance = (input.variance + p * input.loc.square()) / (1 - p)
    return RandomTensor(input.loc, variance, input.settings)


def _alpha_dropout(
    input: RandomTensor,
    p: float,
    training: bool = True,
    inplace: bool = False,
    *,
    train: bool = True,
) -> RandomTensor:
    if training and train and p > 0:
        raise NotImplementedError("Alpha dropout has no moments; call `model.eval()`")
    return input


def _rrelu(
    input: RandomTensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    if training:
        raise NotImplementedError("RReLU has no moments where it draws slopes; call `model.eval()`")
    return F.leaky_relu(input, (lower + upper) / 2)


def _softmax(
    input: RandomTensor, dim: int, *args: Any, log: bool = False, **kwargs: Any
) -> RandomTensor:
    """Return the softmax of the means, or its log, and the variance of its tangent there."""
    p = input.loc.softmax(dim)
    is_last = dim in (-1, input.dim() - 1)
    covariance = None
    if input.covariance is not None and is_last:
        cross = input.covariance @ p.unsqueeze(-1)  # of the scores and their average
        covariance = input.covariance - cross - cross.mT + p.unsqueeze(-2) @ cross
        variance = covariance.diagonal(dim1=-2, dim2=-1)
    else:
        variance = (1 - 2 * p) * input.variance
        variance = variance + (p.square() * input.variance).sum(dim, keepdim=True)
    variance = variance.clamp_min(0)
    if log:
        return RandomTensor(input.loc.log_softmax(dim), variance, input.settings, covariance)
    if covariance is not None:
        covariance = covariance * p.unsqueeze(-1) * p.unsqueeze(-2)
    found = RandomTensor(p, p.square() * variance, input.settings, covariance)
    found.of_scores = input.variance if is_last else None
    return found


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return the moments of ``softmax(q k' / sqrt(d)) v``, with scores independent of the values."""
    if enable_gqa:
        heads = query.shape[-3]
        key, value = (each.repeat_interleave(heads // each.shape[-3], -3) for each in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT
    if is_causal:
        if attn_mask is not None:
            raise ValueError(
                "`attn_mask` must be None if `is_causal=True`. Pass one mask for both."
            )
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    is_empty = None
    if attn_mask is not None:
        is_boolean = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if is_boolean else scores + attn_mask
        # A query whose keys are all masked has the average zero.
        is_empty = (moments(scores)[0] == -torch.inf).all(-1, keepdim=True)
        scores = scores.masked_fill(is_empty, 0.0)
    weights = scores.softmax(-1)
    outputs = (F.dropout(weights, dropout_p) if dropout_p else weights) @ value
    return outputs if is_empty is None else outputs.masked_fill(is_empty, 0.0)


# ---- pooling --------------------------------------------------------------------------------------


def maximum_of_two(a: Moments, b: Moments) -> Moments:
    """Return the moments of the larger of two independent normals.

    References:
        Clark (1961), "The greatest of a finite set of random variables", Eqs. 4 and 5.
    """
    (ma, va), (mb, vb) = a, b
    theta = floored_sqrt(va + vb)
    alpha = in_deviations(ma - mb, theta)
    first, second = normal_cdf(alpha), normal_cdf(-alpha)
    density = theta * normal_density(alpha)
    loc = ma * first + mb * second + density
    # About the mean, without differences of large squares.
    da, db = ma - loc, mb - loc
    variance = (va + da.square()) * first + (vb + db.square()) * second + (da + db) * density
    return loc, variance.clamp_min(0)


def _max_pool(
    dims: int,
    input: RandomTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> RandomTensor:
    """Return the moments of the maximum over windows; each maximum of two counts as normal."""
    kernel, padding, dilation = (
        for_each_dim(value, dims) for value in (kernel_size, padding, dilation)
    )
    stride = kernel if stride is None or stride == [] else for_each_dim(stride, dims)
    if ceil_mode or return_indices or any(d != 1 for d in dilation):
        raise NotImplementedError(
            "Max pooling with `ceil_mode`, `return_indices` or a dilation has no moments"
        )
    loc, variance = input.loc, input.variance
    if any(padding):
        low = (loc.min() - 40 * floored_sqrt(variance.max())).detach()
        width = [size for size in reversed(padding) for _ in range(2)]
        pads = F.pad(torch.zeros_like(loc), width, value=1.0).bool()
        loc, variance = torch.where(pads, low, F.pad(loc, width)), F.pad(variance, width)
    for axis, (size, step) in enumerate(zip(kernel, stride, strict=True), input.dim() - dims):
        loc, variance = (part.unfold(axis, size, step) for part in (loc, variance))
    columns = (part.flatten(-dims).unbind(-1) for part in (loc, variance))
    parts: list[Moments] = [*zip(*columns, strict=True)]
    while len(parts) > 1:  # in rounds of pairs
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [maximum_of_two(*pair) for pair in pairs] + parts[len(parts) // 2 * 2 :]
    return RandomTensor(*parts[0], input.settings)


def _pooled(average: Callable[[Tensor], Tensor], input: RandomTensor, counts: Any) -> RandomTensor:
    """Return the moments of averages over windows of so many elements."""
    if input.covariance is None:
        return RandomTensor(average(input.loc), average(input.variance) / counts, input.settings)
    covariance = average(average(input.covariance).mT)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    return RandomTensor(average(input.loc), variance, input.settings, covariance)


def _average_pool(
    dims: int,
    input: RandomTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> RandomTensor:
    """Return the moments of averages over windows."""
    if ceil_mode or divisor_override is not None or (not count_include_pad and padding):
        raise NotImplementedError(
            "Average pooling with `ceil_mode`, `divisor_override`, or padding that does not count, has "
            "no moments"
        )
    average: Callable[..., Tensor] = getattr(F, f"avg_pool{dims}d")
    count = torch.Size(for_each_dim(kernel_size, dims)).numel()
    return _pooled(lambda part: average(part, kernel_size, stride, padding), input, count)


def _adaptive_average_pool(dims: int, input: RandomTensor, output_size: Any) -> RandomTensor:
    """Return the moments of averages over windows that fill the input."""
    old = input.shape[-dims:]
    new = [own or size for own, size in zip(for_each_dim(output_size, dims), old, strict=True)]
    counts = input.loc.new_ones(())
    for size, parts in zip(old, new, strict=True):
        own = [-(-(i + 1) * size // parts) - i * size // parts for i in range(parts)]
        counts = counts.unsqueeze(-1) * counts.new_tensor(own)
    average: Callable[..., Tensor] = getattr(F, f"adaptive_avg_pool{dims}d")
    return _pooled(lambda part: average(part, new), input, counts)


LAYER_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "radd"), _add),
    **dict.fromkeys(("sub", "subtract"), partial(_add, sign=-1)),
    "rsub": lambda input, other: _add(other, input, sign=-1),
    **dict.fromkeys(("mul", "rmul", "multiply"), _mul),
    **dict.fromkeys(("div", "truediv", "divide"), _div),
    **dict.fromkeys(("neg", "negative"), lambda input: _mul(input, -1)),
    **dict.fromkeys(("matmul", "bmm", "mm", "mv"), _matmul),
    "rmatmul": lambda input, other: _matmul(other, input),
    "lerp": _lerp,
    "sum": _sum,
    "mean": partial(_sum, mean=True),
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), _dropout),
    "feature_dropout": _dropout,
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), _alpha_dropout),
    "rrelu": _rrelu,
    "softmax": _softmax,
    "log_softmax": partial(_softmax, log=True),
    "scaled_dot_product_attention": _attention,
    **RECURRENT_RULES,
    **{f"max_pool{dims}d": partial(_max_pool, dims) for dims in (1, 2, 3)},
    **{f"avg_pool{dims}d": partial(_average_pool, dims) for dims in (1, 2, 3)},
    **{f"adaptive_avg_pool{dims}d": partial(_adaptive_average_pool, dims) for dims in (1, 2, 3)},
}
