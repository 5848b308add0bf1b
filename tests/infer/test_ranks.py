"""Training in two processes, over gloo on CPUs: what is equal on both, and what differs."""

import contextlib
import io

import pyro
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyro_structvi as ps
from pyro_structvi.infer import ranks, training
from pyro_structvi.sites.finding import UnusedSiteWarning
from tests.infer.two_ranks import assert_close, assert_equal, make_fit, on_two_ranks
from tests.models import (
    linear_function,
    regression_data,
)

SGD = {"optimizer": torch.optim.SGD, "lr": 1e-3}


# ---- what is equal, and what differs -------------------------------------------------------------


class Listening(ps.KTiedGuide):
    """A guide that writes down the noise at the time of each call."""

    def forward(self, *args, **kwargs):
        self.heard = [*getattr(self, "heard", []), torch.rand(()).item()]
        return super().forward(*args, **kwargs)


def train_uneven(seed_of_rank=0):
    pyro.set_rng_seed(seed_of_rank * dist.get_rank())
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1))
    model = ps.Regressor(ps.bayesianize(net, prior=1.0, normalization=False), 25, 0.3)
    guide = Listening(model)
    pyro.set_rng_seed(seed_of_rank * dist.get_rank())
    data = [torch.linspace(-1, 1, 75).reshape(25, 3), torch.linspace(-1, 1, 25).unsqueeze(-1)]
    bar = io.StringIO()
    with contextlib.redirect_stderr(bar):
        history = ps.fit(model, guide, data, num_epochs=2, batch_size=5)
    return {
        "history": vars(history),
        "guide": guide.state_dict(),
        "model": model.state_dict(),
        "heard": guide.heard,
        "bar": bar.getvalue(),
        "next noise": torch.rand(()).item(),
    }


def train_thrice():
    return train_uneven(), train_uneven(), train_uneven(seed_of_rank=1)


def test_two_ranks_end_with_the_same_parameters_and_history(tmp_path):
    both = on_two_ranks(train_thrice, tmp_path)
    for first, second in zip(*both, strict=True):  # each of the runs
        assert len(first["history"]["elbo"]) == 2 * 3  # 13 examples on each
        assert first["history"] == second["history"]
        assert_equal(first["guide"], second["guide"])
        assert_equal(first["model"], second["model"])
        assert not torch.equal(first["model"]["net.1.running_mean"], torch.zeros(5))
        assert len(first["heard"]) == 6
        assert not set(first["heard"]) & set(second["heard"]), "noise of its own"
        assert "elbo=" in first["bar"]
        assert not second["bar"]
    for run, again, seeded in both:
        assert run["heard"] == again["heard"], "reproducible"
        assert run["history"] == again["history"] == seeded["history"]
        assert run["heard"] == seeded["heard"], "only the seed of rank 0 counts"
    assert {first["next noise"] for first in both[0]} == {both[1][0]["next noise"]}


@contextlib.contextmanager
def one_noise(device):
    torch.manual_seed(7)
    yield


def train(guide, batch_size, options):
    training.noise_of_rank = one_noise
    model, guide, data = make_fit(guide, **options)
    history = ps.fit(model, guide, data, num_epochs=3, batch_size=batch_size, progress=False, **SGD)
    return {name: torch.tensor(getattr(history, name)) for name in ("elbo", "kl")} | dict(
        guide.state_dict()
    )


