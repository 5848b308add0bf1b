"""Mini-batches: examples in the order of each epoch, as the arguments of steps on the guide's device."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import chain
from operator import itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from pyro_structvi._checks import brief, check_no_nan
from pyro_structvi._nested import map_nested, nested_tensors

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

SHARE_OF_FREE_MEMORY = 0.25  # that tensors may take on a GPU; the rest is for the training


class EpochSampler(Sampler[int]):
    """Numbers of examples, in an order by seed and epoch, from ``start`` on."""

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
        order = torch.arange(self.size, device="cpu")
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.size, generator=generator, device="cpu")
        return order[self.start :]


class TensorBatches:
    """Mini-batches of tensors, which stay where they are."""

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
        for chosen in self.sampler.order().to(device).split(int(self.batch_size)):
            yield map_nested(itemgetter(chosen), self.data)


def as_batches(
    data: Any, batch_size: int | None, device: torch.device | None, seed: int = 0
) -> Any:
    """Return the data as a sized iterable of mini-batches, tensors on the device if they fit."""
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
        examples = map_nested(_of_no_inference, tuple(data))
        size = _length_of([len(tensor) for tensor in nested_tensors(examples)])
        for index, item in enumerate(examples):
            for key, tensor in item.items() if isinstance(item, dict) else [(None, item)]:
                check_no_nan(f"data[{index}]" if key is None else f"data[{index}][{key!r}]", tensor)
        moved = sum(tensor.nbytes for tensor in nested_tensors(examples) if tensor.device != device)
        fits = not _is_gpu(device) or (
            moved <= SHARE_OF_FREE_MEMORY * torch.cuda.mem_get_info(device)[0]
        )
        if fits:
            examples = map_nested(methodcaller("to", device), examples)
        sampler = EpochSampler(size, batch_size is not None, seed)
        return TensorBatches(examples, batch_size or size, sampler)
    if isinstance(data, Dataset):
        if isinstance(data, IterableDataset) or not isinstance(data, Sized):
            raise TypeError(
                "`data` must know its length and give examples by their numbers, but "
                f"{type(data).__name__} does not. Make it a Dataset with `__len__` and `__getitem__`, "
                "or pass a sized iterable of mini-batches."
            )
        size = _length_of([len(data)])
        return DataLoader(
            data,
            batch_size=batch_size or size,
            sampler=EpochSampler(size, batch_size is not None and batch_size < size, seed),
            pin_memory=_is_gpu(device),
            generator=torch.Generator(),  # so that the start of an epoch leaves torch's own unchanged
        )
    count = _count(data)
    if not isinstance(data, Iterable) or isinstance(data, str) or count is None:
        raise TypeError(
            "`data` must be a tuple of tensors, a Dataset, or a sized iterable of mini-batches such as "
            f"a DataLoader, but got {brief(data)}. An `IterableDataset` in a DataLoader needs `__len__`."
        )
    if not count:
        raise ValueError(
            f"`data` must hold a mini-batch, but got a {type(data).__name__} of length 0. Give it more "
            "examples: a DataLoader with `drop_last=True` needs at least `batch_size` of them."
        )
    if batch_size is not None:
        raise ValueError(
            "`batch_size` is for tensors and datasets; mini-batches that are given have their own."
        )
    return data


def keeps_order(batches: Any, number: float) -> bool:
    """Whether a pass is one mini-batch, whose examples have one order as far as is known."""
    sampler: Any = None
    if isinstance(batches, DataLoader):
        whole = batches.batch_sampler
        sampler = batches.sampler if whole is None else getattr(whole, "sampler", whole)
    in_order = isinstance(sampler, SequentialSampler | None)
    return number <= 1 and not getattr(sampler, "shuffle", not in_order)


def num_examples(batches: Any, limit: float = math.inf) -> int | None:
    """Return how many examples the passes visit, or None where that is not known.

    A sampler that draws examples at random may take other numbers of them in a pass. A user's sampler
    tells its length, or that of the data set where this is less, since it may repeat examples. A data
    set of whole mini-batches, and a user's sampler of these, tell no number of examples. A pass ends
    after ``limit`` mini-batches.
    """
    if isinstance(batches, TensorBatches):
        return len(batches.sampler)
    if not isinstance(batches, DataLoader):
        return None
    whole: Any = batches.batch_sampler
    sampler = getattr(whole, "sampler", None)
    order = range(len(sampler)) if type(sampler) is SequentialSampler else sampler
    if isinstance(order, (range, list, tuple)):
        if type(whole) is BatchSampler or getattr(whole, "drop_last", False):
            # No pass visits the examples after its last mini-batch.
            order = order[: int(whole.batch_size * min(len(whole), limit))]
        return len(order if isinstance(order, range) else {*map(str, order)})  # also of tensors
    if isinstance(sampler, WeightedRandomSampler):
        return int((sampler.weights > 0).sum())
    if isinstance(sampler, DistributedSampler):
        sampler = batches.dataset
    elif type(sampler) is RandomSampler:
        sampler = sampler.data_source
    sizes = [len(each) for each in (sampler, batches.dataset) if isinstance(each, Sized)]
    return min(sizes) if isinstance(sampler, Sized) else None


def arguments_of(batch: Any, device: torch.device | None) -> Arguments:
    """Return a mini-batch as positional and keyword arguments, on a device unless that is None."""

    def move(tensor: Tensor) -> Tensor:
        return _of_no_inference(tensor.to(device=device, non_blocking=_is_gpu(device)))

    if isinstance(batch, Mapping):
        return (), map_nested(move, batch)
    values = batch if isinstance(batch, (tuple, list)) else (batch,)
    return tuple(map_nested(move, value) for value in values), {}


def _of_no_inference(tensor: Tensor) -> Tensor:
    """Return a tensor that was made in inference mode as one that gradients may need."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


