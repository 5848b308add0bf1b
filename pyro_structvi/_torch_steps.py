"""Private parts of torch for recorded steps, each with its use and with what breaks without it."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode  # operations as they run
from torch.utils.weak import WeakTensorKeyDictionary as TensorKeyDictionary

__all__ = ["DispatchMode", "TensorKeyDictionary"]

LSTM_LAYERS = {  # on a CPU
    torch.ops.aten.mkldnn_rnn_layer.default,
    torch.ops.aten.mkldnn_rnn_layer_backward.default,
}
PACKING = torch.ops.aten._pack_padded_sequence.default  # reads lengths below the dispatcher


def fast_call(operation: Any) -> Callable[..., Any]:
    """Return an operation of torch's dispatcher as a built-in function.

    Without it each operation of a replayed step would pass through a Python function of torch. A layer
    of an LSTM omits what its gradients need unless torch records gradients, and takes the numbers of its
    inputs as they lie in memory.
    """
    if operation not in LSTM_LAYERS:
        return operation._op if isinstance(operation, torch._ops.OpOverload) else operation

    def run(*args: Any) -> Any:
        contiguous = [v.detach().contiguous() if isinstance(v, Tensor) else v for v in args]
        with torch.enable_grad():
            return operation(*contiguous)

    return run


def by_inductor(
    graph: fx.GraphModule, inputs: Sequence[Tensor], channels_last: bool
) -> Callable[..., Any]:
    """Compile a graph of operations, which changes, for tensors of the very sizes of these.

    Draws stay torch's own. ``torch.compile`` would read the graph as a user's code, and look at inputs
    in each call, and inductor at sizes: that would be much of a small net's step. On the CPU what calls
    kernels is compiled, too, and images are laid channels-last only where that is asked for.
    """
    options = {"fallback_random": True, "size_asserts": False, "alignment_asserts": False}
    if all(value.device.type == "cpu" for value in inputs):
        options |= {"cpp_wrapper": True, "cpp_wrapper_build_separate": True}
        options["layout_optimization"] = channels_last
    with torch.no_grad(), warnings.catch_warnings(), _errors_only("torch._inductor.ir"):
        for kind in (FutureWarning, DeprecationWarning):  # of torch about torch
            warnings.simplefilter("ignore", kind)
        from torch import _inductor  # which takes long, and is needed here only

        run: Callable[..., Any] = _inductor.compile(graph, [*inputs], options=options)
    return run


@contextmanager
def _errors_only(name: str) -> Iterator[None]:
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def written_arguments(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation of torch's dispatcher writes into.

    Without it a write to a tensor on the host would be done once and left out of a CUDA graph, and a
    value that is written into could be taken for another of the same operation.
    """
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


def is_profiler_mark(operation: Any) -> bool:
    """Whether an operation of torch's dispatcher only tells a profiler where a function begins or ends.

    Optimizers of torch have such marks. Without it each replay of a step would make them.
    """
    is_operation = isinstance(operation, torch._ops.OpOverload)
    return is_operation and operation.namespace == "profiler"


def is_random(operation: Any) -> bool:
    """Whether an operation of torch's dispatcher draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())


def keep_from_warning(optimizer: torch.optim.Optimizer) -> None:
    """Keep an optimizer that can be captured from warning of each step taken without a capture.

    Without it the steps before a CUDA graph is captured would warn.
    """
    optimizer._warned_capturable_if_run_uncaptured = True


def norm_of(tensors: Sequence[Tensor], for_compilers: bool = False) -> Tensor:
    """Return the norm of tensors together, on the device and in the dtype of the first one's.

    The public ``get_total_norm`` sorts tensors by device and dtype first, which takes longer than the
    norms themselves where a net is small.
    """
    if for_compilers:  # which do not take the norms of several tensors
        norms = [torch.linalg.vector_norm(each) for each in tensors]
    else:
        norms = [*torch._foreach_norm([*tensors])]
    together: Tensor = torch.linalg.vector_norm(torch.stack([each.to(norms[0]) for each in norms]))
    return together


def can_skip_updates(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer can leave all as it is by a number on the device, as GradScaler has it do.

    Torch marks such optimizers with a private attribute. Without it a step captured on a GPU could not
    hold an update that depends on its gradients being finite.
    """
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and getattr(optimizer, "_step_supports_amp_scaling", False)


def runs_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether functions of others run before or after each step of an optimizer.

    Torch has no public question for it. Without it they would run when a step is recorded, and in no
    replay of it.
    """
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    of_all = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    return any((*own, *of_all))
