"""Mini-batches: the order of examples, where data are kept, and the arguments of steps."""

from itertools import islice

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import pyro_structvi as ps
from pyro_structvi.infer import batches
from pyro_structvi.infer.batches import Feed, as_batches, num_examples

KINDS = {
    "tensors": lambda numbers: (numbers,),
    "mapping": lambda numbers: ({"x": numbers},),
    "dataset": TensorDataset,
}


def first(batch):
    return batch[0]["x"] if isinstance(batch[0], dict) else batch[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch_size", "sizes"), [(None, [25]), (4, [4] * 6 + [1]), (30, [25])])
def test_every_example_is_in_an_epoch_once(kind, batch_size, sizes):
    loader = as_batches(KINDS[kind](torch.arange(25)), batch_size, None, seed=5)
    epochs = []
    for epoch in (0, 1, 0):
        loader.sampler.set_epoch(epoch)
        batches_of_epoch = [first(batch) for batch in loader]
        assert [len(batch) for batch in batches_of_epoch] == sizes
        epochs.append(torch.cat(batches_of_epoch).tolist())
        assert sorted(epochs[-1]) == [*range(25)]
    assert epochs[0] == epochs[2]
    assert len(loader) == len(sizes)
    assert batch_size != 4 or epochs[0] != epochs[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_feed_goes_on_from_every_place(kind):
    loader = as_batches(KINDS[kind](torch.arange(10)), 4, None, seed=5)
    whole = [first(args).tolist() for args, _ in islice(Feed(loader, None), 9)]
    assert first(Feed(loader, None).peek()[0]).tolist() == whole[0]
    for done in range(9):
        rest = islice(Feed(loader, None, *divmod(done, 3)), 9 - done)
        assert [first(args).tolist() for args, _ in rest] == whole[done:]
    ended = Feed(loader, None, 0, 3)
    assert first(next(iter(ended))[0]).tolist() == whole[3]
    x = torch.randn(5, 2)
    (batch,) = as_batches((x,), None, None)
    assert batch[0] is x, "one batch, left as it is"


class Given(Sampler):
    """Takes the examples of an order, and may have an attribute as torch's samplers."""

    def __init__(self, order, **attributes):
        self.order = order
        vars(self).update(attributes)

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        return iter(self.order)


@pytest.mark.parametrize(
    ("make_sampler", "expected"),
    [
        (lambda data: Given([*range(20)] * 3), 20),
        (lambda data: Given([*range(9)], data_source=data), 9),
        (lambda data: [0, 0, 1, 1, 2, 2], 3),
        (lambda data: (*torch.arange(7).repeat(2),), 7),
        (lambda data: range(7), 7),
        (lambda data: WeightedRandomSampler(torch.ones(20), 60), 20),
        (lambda data: WeightedRandomSampler(torch.arange(20), 5), 19),
        (lambda data: RandomSampler(data, num_samples=5), 20),
        (lambda data: RandomSampler(data, replacement=True, num_samples=60), 20),
        (lambda data: SubsetRandomSampler(range(7)), 7),
        (lambda data: DistributedSampler(data, 2, 0), 20),
        (lambda data: None, 20),
    ],
)
def test_the_number_of_examples_is_not_that_of_a_pass(make_sampler, expected):
    data = TensorDataset(torch.randn(20, 3), torch.zeros(20, 1))
    loader = DataLoader(data, batch_size=5, sampler=make_sampler(data))
    model = ps.Regressor(ps.bayesianize(nn.Linear(3, 1), prior=1.0), noise=0.1)
    ps.fit(model, ps.MeanFieldGuide(model), loader, num_steps=1, progress=False)
    assert model.num_data == expected


class OwnBatchSampler(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("make_sampler", "expected"),
    [
        (lambda data: BatchSampler(SubsetRandomSampler(range(7)), 3, False), 7),
        (lambda data: BatchSampler(RandomSampler(data, num_samples=5), 5, False), 20),
        (lambda data: BatchSampler(WeightedRandomSampler(torch.arange(20), 5), 5, False), 19),
        (lambda data: BatchSampler(SequentialSampler(data), 6, True), 18),
        (lambda data: OwnBatchSampler(SequentialSampler(data), 6, True), 18),
        (lambda data: BatchSampler(SequentialSampler(data), 6, False), 20),
        (lambda data: BatchSampler([0, 0, 1, 1, 2, 2, 3], 3, True), 3),
        (lambda data: OwnBatchSampler(Given([*range(20)] * 3), 5, False), 20),
        (lambda data: BatchSampler(RandomSampler(data), 6, True), 20),
        (lambda data: [[0, 1, 2], [3, 4, 5]], None),
    ],
)
def test_a_sampler_of_mini_batches_may_take_a_part_of_the_data(make_sampler, expected):
    data = TensorDataset(torch.randn(20, 3), torch.zeros(20, 1))
    assert num_examples(DataLoader(data, batch_sampler=make_sampler(data))) == expected


def test_a_data_set_of_mini_batches_does_not_tell_the_number_of_examples():
    data = [(torch.randn(5, 3), torch.zeros(5, 1)) for _ in range(4)]
    loader = DataLoader(data, batch_size=None, shuffle=True)
    net = ps.bayesianize(nn.Linear(3, 1), prior=1.0)
    model = ps.Regressor(net, noise=0.1)
    with pytest.raises(
        ValueError, match="`num_data` must be given to the model, since `data` does"
    ):
        ps.fit(model, ps.MeanFieldGuide(model), loader, num_steps=1, progress=False)


class Shuffled(BatchSampler):
    """Has an order of its own for each epoch."""

    def set_epoch(self, epoch):
        self.sampler = torch.randperm(20, generator=torch.Generator().manual_seed(epoch)).tolist()


@pytest.mark.parametrize(
    "options",
    [
        lambda own: {"batch_size": 20, "sampler": own},
        lambda own: {"batch_sampler": BatchSampler(own, 20, False)},
        lambda own: {"batch_sampler": Shuffled(own, 20, False)},
    ],
)
def test_the_epoch_of_a_sampler_is_set(options):
    data = TensorDataset(torch.arange(20))
    loader = DataLoader(data, **options(DistributedSampler(data, 1, 0, seed=3)))
    ((first,), _), ((second,), _) = islice(Feed(loader, None), 2)
    assert first.tolist() != second.tolist()
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(20))


def test_no_more_batches_are_loaded_than_steps_are_taken():
    loaded = []

    class Counted(list):
        def __iter__(self):
            for batch in super().__iter__():
                loaded.append(batch)
                yield batch

    data = Counted([(torch.tensor(float(number)),) for number in range(3)])
    values = [args[0].item() for args, _ in islice(Feed(data, torch.device("cpu")), 4)]
    assert values == [0, 1, 2, 0]
    assert len(loaded) == 4


# ---- where data are kept -------------------------------------------------------------------------


@pytest.fixture
def free_memory(monkeypatch):
    """Let the meta device stand for a GPU, with so much free memory."""
    monkeypatch.setattr(batches, "_is_gpu", lambda device: True)
    return lambda free: monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 0))


