"""Private parts of torch, each with its use and with what breaks without it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _Orthogonal, _SpectralNorm
from torch.utils._pytree import tree_map as tree_map  # as in torch.func, for nested arguments

T = TypeVar("T", bound=Tensor)


def inside_transform() -> bool:
    """Whether this code runs inside a transform of ``torch.func``, such as vmap.

    Torch has no public question for it. Without it a gradient written by hand that has no rule for a
    transform would raise under it, in place of torch's own operations.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_tracing() -> bool:
    """Whether ``make_fx`` records what runs here, so that tensors' values may not steer Python.

    Without it a branch on a value would raise while a step is traced.
    """
    return get_proxy_mode() is not None


def without_storage(cls: type[T], shape: torch.Size, like: Tensor) -> T:
    """Return a tensor of a subclass that has a shape, and the dtype and device of ``like``, only.

    Torch documents the constructor for subclasses without giving it a public name. Without it a weight
    that has not been drawn would hold memory of a weight's size.
    """
    stand_in: T = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
    return stand_in


def reshape_without_view(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Reshape a tensor that nothing else holds into one that autograd does not take for a view.

    Autograd adds gradients in place where they are no views. Without it the gradient of a weight's size
    would be copied.
    """
    reshaped: Tensor = torch.ops.aten._unsafe_view(tensor, shape)
    return reshaped


def read_metadata(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function that reads a tensor's shape, dtype or device, past ``__torch_function__``.

    Without it the question for a shape would be answered by asking for the shape, without end.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


# The common base of batch and instance normalization in all dimensions, lazy and synchronized ones too.
# Public classes would have to be listed one by one, and a new one would get a prior by mistake.
BatchOrInstanceNorm = _NormBase

# What ``nn.utils.parametrizations.spectral_norm`` puts on a weight. Without it the weight would be
# divided by a norm that was estimated from other draws.
SpectralParametrization = _SpectralNorm


def is_householder(parametrization: Any) -> bool:
    """Whether a parametrization makes a weight orthogonal by Householder reflections.

    Only the private class says by which map. Without it columns of a draw would silently become zeros.
    """
    is_orthogonal = isinstance(parametrization, _Orthogonal)
    return is_orthogonal and bool(parametrization.orthogonal_map.name == "householder")


def forward_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that run before and after a module's forward pass.

    Torch can add and remove hooks, and not list them. Without it a layer under ``weight_norm`` would be
    replaced by one that does not do what the hook does.
    """
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


@contextmanager
def unlisted_weights(net: nn.Module) -> Iterator[None]:
    """Keep recurrent layers from listing, and so computing, their weights while these change.

    A recurrent layer reads its list whenever one of its weights is set. Without it the weights that have
    become sample sites would be drawn while the others are still parameters.
    """
    layers = [module for module in net.modules() if isinstance(module, nn.RNNBase)]
    names = [vars(layer).pop("_flat_weights_names") for layer in layers]
    yield
    for layer, own in zip(layers, names, strict=True):
        layer._flat_weights_names = own
