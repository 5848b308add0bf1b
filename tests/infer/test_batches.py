"""Mini-batches: the order and the shares of examples, where data are kept, and one batch ahead."""

import itertools
import threading
import time
from contextlib import closing

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import pyro_structvi as ps
from pyro_structvi.infer.data import batches, feed
from pyro_structvi.infer.data.batches import TensorBatches, as_batches
from pyro_structvi.infer.data.feed import Feed, OneAhead
from pyro_structvi.infer.steps.step import Step
from tests.models import make_regressor, regression_data


def shares(size, ranks, batch_size, epoch=0, kind=lambda numbers: (numbers,)):
    """Return which examples each rank gets in an epoch, batch by batch."""
    found = []
    for rank in range(ranks):
        loader = as_batches(kind(torch.arange(size)), batch_size, None, 5, (rank, ranks))
        loader.sampler.set_epoch(epoch)
        found.append([batch[0].tolist() for batch in loader])
        assert len(loader) == len(found[-1])
    return found


KINDS = {"tensors": lambda numbers: (numbers,), "dataset": TensorDataset}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "ranks"), [(24, 2), (25, 2), (25, 3), (1, 2), (7, 1)])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_every_example_is_in_the_share_of_a_rank(kind, size, ranks, batch_size):
    of_ranks = shares(size, ranks, batch_size, kind=KINDS[kind])
    sizes = [[len(batch) for batch in share] for share in of_ranks]
    assert sizes == [sizes[0]] * ranks, "all ranks take steps of the same sizes"
    assert all(batch == (batch_size or sum(sizes[0])) for batch in sizes[0][:-1])
    examples = [example for share in of_ranks for batch in share for example in batch]
    assert set(examples) == set(range(size))
    assert len(examples) == -(-size // ranks) * ranks, "no more than padding comes twice"


@pytest.mark.parametrize("kind", KINDS)
def test_the_union_of_the_ranks_is_the_batch_of_one_process(kind):
    first, second = shares(24, 2, 3, kind=KINDS[kind])
    (alone,) = shares(24, 1, 6, kind=KINDS[kind])
    for own, other, both in zip(first, second, alone, strict=True):
        assert sorted(own + other) == sorted(both)


@pytest.mark.parametrize("kind", KINDS)
def test_shares_change_with_the_epoch(kind):
    first, second = (shares(24, 2, 3, epoch, KINDS[kind])[0] for epoch in (0, 1))
    assert {*itertools.chain(*first)} != {*itertools.chain(*second)}


def test_examples_of_one_batch_in_one_process_are_left_as_they_are():
    x = torch.randn(5, 2)
    (batch,) = as_batches((x,), None, None)
    assert batch[0] is x


def test_the_epoch_of_a_sampler_is_set():
    data = TensorDataset(torch.arange(20))
    loader = DataLoader(data, batch_size=20, sampler=DistributedSampler(data, 1, 0, seed=3))
    ((first,), _), ((second,), _) = Feed(loader, None, 2)
    assert first.tolist() != second.tolist()
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(20))


def test_no_more_batches_are_loaded_than_steps_are_taken():
    loaded = []
    data = [(torch.tensor(float(number)),) for number in range(3)]

    class Counted(list):
        def __iter__(self):
            for batch in super().__iter__():
                loaded.append(batch)
                yield batch

    values = [args[0].item() for args, _ in Feed(Counted(data), torch.device("cpu"), 4)]
    assert values == [0, 1, 2, 0]
    assert len(loaded) == 4


# ---- where data are kept -------------------------------------------------------------------------


def test_on_a_cpu_nothing_waits_in_a_thread(monkeypatch):
    monkeypatch.setattr(feed, "OneAhead", None)
    model = make_regressor()
    data = [regression_data()]
    history = ps.fit(model, ps.MeanFieldGuide(model), data, num_steps=3, progress=False)
    assert len(history.elbo) == 3


