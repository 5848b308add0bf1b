"""Private parts of torch, each with its use and with what breaks without it."""

import logging
import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from operator import is_not
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint as checkpoint
from torch import Tensor, fx, nn
from torch.autograd import Variable, forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _Orthogonal, _SpectralNorm
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode  # operations as they run
from torch.utils._pytree import tree_flatten as take_apart  # nested arguments, as in torch.func
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as put_together
from torch.utils.weak import WeakTensorKeyDictionary as TensorKeyDictionary

T = TypeVar("T", bound=Tensor)


@contextmanager
def kernels_for_vmap(like: Tensor) -> Iterator[None]:
    """Run a block on the device of a tensor with kernels of attention that :func:`torch.func.vmap` maps.

    It runs others in a loop, with a warning.
    """
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        kernels = sdpa_kernel(SDPBackend.MATH) if like.device.type == "cpu" else nullcontext()
        with kernels:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)


def inside_transform() -> bool:
    """Whether a transform of ``torch.func`` runs, which refuses gradients by hand without a rule."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def inside_jit_trace() -> bool:
    """Whether ``torch.jit.trace`` records this code; it takes no function that writes in place."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined]


def inside_forward_derivative() -> bool:
    """Whether a net is differentiated in its inputs here, and not just applied once."""
    return forward_ad._current_level >= 0


_IS_RECORDING = ContextVar("_IS_RECORDING", default=False)


@contextmanager
def recording() -> Iterator[None]:
    """Announce that a block is recorded, so that tensors' values may not steer Python."""
    token = _IS_RECORDING.set(True)
    try:
        yield
    finally:
        _IS_RECORDING.reset(token)


def is_recording() -> bool:
    """Whether a :func:`recording` block or ``make_fx`` runs, where a branch on a value would raise."""
    return _IS_RECORDING.get() or get_proxy_mode() is not None


def can_read(tensor: Tensor) -> bool:
    """Whether Python may read a constant here without an error, a wait or a lost gradient."""
    if torch.compiler.is_dynamo_compiling() or get_proxy_mode() is not None:
        return False
    is_traced = inside_transform() or inside_jit_trace()
    return not (is_traced or tensor.requires_grad or tensor.device.type != "cpu")


def inside_backward() -> bool:
    """Whether a checkpoint is recomputed here, whose layers must not draw new weights."""
    return torch._C._current_graph_task_id() != -1


def after_backward(act: Callable[[], None]) -> None:
    """Act when this backward pass is over, so that a later one does not take its values."""
    Variable._execution_engine.queue_callback(act)


def inside_checkpoint() -> bool:
    """Whether activation checkpointing will compute this code again, where a weight is drawn once."""
    return any(frame.f_code.co_filename == checkpoint.__file__ for frame in _frames())


def inside_reentrant_backward() -> bool:
    """Whether a checkpoint is recomputed that would lose the gradients of weights, no inputs of it."""
    code = checkpoint.CheckpointFunction.backward.__code__
    return any(frame.f_code is code for frame in _frames())


def _frames() -> Iterator[FrameType]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


def count_of_writes(tensor: Tensor) -> float:
    """Return how often a tensor was written to; NaN, which equals nothing, for one of inference mode.

    It counts no writes.
    """
    return math.nan if tensor.is_inference() else tensor._version


def has_overlap(tensor: Tensor) -> bool:
    """Whether several elements are in one place, as in an expanded tensor; torch writes into none."""
    if tensor.layout != torch.strided:
        return False
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory, in any order, as of no slice and no expanded tensor."""
    if tensor.layout != torch.strided:
        return True
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def without_storage(cls: type[T], shape: torch.Size, like: Tensor) -> T:
    """Return a tensor of a subclass with a shape, dtype and device, and no memory of that size."""
    return Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)


def reshape_without_view(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Reshape a tensor that nothing else holds into no view, whose gradient autograd does not copy."""
    return torch.ops.aten._unsafe_view(tensor, shape)