class Feed:
    """The arguments of each step, pass after pass, from a place in the data on.

    The mini-batches of an :class:`EpochSampler` go on at exactly that place. Any other loader begins the
    epoch again. ``taken`` mini-batches of pass ``epoch`` have been used.
    """

    def __init__(
        self, loader: Any, device: torch.device | None, epoch: int = 0, taken: int = 0
    ) -> None:
        self.loader, self.device = loader, device
        self._sampler: Any = getattr(loader, "sampler", None)
        self._is_exact = isinstance(self._sampler, EpochSampler)
        is_at_end = taken >= len(loader)
        self.epoch = epoch + is_at_end
        self.taken = taken if self._is_exact and not is_at_end else 0
        self._begun: Iterator[Any] | None = None

    def peek(self) -> Arguments:
        """Return the arguments of the next step, which come again in iteration."""
        batches = self._pass()
        for batch in batches:
            if not self._is_exact:  # which begins its pass again by itself
                self._begun = chain([batch], batches)
            return arguments_of(batch, self.device)
        raise self._no_batch()

    def __iter__(self) -> Iterator[Arguments]:
        while True:
            batches, self._begun = self._begun or self._pass(), None
            for batch in batches:
                self.taken += 1
                yield arguments_of(batch, self.device)
            if not self.taken:
                raise self._no_batch()
            self.epoch, self.taken = self.epoch + 1, 0

    def _pass(self) -> Iterator[Any]:
        whole = getattr(self.loader, "batch_sampler", None)
        for sampler in (self._sampler, whole, getattr(whole, "sampler", None)):
            getattr(sampler, "set_epoch", lambda epoch: None)(self.epoch)
        if self._is_exact:
            self._sampler.start = self.taken * self.loader.batch_size
        return iter(self.loader)

    def _no_batch(self) -> ValueError:
        return ValueError(
            "A pass through `data` gave no mini-batch. Pass something that can be gone through "
            "again and again, such as a DataLoader or a list."
        )


def _is_input(value: Any) -> bool:
    """Whether it is a tensor, or a mapping of tensors."""
    items = value.values() if isinstance(value, Mapping) and value else [value]
    return all(isinstance(item, Tensor) for item in items)


def _count(batches: Any) -> int | None:
    """Return the number of mini-batches, or None where that is not known."""
    try:
        return len(batches)
    except TypeError:  # also of a DataLoader of data without a length
        return None


def _length_of(lengths: list[int]) -> int:
    if len(set(lengths)) != 1 or lengths[0] == 0:
        raise ValueError(f"The tensors of `data` must have one positive length, but got {lengths}.")
    return lengths[0]


def _is_gpu(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda"