@pytest.mark.parametrize("batch_size", [3, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("guide", "options"), [(ps.MAPGuide, {}), (ps.KTiedGuide, {"local_reparam": False})]
)
def test_two_ranks_train_as_one_process_with_batches_of_twice_the_size(
    tmp_path, monkeypatch, guide, options, batch_size
):
    monkeypatch.setattr(training, "noise_of_rank", one_noise)
    alone = train(guide, batch_size and 2 * batch_size, options)
    for found in on_two_ranks(train, tmp_path, guide, batch_size, options):
        assert_close(found, alone)


def gradients_of(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def own_loop():
    model, guide, (x, y) = make_fit(ps.MAPGuide)
    guide.initialize(x, y)
    loss = DistributedDataParallel(ps.StructuredELBO(kl_weight=0.5)(model, guide))
    x, y = (value.chunk(2)[dist.get_rank()] for value in (x, y))
    loss(x, y).backward()
    return gradients_of(guide)


def test_an_own_loop_gets_the_gradients_of_the_whole_batch(tmp_path):
    model, guide, data = make_fit(ps.MAPGuide)
    ps.StructuredELBO(kl_weight=0.5)(model, guide)(*data).backward()
    for found in on_two_ranks(own_loop, tmp_path):
        assert_close(found, gradients_of(guide))


def own_loop_of_a_function():
    guide = ps.KTiedGuide(linear_function)
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    guide.initialize(x, y)
    pyro.set_rng_seed(dist.get_rank())
    loss = DistributedDataParallel(ps.StructuredELBO()(linear_function, guide))
    adam = torch.optim.Adam(loss.parameters(), lr=0.02)
    losses = []
    for _ in range(200):
        adam.zero_grad()
        value = loss(x, y)
        value.backward()
        adam.step()
        losses.append(value.item())
    return losses, guide.state_dict()


@pytest.mark.slow
def test_an_own_loop_trains_a_function(tmp_path):
    (losses, first), (others, second) = on_two_ranks(own_loop_of_a_function, tmp_path)
    assert sum(losses[-20:]) < sum(losses[:20])
    assert losses != others, "noise of its own"
    assert_equal(first, second)


# ---- checkpoints ---------------------------------------------------------------------------------


def train_and_save(folder, loads):
    model, guide, data = make_fit()
    if loads:
        guide.load_state_dict(torch.load(folder / "one.pt"))
    options = {
        "optimizer": torch.optim.Adam,
        "lr": 1e-3,
        "lr_schedule": None,
        "kl_weight": 1.0,
        "progress": False,
    }
    ps.fit(model, guide, data, num_steps=2, batch_size=3, **options)
    if dist.get_rank() == 0:
        torch.save(guide.state_dict(), folder / "many.pt")
    return dict(guide.named_buffers()) | dict(model.state_dict())


def test_a_checkpoint_of_many_loads_in_one(tmp_path):
    on_two_ranks(train_and_save, tmp_path, tmp_path, False)
    model, guide, (x, _) = make_fit()
    state = torch.load(tmp_path / "many.pt")
    assert guide.load_state_dict(state)
    assert_equal(guide.state_dict(), state)
    assert not any(name.startswith("module.") for name in state)
    assert ps.predict(model, guide, x, num_samples=2).mean.shape == (24, 1)


@pytest.mark.slow
def test_a_checkpoint_of_one_loads_in_many(tmp_path):
    model, guide, data = make_fit()
    ps.fit(model, guide, data, num_steps=300, lr=0.05, progress=False)
    torch.save(guide.state_dict(), tmp_path / "one.pt")
    on_two_ranks(train_and_save, tmp_path, tmp_path, True)
    steps = torch.load(tmp_path / "many.pt")
    for name, value in guide.state_dict().items():
        torch.testing.assert_close(steps[name], value, rtol=0, atol=2.1e-3)  # two steps of 1e-3


# ---- parts that are not used --------------------------------------------------------------------


class Unvisited(nn.Module):
    """Has a layer that it never uses."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x):
        return self.used(x)


def train_unvisited():
    pyro.set_rng_seed(0)
    model = ps.Regressor(ps.bayesianize(Unvisited(), prior=1.0), 24, 0.3)
    guide = ps.MAPGuide(model)
    with pytest.warns(UnusedSiteWarning):
        ps.fit(model, guide, regression_data(24), num_steps=4, progress=False, **SGD)
    return guide.state_dict()


def test_sites_that_are_not_used_go_to_their_prior_on_all_ranks(tmp_path):
    alone = train_unvisited()
    for found in on_two_ranks(train_unvisited, tmp_path):
        assert_close(found, alone)


def test_one_process_needs_no_group():
    assert ranks.world() == (0, 1)
    assert ranks.of_all_ranks("value") == ["value"]
    model, *_ = make_fit()
    ranks.share_start(model)
    ranks.average_gradients([*model.parameters()])