# The common base of batch and instance normalization in all dimensions, lazy and synchronized ones too.
# Public classes would have to be listed one by one, and a new one would get a prior by mistake.
BatchOrInstanceNorm = _NormBase

# What ``nn.utils.parametrizations.spectral_norm`` puts on a weight. Without it the weight would be
# divided by a norm that was estimated from other draws.
SpectralParametrization = _SpectralNorm


def is_householder(parametrization: Any) -> bool:
    """Whether a parametrization makes a weight orthogonal by Householder reflections.

    Only the private class shows it. Without it columns of a draw would silently become zeros.
    """
    is_orthogonal = isinstance(parametrization, _Orthogonal)
    return is_orthogonal and bool(parametrization.orthogonal_map.name == "householder")


def forget_parametrizations() -> None:
    """Clear the values that torch's ``parametrize.cached()`` keeps, which are of a former draw."""
    nn.utils.parametrize._cache.clear()


def forward_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks around a module's forward pass, such as ``weight_norm``'s."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


@contextmanager
def parts_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Leave no tensors of a block in modules, as those under vmap, which nothing can read later.

    A dictionary or list in a module that has got some is put back as it was, and if the block raises all
    of these, and classes, as of adapters of parameters.

    Raises:
        NotImplementedError: If the block leaves such tensors in place of parameters or buffers, which
            modules of Pyro in evaluation mode may cache.
    """
    python = [each for each in modules if not isinstance(each, torch.jit.ScriptModule)]
    before = [(each, type(each), own_tensors(each)) for each in python]
    parts = (part for each in python for part in (vars(each), *vars(each).values()))
    parts = (part for part in parts if isinstance(part, (dict, list)))
    kept = [(part, {**part} if isinstance(part, dict) else [*part]) for part in parts]
    is_over = False
    try:
        yield
        for module, _, tensors in before:
            if module.training or not hasattr(module, "_pyro_name"):
                _refuse_values_of_pass(module, tensors)
        is_over = True
    finally:
        for part, own in kept:
            new = _new_in(part, own)
            if not is_over or (new and any(map(_belongs_to_pass, tree_leaves(new)))):
                part.clear()
                part.update(own) if isinstance(part, dict) else part.extend(own)
        for module, kind, _ in before if not is_over else ():
            module.__class__ = kind


def _new_in(part: Any, before: Any) -> list[Any]:
    """Return the values of a dictionary or list that have changed."""
    if isinstance(part, dict):
        return [value for name, value in part.items() if value is not before.get(name)]
    return [*part] if len(part) != len(before) or any(map(is_not, part, before)) else []


def _refuse_values_of_pass(module: nn.Module, before: dict[str, Tensor]) -> None:
    changed = (pair for pair in own_tensors(module).items() if pair[1] is not before.get(pair[0]))
    if left := [name for name, value in changed if _belongs_to_pass(value)]:
        kind = type(module).__name__.removeprefix("Pyro")
        raise NotImplementedError(f"A {kind} sets {left} to values of this pass alone.")


def _belongs_to_pass(value: Any) -> bool:
    """Whether a value is a tensor of a transform that is over, or one that stands for values."""
    if not isinstance(value, Tensor):
        return False
    is_wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(value)
    return type(value) not in (Tensor, nn.Parameter) or (is_wrapped and not inside_transform())


def over_draws(run: Callable[..., Any], in_dims: Any = 0) -> Callable[..., Any]:
    """Return a function mapped over stacked draws by vmap, each with separate random numbers."""
    mapped = without_generators(run)
    return torch.func.vmap(mapped, in_dims=in_dims, randomness="different")


def without_generators(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for vmap that raises an error if it takes numbers of a ``torch.Generator``."""

    def checked(*args: Any) -> Any:
        with _RefusedGenerators():
            return run(*args)

    return run if torch.compiler.is_dynamo_compiling() else checked  # which takes no generators


