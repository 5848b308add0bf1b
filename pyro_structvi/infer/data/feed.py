"""Mini-batches as the arguments of steps: pass after pass, one ahead on a GPU, from any place on."""

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from pyro_structvi._nested import map_nested, nested_tensors
from pyro_structvi.infer.data.batches import Arguments, TensorBatches
from pyro_structvi.infer.data.one_ahead import InTurn, OneAhead
from pyro_structvi.infer.runs.random_states import host_states, set_host_states

States = tuple[dict[str, Any], list[Tensor]]


@dataclass
class Place:
    """Where a run is in its data.

    Attributes:
        epoch: The number of the pass.
        taken: How many of its batches have been loaded.
        ahead: How many of these, 0 or 1, no step has been taken with.
        start: The random states when the pass began, the host's and those of the loader's own
            generators; None where the order does not come from them.
        load: Those before the last batch was loaded, where batches are loaded ahead.
        own: The states of the loader's own generators now.
    """

    epoch: int = 0
    taken: int = 0
    ahead: int = 0
    start: States | None = None
    load: States | None = None
    own: tuple[Tensor, ...] = ()


class Feed:
    """Goes through the batches again and again, as arguments on the device.

    For a GPU a thread has the next batch ready, loaded and copied, while the last one is used.

    Args:
        loader: The batches; if it has a ``sampler`` with epochs, each pass is one.
        device: The guide's device.
        total: How many batches to take.
        keeps_place: Whether :meth:`place` will be asked for.
        place: Where to go on. The order of the pass comes back by its random states, and what was loaded
            is loaded again; the host's generators are then to be put back by the caller.

    Raises:
        ValueError: If a pass gives no batch.
    """

    def __init__(
        self,
        loader: Any,
        device: torch.device | None,
        total: int,
        keeps_place: bool = False,
        place: Place | None = None,
    ) -> None:
        self._loader, self._device = loader, device
        self._own = _generators_of(loader)
        self._notes = keeps_place and not isinstance(loader, TensorBatches)
        self._place = Place(getattr(getattr(loader, "sampler", None), "epoch", 0))
        begun = None if place is None else self._return_to(place)
        self._passes = self._pass_after_pass(begun)
        loaded = itertools.islice(self._passes, total)
        self._items: InTurn[Any]
        if _are_copied(loader, device):
            self._items = OneAhead(_copies(loaded, device))
        else:
            moved = (_arguments(batch, lambda value: value.to(device)) for batch in loaded)
            self._items = InTurn(moved)
        self._waiting: list[Any] = []
        if place is not None:
            if place.load is not None:
                self._set_states(place.load)
            self._waiting = [self._items.take() for _ in range(place.ahead)]
            self._set_states((None, [*place.own]))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Arguments:
        try:
            item = self._waiting.pop(0) if self._waiting else self._items.take()
        except StopIteration:
            self.close()
            raise
        self._items.start()
        return _ready(item)

    def peek(self) -> Arguments:
        """Return the arguments that come next; any where none do."""
        if not self._waiting:
            try:
                self._waiting.append(self._items.take())
            except StopIteration:
                batch = next(iter(self._loader))
                return _arguments(batch, lambda value: value.to(self._device))
        return _ready(self._waiting[0])

    def place(self) -> Place:
        """Return where the feed is, once the thread has loaded what it was asked for."""
        ahead = len(self._waiting) + self._items.wait()
        place = self._place
        own = tuple(generator.get_state() for generator in self._own)
        return Place(
            place.epoch, place.taken, ahead, place.start, place.load if ahead else None, own
        )

    def close(self) -> None:
        """Stop loading."""
        self._items.close()
        self._passes.close()

    def _pass_after_pass(self, begun: Iterator[Any] | None) -> Generator[Any, None, None]:
        """Yield batches, and count them; the first pass may have begun."""
        place = self._place
        while True:
            batches = self._begin() if begun is None else begun
            begun = None
            try:
                for batch in self._noted(batches):
                    place.taken += 1
                    yield batch
            finally:
                self._set_epoch(place.epoch + 1)  # where another fit goes on
            if not place.taken:
                raise ValueError(
                    "A pass through `data` gave no mini-batch. Pass something that can be gone through "
                    "again and again, such as a DataLoader or a list."
                )
            place.epoch, place.taken = place.epoch + 1, 0

    def _begin(self) -> Iterator[Any]:
        """Begin the pass of the present epoch; return its batches after those that were taken."""
        self._set_epoch(self._place.epoch)
        if self._notes:
            self._place.start = self._states()
        if isinstance(self._loader, TensorBatches):
            return self._loader.after(self._place.taken)
        batches: Iterator[Any] = iter(self._loader)
        for _ in range(self._place.taken):
            next(batches, None)
        return batches

    def _return_to(self, place: Place) -> Iterator[Any] | None:
        """Begin the pass as it had begun; None where it had come to its end."""
        self._place.epoch, self._place.taken = place.epoch, place.taken - place.ahead
        if self._place.taken and self._place.taken == _exact_length(self._loader):
            self._place.epoch, self._place.taken = place.epoch + 1, 0
            return None
        if place.start is not None:
            self._set_states(place.start)
        return self._begin()

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the batches; write down, where they are loaded ahead, what each is drawn from."""
        while True:
            if self._notes and isinstance(self._items, OneAhead):
                self._place.load = self._states()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def _states(self) -> States:
        return host_states(), [generator.get_state() for generator in self._own]

    def _set_states(self, states: tuple[dict[str, Any] | None, list[Tensor]]) -> None:
        host, own = states
        if host is not None:
            set_host_states(host)
        for generator, state in zip(self._own, own, strict=True):
            generator.set_state(state)

    def _set_epoch(self, epoch: int) -> None:
        sampler: Any = getattr(self._loader, "sampler", None)
        getattr(sampler, "set_epoch", lambda epoch: None)(epoch)


def _are_copied(loader: Any, device: Any) -> bool:
    """Whether batches are copied from the host to a GPU."""
    is_there = isinstance(loader, TensorBatches) and loader.device == device
    return bool(device is not None and device.type == "cuda" and not is_there)


def _exact_length(loader: Any) -> int | None:
    """Return the number of batches of a pass, where it is sure to be right."""
    is_map = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return len(loader) if is_map or type(loader) in {TensorBatches, list, tuple} else None


def _generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers were given, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = [loader, getattr(loader, "sampler", None)]
    owners += [batch_sampler, getattr(batch_sampler, "sampler", None)]
    found = (getattr(owner, "generator", None) for owner in owners)
    return [*dict.fromkeys(each for each in found if isinstance(each, torch.Generator))]


def _arguments(batch: Any, move: Callable[[Tensor], Tensor]) -> Arguments:
    if isinstance(batch, Mapping):
        return (), map_nested(move, batch)
    values = batch if isinstance(batch, (tuple, list)) else (batch,)
    return tuple(map_nested(move, value) for value in values), {}


def _copies(batches: Iterator[Any], device: Any) -> Iterator[tuple[Arguments, Any]]:
    """Copy batches to a GPU from pinned memory, each on a stream beside that of the last one's step."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # for data that are still being computed

    def copy(value: Tensor) -> Tensor:
        pinned = value.pin_memory() if value.device.type == "cpu" else value
        return pinned.to(device, non_blocking=True)

    def copies() -> Iterator[tuple[Arguments, torch.cuda.Event]]:
        torch.cuda.set_stream(side)  # of the thread that runs this
        for batch in batches:
            yield _arguments(batch, copy), side.record_event()

    return copies()


def _ready(item: Any) -> Arguments:
    """Return arguments, once the copy of them to a GPU is ordered before what uses them."""
    if not isinstance(item[1], torch.cuda.Event):
        arguments: Arguments = item
        return arguments
    (args, kwargs), is_copied = item
    for value in nested_tensors((args, kwargs)):
        current = torch.cuda.current_stream(value.device)
        current.wait_event(is_copied)
        value.record_stream(current)  # so that its memory is not used for a copy too soon
    return args, kwargs