@pytest.mark.parametrize(("free", "moves"), [(8 * 12 * 4 * 4, True), (8 * 12 * 4 * 4 - 1, False)])
def test_tensors_move_if_a_quarter_of_the_free_memory_holds_them(monkeypatch, free, moves):
    monkeypatch.setattr(batches, "_free_memory", lambda device: free)
    device = torch.device("meta")
    loader = as_batches((torch.zeros(12, 3), torch.zeros(12, 1)), 4, device)
    assert {tensor.is_meta for tensor in loader.data} == {moves}


def test_tensors_that_are_there_take_no_more_memory(monkeypatch):
    device, x, y = torch.device("meta"), torch.zeros(12, 30, dtype=torch.long), torch.zeros(12)
    monkeypatch.setattr(batches, "_free_memory", lambda device: 4 * y.nbytes)
    loader = as_batches((x.to(device), y), 4, device)
    assert loader.device == device


def test_tensors_on_two_devices_are_indexed_from_the_host(monkeypatch):
    monkeypatch.setattr(batches, "_free_memory", lambda device: 0)
    x, y = torch.zeros(12, 3), torch.zeros(12, dtype=torch.long, device="meta")
    loader = as_batches((x, y), 4, torch.device("meta"))
    assert loader.device == torch.device("cpu")
    assert [batch[0].shape for batch in loader] == [(4, 3)] * 3


# ---- one batch ahead -----------------------------------------------------------------------------


class Recorded:
    """Counts items up, and records what was asked for, and where and how that ended."""

    def __init__(self, total, fails_at=None):
        self.total, self.fails_at = total, fails_at
        self.made, self.threads, self.closed = [], set(), False

    def __iter__(self):
        try:
            for number in range(self.total):
                if number == self.fails_at:
                    raise OSError("the disk is full")
                self.made.append(number)
                self.threads.add(threading.current_thread())
                yield number
        finally:
            self.closed = True


class Taken:
    """Iterates as a feed does: the next item is asked for when one was taken."""

    def __init__(self, source):
        self.items = OneAhead(iter(source))
        self.close = self.items.close

    def __iter__(self):
        return self

    def __next__(self):
        item = self.items.take()
        self.items.start()
        return item


@pytest.mark.parametrize("total", [0, 1, 2, 7])
def test_order_is_kept_and_nothing_lost(total):
    source = Recorded(total)
    assert list(Taken(source)) == list(range(total))
    assert source.closed


def test_one_item_is_ready_while_another_is_used():
    source = Recorded(5)
    with closing(Taken(source)) as items:
        for number in range(4):
            assert next(items) == number
            give_up = time.monotonic() + 5
            while len(source.made) < number + 2 and time.monotonic() < give_up:
                time.sleep(0.001)
            time.sleep(0.02)
            assert source.made == list(range(number + 2)), "one ahead, and no more"
    assert threading.current_thread() not in source.threads
    assert len(source.threads) == 1
    assert not any(thread.is_alive() for thread in source.threads)


def test_an_error_of_the_loader_comes_in_its_turn():
    items = Taken(Recorded(5, fails_at=2))
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(OSError, match="the disk is full"):
        next(items)


def test_the_loader_is_closed_where_the_fit_ends_early(monkeypatch):
    source, model = Recorded(5), make_regressor()
    data = regression_data()

    class Loader:
        def __iter__(self):
            return (data for _ in iter(source))

        def __len__(self):
            return 5

    guide = ps.MeanFieldGuide(model)
    monkeypatch.setattr(Step, "__call__", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ps.fit(model, guide, Loader(), num_steps=5, progress=False)
    assert source.made == [0]
    assert source.closed


# ---- on a GPU ------------------------------------------------------------------------------------


def image_data(size=64):
    return torch.randn(size, 3, 16, 16), torch.randint(4, (size,))


def train_on_gpu(data, **options):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 4))
    model = ps.Classifier(ps.bayesianize(net.cuda(), prior=1.0), 64)
    guide = ps.KTiedGuide(model)
    ps.fit(model, guide, data, num_epochs=3, lr=0.01, progress=False, **options)
    return guide.state_dict()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["host", "dataset"])
