"""Mini-batches: examples in the order of each epoch, as the arguments of steps on the guide's device."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from pyro_structvi._checks import brief, check_no_nan
from pyro_structvi._nested import map_nested, nested_tensors

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

SHARE_OF_FREE_MEMORY = 0.25  # that tensors may take on a GPU; the rest is for the training


class EpochSampler(Sampler[int]):
    """Numbers of examples, whose order follows from a seed and the number of the epoch.

    Args:
        size: How many examples there are.
        shuffle: Whether the order of each epoch is random.
        seed: The seed of these orders.

    Attributes:
        epoch: The number of the epoch.
        start: How many examples of the epoch are left out, as a run that is resumed has used them.
    """

    def __init__(self, size: int, shuffle: bool, seed: int) -> None:
        self.size, self.shuffle, self.seed = size, shuffle, seed
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().tolist())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""
        self.epoch = epoch

    def order(self) -> Tensor:
        """Return the numbers that are left of the epoch."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size, generator=generator) if self.shuffle else None
        return (torch.arange(self.size) if order is None else order)[self.start :]


class TensorBatches:
    """Mini-batches of tensors, which stay where they are.

    Args:
        data: The data, tensors or mappings of tensors, examples first.
        batch_size: How many examples a batch has.
        sampler: The order of the examples.
    """

    def __init__(self, data: tuple[Any, ...], batch_size: int, sampler: EpochSampler) -> None:
        self.data, self.batch_size, self.sampler = data, batch_size, sampler

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        if len(self) == 1:
            yield self.data
            return
        devices = {tensor.device for tensor in nested_tensors(self.data)}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")  # which indexes any
        for chosen in self.sampler.order().to(device).split(self.batch_size):
            yield map_nested(itemgetter(chosen), self.data)


def as_batches(
    data: Any, batch_size: int | None, device: torch.device | None, seed: int = 0
) -> Any:
    """Return the data as a sized iterable of mini-batches.

    Args:
        data: Tensors or mappings of them, a data set, or mini-batches, which are returned as they are.
        batch_size: How many examples a mini-batch has; None for all.
        device: The guide's device; tensors are moved to it if they fit.
        seed: The seed of the orders of the examples.

    Raises:
        TypeError: If the data have another type.
        ValueError: If lengths differ, the data hold NaN, or ``batch_size`` is out of place.
    """
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
        examples = _checked(map_nested(lambda tensor: tensor, tuple(data)))
        size = len(next(nested_tensors(examples)))
        sampler = EpochSampler(size, batch_size is not None, seed)
        return TensorBatches(_placed(examples, device), batch_size or size, sampler)
    if isinstance(data, Dataset):
        if not isinstance(data, Sized):
            raise TypeError(
                f"`data` must know its length, but {type(data).__name__} does not. Make it a Dataset "
                "with `__len__`, or pass a sized iterable of mini-batches."
            )
        _check_length([len(data)])
        return DataLoader(
            data,
            batch_size=batch_size or len(data),
            sampler=EpochSampler(len(data), batch_size is not None, seed),
            pin_memory=_is_gpu(device),
            generator=torch.Generator(),  # so that the start of an epoch leaves torch's own unchanged
        )
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
        batches: A value of :func:`as_batches`, or a ``DataLoader``.
    """
    if isinstance(batches, TensorBatches):
        return len(batches.sampler)
    if not isinstance(batches, DataLoader):
        return None
    sampler = batches.sampler
    chosen = batches.dataset if isinstance(sampler, DistributedSampler) else sampler
    return len(chosen) if isinstance(chosen, Sized) else None


def arguments_of(batch: Any, device: torch.device | None) -> Arguments:
    """Return a mini-batch as positional and keyword arguments, on a device.

    Args:
        batch: A tuple or list of arguments, a mapping of keyword arguments, or one tensor.
        device: The device; None to leave tensors where they are.
    """

    def move(value: Tensor) -> Tensor:
        return value.to(device=device, non_blocking=_is_gpu(device))

    if isinstance(batch, Mapping):
        return (), map_nested(move, batch)
    values = batch if isinstance(batch, (tuple, list)) else (batch,)
    return tuple(map_nested(move, value) for value in values), {}


class Feed:
    """The arguments of each step, pass after pass, from a place in the data on.

    The mini-batches of an :class:`EpochSampler` go on at exactly that place. Any other loader begins the
    epoch again.

    Args:
        loader: The mini-batches.
        device: The guide's device.
        epoch: The number of the pass.
        taken: How many of its mini-batches have been used.

    Attributes:
        epoch: The number of the pass.
        taken: How many of its mini-batches have been used.

    Raises:
        ValueError: If a pass gives no mini-batch.
    """

    def __init__(
        self, loader: Any, device: torch.device | None, epoch: int = 0, taken: int = 0
    ) -> None:
        self._loader, self._device = loader, device
        self._sampler: Any = getattr(loader, "sampler", None)
        self._is_exact = isinstance(self._sampler, EpochSampler)
        is_at_end = taken >= len(loader)
        self.epoch = epoch + is_at_end
        self.taken = taken if self._is_exact and not is_at_end else 0
        self._begun: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def settings(self) -> dict[str, Any]:
        """Conditions of a resumed run, by their names in errors."""
        return {
            "the kind of `data`": type(self._loader).__name__,
            "the number of examples in `data`": num_examples(self._loader),
            "the number of mini-batches in `data`": len(self),
            "the device of `guide`": None if self._device is None else self._device.type,
        }

    def peek(self) -> Arguments:
        """Return the arguments of the next step, which come again in iteration."""
        batches = self._pass()
        for batch in batches:
            if not self._is_exact:  # which begins its pass again by itself
                self._begun = chain([batch], batches)
            return arguments_of(batch, self._device)
        raise self._no_batch()

    def __iter__(self) -> Iterator[Arguments]:
        while True:
            batches, self._begun = self._begun or self._pass(), None
            for batch in batches:
                self.taken += 1
                yield arguments_of(batch, self._device)
            if not self.taken:
                raise self._no_batch()
            self.epoch, self.taken = self.epoch + 1, 0

    def _pass(self) -> Iterator[Any]:
        getattr(self._sampler, "set_epoch", lambda epoch: None)(self.epoch)
        if self._is_exact:
            self._sampler.start = self.taken * self._loader.batch_size
        return iter(self._loader)

    def _no_batch(self) -> ValueError:
        return ValueError(
            "A pass through `data` gave no mini-batch. Pass something that can be gone through "
            "again and again, such as a DataLoader or a list."
        )


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
    if _is_gpu(device) and size > SHARE_OF_FREE_MEMORY * torch.cuda.mem_get_info(device)[0]:
        return data
    moved: tuple[Any, ...] = map_nested(lambda tensor: tensor.to(device), data)
    return moved


def _is_gpu(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda"
