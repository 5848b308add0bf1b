"""What the processes of torch's default process group share while they train one guide."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyro.poutine as poutine
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pyro_structvi.infer.elbo import ELBOTerms, StructuredELBO


class Loss(nn.Module):
    """Minus the bound, as a module: what ``DistributedDataParallel`` can wrap.

    A value that a distribution refuses gives a loss of NaN, and the refusal in the place of the terms,
    so that processes which met none go through the same backward pass and stop at the same step.

    Args:
        model: The model, a module or not.
        guide: The guide.
        elbo: The objective.
    """

    def __init__(self, model: Callable[..., Any], guide: nn.Module, elbo: StructuredELBO) -> None:
        super().__init__()
        self.guide = guide
        module = poutine.unwrap(model)
        if isinstance(module, nn.Module):
            self.model = module
        self.elbo = elbo
        self._call = (model,)  # with its handlers; in a tuple, so that it is no second submodule

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ELBOTerms | ValueError]:
        """Return the loss and the terms it is made of, or the error that there are none."""
        try:
            terms = self.elbo.terms(self._call[0], self.guide, *args, **kwargs)
        except ValueError as error:
            trained = (p for p in self.parameters() if p.requires_grad)
            return torch.stack([math.nan * p.sum() for p in trained]).sum(), error
        return -terms.weighted(self.elbo.current_kl_weight), terms


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
    """Draw a seed from torch's generator: that of rank 0 on all ranks."""
    seed: int = of_all_ranks(int(torch.randint(2**62, ())))[0]
    return seed


@contextmanager
def noise_of_rank(device: torch.device | None) -> Iterator[None]:
    """Give each of several ranks noise of its own in this block; put generators back after it."""
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


def data_parallel(loss: Loss) -> nn.Module:
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