def test_data_that_come_from_the_host_train_as_data_on_the_gpu(monkeypatch, kind):
    data = image_data()
    expected = train_on_gpu(data, batch_size=24)
    monkeypatch.setattr(batches, "SHARE_OF_FREE_MEMORY", 0.0)
    found = train_on_gpu(TensorDataset(*data) if kind == "dataset" else data, batch_size=24)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)  # convolutions add up in any order


@pytest.mark.gpu
def test_tensors_that_fit_are_kept_on_the_gpu_and_wait_in_no_thread(monkeypatch):
    monkeypatch.setattr(feed, "OneAhead", None)
    device = torch.device("cuda", torch.cuda.current_device())
    loader = as_batches(image_data(), 24, device)
    assert {tensor.device for tensor in loader.tensors} == {device}
    assert all(x.device == device for (x, _), _ in Feed(loader, device, 6))


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_no_copy_is_used_before_it_is_there_or_after_it_is_gone(pinned):
    device = torch.device("cuda", torch.cuda.current_device())
    data = [torch.full((1 << 20,), float(number)) for number in range(20)]
    busy = torch.randn(2048, 2048, device=device)
    sums = []
    loader = [batch.pin_memory() for batch in data] if pinned else data
    for (x,), _ in Feed(loader, device, 60):
        for _ in range(5):  # the step is behind the copies
            busy = torch.tanh(busy @ busy)
        sums.append(torch.stack([x.min(), x.max()]))
    found = torch.stack(sums).cpu()
    expected = torch.arange(20.0).repeat(3)
    torch.testing.assert_close(found, torch.stack([expected, expected], -1), rtol=0, atol=0)


@pytest.mark.gpu
def test_batches_that_a_loader_makes_on_the_gpu_are_finished_before_they_are_used():
    device = torch.device("cuda", torch.cuda.current_device())
    square = torch.randn(2048, 2048, device=device)

    class Loader(list):
        def __iter__(self):
            for scale in super().__iter__():
                yield {"x": (scale * square) @ square}

    scales = [1.0, 2.0, 3.0]
    for scale, (_, kwargs) in zip(scales, Feed(Loader(scales), device, 3), strict=True):
        torch.testing.assert_close(kwargs["x"], (scale * square) @ square)


def test_batches_of_tensors_count_what_they_give():
    sampler = DistributedSampler(range(10), 1, 0)
    assert len(TensorBatches((torch.zeros(10),), 4, sampler)) == 3


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_of_tensors_is_that_of_the_sampler(ranks, shuffle):
    numbers = torch.arange(10)
    for rank in range(ranks):
        sampler = DistributedSampler(numbers, ranks, rank, shuffle, seed=3)
        sampler.set_epoch(2)
        assert TensorBatches((numbers,), 4, sampler)._order().tolist() == [*sampler]


def test_a_samplers_epochs_go_on_where_they_were():
    """Whether it was set by hand, or by an earlier fit, which may stop within an epoch."""
    data = TensorDataset(torch.arange(8.0))
    sampler = DistributedSampler(data, 1, 0)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    sampler.set_epoch(5)
    seen = []
    sampler.set_epoch = lambda epoch: seen.append(epoch) or setattr(sampler, "epoch", epoch)
    for total in (4, 1, 2):
        assert len([*Feed(loader, None, total)]) == total
    assert sampler.epoch == 9
    assert [*dict.fromkeys(seen)] == [5, 6, 7, 8, 9]


def test_an_empty_dataset_is_refused():
    with pytest.raises(ValueError, match=r"must have one positive length, but got \[0\]"):
        as_batches(TensorDataset(torch.zeros(0, 3)), 4, None)
