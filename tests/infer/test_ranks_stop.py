"""Training in two processes: data of the user's own, and how all stop where one has to."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import pyro_structvi as ps
from pyro_structvi.infer.steps.eager import EagerStep
from tests.infer.two_ranks import assert_equal, make_fit, on_two_ranks
from tests.models import local_latent_function


def train_with_own_loader():
    model, guide, data = make_fit(ps.MAPGuide)
    dataset = TensorDataset(*data)
    loader = DataLoader(dataset, batch_size=3, sampler=DistributedSampler(dataset, seed=9))
    seen = []
    guide.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    ps.fit(model, guide, loader, num_epochs=2, progress=False)
    return torch.cat(seen[:4]), torch.cat(seen[4:]), data[1], guide.state_dict()


def test_a_loader_of_the_users_own_is_used_as_it_is(tmp_path):
    first, second = on_two_ranks(train_with_own_loader, tmp_path)
    for epoch in (0, 1):
        seen = torch.cat([first[epoch], second[epoch]])
        assert torch.equal(seen.sort(0).values, first[2].sort(0).values)
    assert not torch.equal(first[0], first[1]), "shuffled anew"
    assert_equal(first[3], second[3])


def how_it_stops(kind):
    model, guide, (x, y) = make_fit()
    guide.initialize(x, y)
    rank, data, options = dist.get_rank(), [(x, y)] * 3, {"num_steps": 3}
    kept = {}

    class Batches(list):
        def __iter__(self):
            yield x, y
            kept.update({name: value.clone() for name, value in guide.state_dict().items()})
            yield (x, bad) if rank == 1 else (x, y)

    bad = y.clone()
    if kind == "nan":
        bad[0] = float("nan")
    elif kind == "overflow":
        bad[0] = 1e200
    elif kind == "shape":
        bad = y[:5]
    elif kind == "length":
        data, options = [(x, y)] * (2 + rank), {"num_epochs": 1}
    elif kind == "local":
        model, data = local_latent_function, (x, y.squeeze(-1))
        guide = ps.MeanFieldGuide(model)
    if kind in {"nan", "overflow", "shape"}:
        data = Batches([0, 0])
    try:
        ps.fit(model, guide, data, progress=False, **options)
    except Exception as error:
        now = guide.state_dict()
        return type(error), str(error), all(torch.equal(now[name], kept[name]) for name in kept)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("nan", FloatingPointError, "At step 1, the data ['argument 1'] is not finite on rank 1."),
        (
            "overflow",
            FloatingPointError,
            "At step 1, the log likelihood of the sites ['obs'] is not finite on rank 1.",
        ),
        ("shape", ValueError, "`y` must have shape that of the net's output = (24, 1)"),
        ("length", ValueError, "All ranks must take as many steps, but they would take [2, 3]."),
        ("local", ValueError, "Fit all examples at once (leave `batch_size` out), in one process."),
    ],
)
def test_what_is_wrong_on_one_rank_stops_all_with_one_error(tmp_path, kind, error, message):
    first, second = on_two_ranks(how_it_stops, tmp_path, kind)
    assert first == second
    assert first[0] is error
    assert message in first[1]
    assert first[2], "parameters are those before the step"


def interrupt_one():
    model, guide, data = make_fit()
    original = EagerStep.take

    def interrupted(self, *batch):
        if (self.loss.elbo.step, dist.get_rank()) == (2, 1):
            raise KeyboardInterrupt
        return original(self, *batch)

    EagerStep.take = interrupted
    try:
        ps.fit(model, guide, data, num_steps=5, progress=False)
    except (KeyboardInterrupt, RuntimeError) as error:
        return type(error)


def test_an_interrupt_of_one_rank_ends_the_others_with_an_error(tmp_path):
    assert on_two_ranks(interrupt_one, tmp_path) == [RuntimeError, KeyboardInterrupt]
