"""Mini-batches, from the data as they are given: which examples each has, and where they are kept."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sized
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from pyro_structvi._checks import brief, check_no_nan
from pyro_structvi._nested import map_nested, nested_tensors

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

SHARE_OF_FREE_MEMORY = 0.25  # that tensors may take on a GPU; the rest is for the training


class TensorBatches:
    """Mini-batches of tensors, which stay where they are.

    Args:
        data: The data, tensors or mappings of tensors, examples first.
        batch_size: How many examples a batch has; None for all of the sampler's.
        sampler: The order of the examples.
    """

    def __init__(
        self, data: tuple[Any, ...], batch_size: int | None, sampler: DistributedSampler[Any]
    ) -> None:
        self.data, self.sampler = data, sampler
        self.size = len(next(nested_tensors(data)))
        self.batch_size = batch_size or len(sampler)
        devices = {tensor.device for tensor in nested_tensors(data)}
        self.device = devices.pop() if len(devices) == 1 else torch.device("cpu")

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self.after(0)

    def after(self, number: int) -> Iterator[tuple[Any, ...]]:
        """Return the batches of the sampler's epoch without the first ones."""
        if len(self.sampler) == self.size <= self.batch_size:
            yield from [self.data][number:]
            return
        for chosen in self._order().to(self.device).split(self.batch_size)[number:]:
            yield map_nested(itemgetter(chosen), self.data)

    def _order(self) -> Tensor:
        """Return the sampler's order, without the list of Python's numbers that it makes."""
        sampler, size = self.sampler, self.size
        generator = torch.Generator().manual_seed(sampler.seed + sampler.epoch)
        order = torch.randperm(size, generator=generator) if sampler.shuffle else torch.arange(size)
        padded = order.repeat(math.ceil(sampler.total_size / size))[: sampler.total_size]
        return padded[sampler.rank :: sampler.num_replicas]


def as_batches(
    data: Any,
    batch_size: int | None,
    device: torch.device | None,
    seed: int = 0,
    ranks: tuple[int, int] = (0, 1),
) -> Any:
    """Return the data as a sized iterable of mini-batches.

    Args:
        data: Tensors or mappings of them, a data set, or mini-batches, which are returned as they are.
        batch_size: How many examples a mini-batch has on each rank; None for all of the rank's.
        device: Where tensors are to be, if they fit.
        seed: Of the order of the examples.
        ranks: This process's rank and how many there are; each gets its share of the examples, in
            each pass another one, padded to equal sizes by examples that come twice.

    Raises:
        TypeError: If the data have another type.
        ValueError: If lengths differ, the data hold NaN, or ``batch_size`` is out of place.
    """

    def sampler_of(examples: Any) -> DistributedSampler[Any]:
        shuffle = batch_size is not None or ranks[1] > 1
        return DistributedSampler(examples, ranks[1], ranks[0], shuffle, seed)

    if isinstance(data, Tensor):
        data = (data,)
    if isinstance(data, Mapping) or (isinstance(data, tuple) and not all(map(_is_input, data))):
        raise TypeError(
            "`data` must be a tuple of tensors, or of mappings of tensors, but got "
            f"{brief(data) if isinstance(data, Mapping) else [type(item).__name__ for item in data]}. "
            "Convert arrays with `torch.as_tensor`; a mapping of inputs goes into the tuple, "
            "`(inputs, y)`; give keyword arguments as a list of mini-batches, `[{'x': x, 'y': y}]`."
        )
    is_tensors = isinstance(data, list) and data and all(isinstance(t, Tensor) for t in data)
    if is_tensors or (isinstance(data, tuple) and data):
        examples = _placed(_checked(map_nested(lambda tensor: tensor, tuple(data))), device)
        return TensorBatches(examples, batch_size, sampler_of(next(nested_tensors(examples))))
    if isinstance(data, Dataset):
        if not isinstance(data, Sized):
            raise TypeError(
                f"`data` must know its length, but {type(data).__name__} does not. Make it a Dataset "
                "with `__len__`, or pass a sized iterable of mini-batches."
            )
        _check_length([len(data)])
        sampler = sampler_of(data)
        return DataLoader(data, batch_size=batch_size or len(sampler), sampler=sampler)
    if (
        isinstance(data, str)
        or not isinstance(data, Iterable)
        or not isinstance(data, Sized)
        or not len(data)
    ):
        raise TypeError(
            "`data` must be a tuple of tensors, a Dataset, or a sized iterable of mini-batches "
            f"such as a DataLoader, but got {brief(data)}."
        )
    if batch_size is not None:
        raise ValueError(
            "`batch_size` is for tensors and datasets; mini-batches that are given have their own."
        )
    return data


def num_examples(batches: Any) -> int | None:
    """Return how many examples a pass through mini-batches visits, or None where that is not known.

    Args:
        batches: What :func:`as_batches` returned.
    """
    if isinstance(batches, TensorBatches):
        return batches.size
    if not isinstance(batches, DataLoader):
        return None
    sampler = batches.sampler
    chosen = batches.dataset if isinstance(sampler, DistributedSampler) else sampler
    return len(chosen) if isinstance(chosen, Sized) else None


def _is_input(value: Any) -> bool:
    """Whether it is a tensor, or a mapping of tensors."""
    items = value.values() if isinstance(value, Mapping) and value else [value]
    return all(isinstance(item, Tensor) for item in items)


def _checked(data: tuple[Any, ...]) -> tuple[Any, ...]:
    _check_length([len(tensor) for tensor in nested_tensors(data)])
    for index, item in enumerate(data):
        named = item.items() if isinstance(item, dict) else [(None, item)]
        for key, tensor in named:
            check_no_nan(f"data[{index}]" if key is None else f"data[{index}][{key!r}]", tensor)
    return data


def _check_length(lengths: list[int]) -> None:
    if len(set(lengths)) != 1 or lengths[0] == 0:
        raise ValueError(f"The tensors of `data` must have one positive length, but got {lengths}.")


def _placed(data: tuple[Any, ...], device: torch.device | None) -> tuple[Any, ...]:
    """Move tensors to the device, or leave them where they are if they would take too much of it."""
    size = sum(tensor.nbytes for tensor in nested_tensors(data) if tensor.device != device)
    if size > SHARE_OF_FREE_MEMORY * _free_memory(device):
        return data
    moved: tuple[Any, ...] = map_nested(lambda tensor: tensor.to(device), data)
    return moved


def _free_memory(device: torch.device | None) -> float:
    if device is None or device.type != "cuda":
        return math.inf
    return torch.cuda.mem_get_info(device)[0]