class _RefusedGenerators(TorchFunctionMode):
    """Refuses generators, whose numbers vmap would share out among the draws, whatever their seed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and kwargs.get("generator") is not None:
            raise NotImplementedError(
                f"`{func.__name__}` has a `generator`, whose numbers would differ between draws under "
                "`torch.func.vmap`, whatever its seed. Draw them once, and keep them in a buffer."
            )
        return func(*args, **(kwargs or {}))


def map_draws(
    run: Callable[[dict[str, Tensor]], Tensor],
    draws: dict[str, Tensor],
    modules: Iterable[nn.Module],
) -> Tensor:
    """Map a function that runs modules over stacked draws by vmap, with separate random numbers."""
    like = next(iter(draws.values()), torch.empty(()))
    with kernels_for_vmap(like), parts_kept(modules):
        outputs: Tensor = over_draws(run)(draws)
    return outputs


@contextmanager
def unlisted_weights(net: nn.Module) -> Iterator[None]:
    """Keep recurrent layers from listing, and so computing, their weights while these change.

    Otherwise weights that have become sample sites would be drawn while others are still parameters.
    """
    layers = [module for module in net.modules() if isinstance(module, nn.RNNBase)]
    names = [vars(layer).pop("_flat_weights_names") for layer in layers]
    yield
    for layer, own in zip(layers, names, strict=True):
        layer._flat_weights_names = own


def remove_hooks(module: nn.Module, hooks: Collection[Any]) -> None:
    """Remove hooks, also from a copy, which has no handles; a plain copy would go on to sample."""
    for name in ("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks"):
        own = getattr(module, name)
        for key in [key for key, hook in own.items() if hook in hooks]:
            del own[key]


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own parameters and buffers, several times as fast as torch's generators."""
    own = {**module._parameters, **module._buffers}
    return {name: value for name, value in own.items() if value is not None}


def all_modules(root: nn.Module) -> list[nn.Module]:
    """Return a module and all modules in it, each once, several times as fast as torch's generator."""
    found, waiting = {root: None}, [root]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return [*found]


# What `F.grouped_mm` hands its arguments to, and so what a stack of lazy weights is told of. Without it
# the experts of a mixture would be drawn.
GROUPED_PRODUCT = torch._grouped_mm


