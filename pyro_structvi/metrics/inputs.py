"""Checked arguments of scores: probabilities, classes, and tensors of one shape."""

import torch
from torch import Tensor

from pyro_structvi._checks import brief, check_classes, check_finite, check_real, check_shape


def checked_probabilities(name: str, probabilities: Tensor) -> Tensor:
    """Return probabilities ``(N, classes)`` in double, from 0 to 1, or raise."""
    check_real(name, probabilities)
    check_not_empty(name, probabilities)
    if probabilities.dim() != 2:
        raise ValueError(
            f"`{name}` must have shape (N, classes), but have {probabilities.dim()} dimensions. Average "
            "over draws, flatten positions, and let `y` have one class for each row."
        )
    double = probabilities.detach().double()
    beyond = torch.maximum(-double, double - 1).amax(-1)
    off = torch.maximum(beyond, (double.sum(-1) - 1).abs())
    rounding = max(1e-3, torch.finfo(probabilities.dtype).eps ** 0.5)
    wrong = ~(off <= rounding)  # NaN too
    if bool(wrong.any()):
        advice = "`logits.softmax(-1)` for logits"
        if probabilities.shape[1] == 1:
            advice = "`torch.cat([1 - p, p], -1)` for probabilities p of binary labels"
        raise ValueError(
            f"`{name}` must be at least 0 and sum to 1 over the classes, but row "
            f"{int(wrong.nonzero()[0])} is not. Pass {advice}."
        )
    return double.clamp(0, 1)


def checked_classes(name: str, y: Tensor, probabilities: Tensor) -> Tensor:
    """Return classes ``(N,)`` on the device of probabilities ``(N, classes)``, or raise."""
    check_shape(name, y, probabilities.shape[:1], "(N,)", by="probabilities")
    check_classes(name, y, probabilities.shape[-1])
    return y.long().to(probabilities.device)


def same_shape_doubles(**tensors: Tensor) -> list[Tensor]:
    """Return finite tensors of one shape in double, on the first one's device, or raise."""
    by, reference = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        check_numbers(name, tensor)
        if tensor is not reference:
            check_shape(name, tensor, reference.shape, f"that of `{by}`", by=by)
    return [tensor.detach().double().to(reference.device) for tensor in tensors.values()]


def check_not_empty(name: str, tensor: Tensor) -> None:
    """Raise a ``ValueError`` if a tensor has no values, whose mean is NaN."""
    if not tensor.numel():
        raise ValueError(f"`{name}` must hold at least one value, but got {brief(tensor)}.")


def check_numbers(name: str, tensor: Tensor, dim: int = 0) -> None:
    """Raise unless a tensor has finite numbers, at least one, and at least so many dimensions."""
    check_real(name, tensor, dim, whole=True)
    check_not_empty(name, tensor)
    check_finite(name, tensor)


def check_vector(name: str, tensor: Tensor) -> None:
    """Raise a ``ValueError`` unless a tensor has one number for each example."""
    if tensor.dim() != 1:
        raise ValueError(
            f"`{name}` must have one number for each example, (N,), but got {brief(tensor)}. Sum or "
            "average over the other dimensions."
        )