@pytest.mark.parametrize(
    ("free", "is_there", "moves"),
    [(8 * 12 * 4 * 4, False, True), (8 * 12 * 4 * 4 - 1, False, False), (8 * 12 * 4, True, True)],
)
def test_tensors_move_if_a_quarter_of_the_free_memory_holds_them(
    free_memory, free, is_there, moves
):
    """Those that are there take no more memory."""
    free_memory(free)
    x, y, device = torch.zeros(12, 3).long(), torch.zeros(12, 1), torch.device("meta")
    loader = as_batches((x.to(device) if is_there else x, y), 4, device)
    assert {tensor.is_meta for tensor in loader.data} == {moves}


def test_tensors_on_two_devices_are_indexed_from_the_host(free_memory):
    free_memory(0)
    x, y = torch.zeros(12, 3), torch.zeros(12, dtype=torch.long, device="meta")
    loader = as_batches((x, y), 4, torch.device("meta"))
    assert [batch[0].shape for batch in loader] == [(4, 3)] * 3


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
@pytest.mark.parametrize("pinned", [False, True])
def test_no_copy_is_used_before_it_is_there_or_after_it_is_gone(pinned):
    device = torch.device("cuda", torch.cuda.current_device())
    data = [torch.full((1 << 20,), float(number)) for number in range(20)]
    busy = torch.randn(2048, 2048, device=device)
    sums = []
    loader = [batch.pin_memory() for batch in data] if pinned else data
    for (x,), _ in islice(Feed(loader, device), 60):
        for _ in range(5):  # the step is behind the copies
            busy = torch.tanh(busy @ busy)
        sums.append(torch.stack([x.min(), x.max()]))
    found = torch.stack(sums).cpu()
    expected = torch.arange(20.0).repeat(3)
    torch.testing.assert_close(found, torch.stack([expected, expected], -1), rtol=0, atol=0)


def test_an_empty_dataset_is_refused():
    with pytest.raises(ValueError, match=r"must have one positive length, but got \[0\]"):
        as_batches(TensorDataset(torch.zeros(0, 3)), 4, None)


@pytest.mark.parametrize(
    "data", [[], (), DataLoader(TensorDataset(torch.zeros(23, 3)), 50, drop_last=True)]
)
def test_data_without_a_mini_batch_are_refused(data):
    with pytest.raises(ValueError, match=r"must hold a mini-batch, but got a \w+ of length 0"):
        as_batches(data, None, None)
