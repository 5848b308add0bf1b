"""What the processes of torch's default process group share while they train one guide."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


def world() -> tuple[int, int]:
    """Return this process's rank and how many there are: 0 and 1 where no group was initialized."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def of_all_ranks(value: Any) -> list[Any]:
    """Return what each rank passes to this call, in the order of ranks."""
    values = [value] * world()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def mean_over_ranks(numbers: Tensor) -> Tensor:
    """Return the mean over the ranks, on each of them."""
    size = world()[1]
    if size > 1:
        dist.all_reduce(numbers)
    return numbers / size


def shared_seed() -> int:
    """Draw a seed from torch's generator of rank 0, the same on all ranks."""
    seed: int = of_all_ranks(int(torch.randint(2**62, ())))[0]
    return seed


@contextmanager
def noise_of_rank(device: torch.device | None) -> Iterator[None]:
    """Give each of several ranks different noise in this block; restore generators after it."""
    rank, size = world()
    if size == 1:
        yield
        return
    seed = shared_seed() + rank
    if device is None and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        for gpu in devices:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed)
        yield


def share_start(module: nn.Module) -> None:
    """Give all ranks the parameters and buffers of rank 0.

    Raises:
        ValueError: If the ranks have different ones.
    """
    if world()[1] == 1:
        return
    tensors = [*module.parameters(), *module.buffers()]
    shapes = [str([(str(value.dtype), *value.shape) for value in tensors])]
    if len({tuple(each) for each in of_all_ranks(shapes)}) > 1:
        raise ValueError(
            "All ranks must have parameters and buffers of the same shapes. Make the same model and the "
            "same guide on each, and initialize both with batches of the same form."
        )
    _apply_flat(tensors, lambda flat: dist.broadcast(flat, 0))


def share_buffers(module: nn.Module) -> None:
    """Give all ranks the buffers of rank 0, such as the running statistics of its last batch."""
    if world()[1] > 1:
        _apply_flat([*module.buffers()], lambda flat: dist.broadcast(flat, 0))


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Give each parameter the mean of its gradients over the ranks, absent ones counted as zero.

    A parameter without a gradient on any rank stays without.
    """
    size = world()[1]
    if size == 1:
        return
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    is_there = trained[0].new_tensor([value.grad is not None for value in trained])
    gradients = [torch.zeros_like(value) if value.grad is None else value.grad for value in trained]
    _apply_flat([is_there, *gradients], dist.all_reduce)
    for parameter, gradient, count in zip(trained, gradients, is_there.tolist(), strict=True):
        parameter.grad = gradient.div_(size) if count else None


def _apply_flat(tensors: Sequence[Tensor], communicate: Callable[[Tensor], Any]) -> None:
    """Communicate tensors in place, those of one dtype and device as one."""
    kinds = {(value.dtype, value.device): None for value in tensors}
    for kind in kinds:
        own = [value for value in tensors if (value.dtype, value.device) == kind]
        flat = torch.cat([value.detach().reshape(-1) for value in own])
        communicate(flat)
        with torch.no_grad():
            for value, part in zip(own, flat.split([v.numel() for v in own]), strict=True):
                value.copy_(part.view(value.shape))


def by_first_rank(function: Callable[[], T]) -> T:
    """Call a function on rank 0; return what it returns, or raise what it raises, on all ranks."""
    rank, size = world()
    if size == 1:
        return function()
    found: list[Any] = [None, None]
    if rank == 0:
        try:
            found = [function(), None]
        except Exception as error:
            found = [None, error]
    dist.broadcast_object_list(found, 0)
    if found[1] is not None:
        raise found[1]
    value: T = found[0]
    return value