def without_compiler(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` was given, or one that it did not return as it is."""
    return vars(module).get("_modules", {}).get("_orig_mod", module)


_PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_sparse", "is_quantized")

# What is known of a tensor without its values, and so of one that stands for another.
METADATA = {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.nelement,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
}


# Where a subclass is an ordinary tensor; ``Tensor.__torch_function__`` takes four times as long.
without_overrides = torch._C.DisableTorchFunctionSubclass


def _computing_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks of torch that compute weights before each call: pruning, old norms of weights."""
    hooks = module._forward_pre_hooks.values()
    return [hook for hook in hooks if type(hook).__module__.startswith("torch.nn.utils.")]


def made_by_hooks(module: nn.Module) -> set[str]:
    """Return the attributes that hooks of torch compute of parameters before each call."""
    hooks = _computing_hooks(module)
    return {str(getattr(hook, "name", getattr(hook, "_tensor_name", ""))) for hook in hooks}


def compute_by_hooks(module: nn.Module) -> None:
    """Let hooks of torch compute their weights, so that these follow from the present parameters."""
    for hook in _computing_hooks(module):
        hook(module, ())


__all__ = ["DispatchMode", "TensorKeyDictionary", "put_together", "take_apart"]

LSTM_LAYERS = {  # on a CPU
    torch.ops.aten.mkldnn_rnn_layer.default,
    torch.ops.aten.mkldnn_rnn_layer_backward.default,
}

# What reads values below the dispatcher: a record would keep those of its call. The second ones read
# lengths of packed sequences, or places of cuts, if these are a tensor.
READERS = {Tensor.numpy, Tensor.tolist, Tensor.__array__}
READERS_OF_SECOND = {
    *(torch._pack_padded_sequence, torch._pad_packed_sequence),
    *(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
    *(torch.tensor_split, Tensor.tensor_split),
}


def fast_call(operation: Any) -> Callable[..., Any]:
    """Return an operation of torch's dispatcher as a built-in function, with no Python around it.

    A layer of an LSTM omits what its gradients need unless torch records gradients, and takes the
    numbers of its inputs as they lie in memory.
    """
    if operation not in LSTM_LAYERS:
        return operation._op if isinstance(operation, torch._ops.OpOverload) else operation

    def run(*args: Any) -> Any:
        contiguous = [v.detach().contiguous() if isinstance(v, Tensor) else v for v in args]
        with torch.enable_grad():
            return operation(*contiguous)

    return run


def by_inductor(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile a graph of operations, which changes, for tensors of the very sizes of these.

    Draws stay torch's own, and images stay as they lie. ``torch.compile`` would read the graph as a
    user's code, and look at inputs in each call, and inductor at sizes: that would be much of a small
    net's step. On the CPU what calls kernels is compiled, too.
    """
    options = {"fallback_random": True, "size_asserts": False, "alignment_asserts": False}
    if all(value.device.type == "cpu" for value in inputs):
        options |= {"cpp_wrapper": True, "cpp_wrapper_build_separate": True}
        options["layout_optimization"] = False
    log = logging.getLogger("torch._inductor.ir")
    with torch.no_grad(), warnings.catch_warnings(), ExitStack() as stack:
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.ERROR)
        for kind in (FutureWarning, DeprecationWarning):  # of torch about torch
            warnings.simplefilter("ignore", kind)
        from torch import _inductor  # which takes long, and is needed here only

        run: Callable[..., Any] = _inductor.compile(graph, [*inputs], options=options)
    return run


def written_arguments(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation of torch's dispatcher writes into."""
    if operation in _WRITES_UNSAID:
        return [*args, *kwargs.values()]
    schema = operation._schema.arguments if isinstance(operation, torch._ops.OpOverload) else ()
    return [
        args[place] if place < len(args) else kwargs.get(each.name)
        for place, each in enumerate(schema)
        if each.alias_info and each.alias_info.is_write
    ]


_WRITES_UNSAID = {  # running statistics, of which their schema says nothing
    *(torch.ops.aten.native_batch_norm.default, torch.ops.aten.cudnn_batch_norm.default),
    *(torch.ops.aten.miopen_batch_norm.default, torch.ops.aten.batch_norm.default),
}


def is_random(operation: Any) -> bool:
    """Whether an operation of torch's dispatcher draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())


def can_be_recorded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a replay can update, or leave all as it is by a number, as GradScaler does.

    It would leave out what Python does in a step of other code, and in hooks.
    """
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    of_all = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    is_known = type(optimizer).step.__module__.startswith(("torch.", "pyro_structvi."))
    fused = all(group.get("fused") for group in optimizer.param_groups)
    can_skip = fused and getattr(optimizer, "_step_supports_amp_scaling", False)
    return is_known and can_skip and not any((*own, *of_all))


def has_gradient_hook(parameter: nn.Parameter) -> bool:
    """Whether a function of others runs on the gradient that a backward pass leaves in a parameter."""
    return bool(parameter._post_accumulate_grad_hooks)


def hook_numbers(module: nn.Module) -> list[int]:
    """Return the numbers of all hooks of a module and its parameters; torch gives each once."""
    own = vars(module)
    numbers = [number for name in _HOOKS if own[name] for number in own[name]]
    for parameter in module._parameters.values():
        if parameter is not None and parameter.requires_grad:
            numbers += parameter._backward_hooks or ()
            numbers += parameter._post_accumulate_grad_hooks or ()
    return numbers


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
