"""Multi-head attention with projections by ``F.linear``."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_NOT_SERVED = ("bias_k", "bias_v", "static_k", "static_v")


def attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None] | None:
    """Return multi-head attention, with the examples first in ``F.linear``.

    None where a position is added to the keys.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    call = bound.arguments
    if call["add_zero_attn"] or any(call[name] is not None for name in _NOT_SERVED):
        return None
    if call["is_causal"] and call["attn_mask"] is None:
        raise ValueError(
            "`attn_mask` must be the causal mask if `is_causal=True`, which is only a hint, but got "
            "None. Pass `nn.Transformer.generate_square_subsequent_mask(length)`."
        )
    is_batched = call["query"].dim() == 3
    heads, dropout = call["num_heads"], call["dropout_p"] if call["training"] else 0.0
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in _project(call))
    mask = _additive_mask(call["attn_mask"], call["key_padding_mask"], q)
    weights = None
    if call["need_weights"]:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        weights = (scores if mask is None else scores + mask).softmax(-1)
        if dropout:
            weights = F.dropout(weights, dropout)
        mixed = weights @ v
        weights = weights.mean(1) if call["average_attn_weights"] else weights
        weights = weights if is_batched else weights.squeeze(0)
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    joined = mixed.transpose(1, 2).flatten(2)
    outputs = F.linear(joined, call["out_proj_weight"], call["out_proj_bias"])
    return (outputs.transpose(0, 1) if is_batched else outputs.squeeze(0)), weights


def _project(call: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return queries, keys and values, each ``(batch, length, dim)``."""
    given = [call[name] for name in ("query", "key", "value")]
    weight, bias = call["in_proj_weight"], call["in_proj_bias"]
    is_packed = not call["use_separate_proj_weight"]
    if is_packed and given[0] is given[1] is given[2]:
        return F.linear(_batch_first(given[0]), weight, bias).chunk(3, dim=-1)
    separate = [call[f"{name}_proj_weight"] for name in "qkv"]
    weights = weight.chunk(3) if is_packed else separate
    biases = (None, None, None) if bias is None else bias.chunk(3)
    parts = zip(given, weights, biases, strict=True)
    return tuple(F.linear(_batch_first(x), own, shift) for x, own, shift in parts)


def _batch_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1) if x.dim() == 3 else x.unsqueeze(0)


def _additive_mask(
    attention_mask: Tensor | None, padding_mask: Tensor | None, query: Tensor
) -> Tensor | None:
    """Return the sum of both masks, in the shape of scores ``(batch, heads, length, length)``."""
    masks = []
    if attention_mask is not None:
        own = _as_numbers(attention_mask, query)
        masks.append(own.unflatten(0, query.shape[:2]) if own.dim() == 3 else own)
    if padding_mask is not None:
        masks.append(_as_numbers(padding_mask, query).reshape(query.shape[0], 1, 1, -1))
    return sum(masks[1:], masks[0]) if masks else None


def _as_numbers(mask: Tensor, like: Tensor) -> Tensor:
    """Return an additive mask; minus infinity where a boolean mask is true."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))
