"""What the processes of torch's default process group share while they train one guide."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

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


def data_parallel(loss: nn.Module) -> nn.Module:
    """Let backward passes average gradients over the ranks; parameters become those of rank 0.

    A model need not visit all its sites in each pass, so parameters without gradients are looked for.
    Torch says on the standard error if it finds none; there is always one.
    """
    if world()[1] == 1:
        return loss
    loss.never_used = nn.Parameter(next(loss.parameters()).new_zeros(()))
    return DistributedDataParallel(loss, find_unused_parameters=True, gradient_as_bucket_view=True)


def share_buffers(module: nn.Module) -> None:
    """Give all ranks the buffers of rank 0, such as the running statistics of its last batch."""
    if world()[1] > 1:
        for buffer in module.buffers():
            value = buffer.contiguous()
            dist.broadcast(value, 0)
            if value is not buffer:
                buffer.copy_(value)


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
