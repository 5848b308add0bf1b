"""Latents of single examples, whose subsamples the model is given or draws."""

from functools import partial

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from torch.distributions import Normal
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import pyro_structvi as ps
from pyro_structvi.guides import LocalLatentWarning

SIZE = 12


def in_batches(y, index):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", SIZE, subsample=index):
        shift = pyro.sample("shift", dist.Normal(0.0, 2.0))
        rate = pyro.sample("rate", dist.Dirichlet(torch.ones(3)))
        pyro.sample("obs", dist.Normal(shift + rate[..., 0], scale), obs=y[index])


def plate_of(y, index):
    return pyro.plate("data", SIZE, subsample=index)


def in_batches_of_data(y, index):
    with pyro.plate("data", SIZE, subsample=index):
        shift = pyro.sample("shift", dist.Normal(0.0, 2.0))
        pyro.sample("obs", dist.Normal(shift, 0.5), obs=y)


@pytest.mark.parametrize(
    ("make", "make_loss"),
    [
        (ps.MeanFieldGuide, Trace_ELBO),
        *((make, ps.StructuredELBO) for make in (ps.MeanFieldGuide, ps.MAPGuide)),
        (partial(ps.EnsembleGuide, size=3), ps.StructuredELBO),
    ],
)
def test_a_batch_trains_its_rows(make, make_loss):
    y, index = torch.randn(SIZE), torch.tensor([7, 2, 5])
    guide = make(in_batches, create_plates=plate_of)
    guide.initialize(y, index)
    before = {name: value.clone() for name, value in guide.named_parameters()}
    svi = SVI(in_batches, guide, pyro.optim.Adam({"lr": 0.01}), make_loss())
    for _ in range(5):
        svi.step(y, index)
    shapes = {name: value.shape for name, value in guide.median().items()}
    assert shapes == {"scale": (), "shift": (SIZE,), "rate": (SIZE, 3)}
    for name, value in guide.named_parameters():
        if ".scale." not in name:
            dim = -1 if ".shift." in name else -2
            changed = (value != before[name]).movedim(dim, 0).reshape(SIZE, -1).any(1)
            assert changed.nonzero().flatten().tolist() == [2, 5, 7]


def test_the_terms_and_predictions_of_a_batch_are_those_of_its_rows():
    y, index = torch.randn(SIZE), torch.tensor([7, 2, 5])
    guide = ps.MeanFieldGuide(in_batches, create_plates=plate_of, init_scale=1e-3)
    guide.initialize(y, index)
    guide["shift"].loc.data = torch.arange(SIZE).float()
    terms = ps.StructuredELBO().terms(in_batches, guide, y, index)
    q = Normal(index.float(), guide["shift"].log_scale[index].exp())
    expected = torch.distributions.kl_divergence(q, Normal(0.0, 2.0)).sum() * SIZE / 3
    torch.testing.assert_close(terms.kl["shift"], expected)
    trace = poutine.trace(guide).get_trace(y, index)
    assert trace.nodes["shift"]["scale"] == SIZE / 3
    assert torch.equal(trace.nodes["shift"]["fn"].mean, index.float())
    drawn = Predictive(in_batches, guide=guide, num_samples=5)(torch.zeros(SIZE), index)["shift"]
    assert (drawn - index).abs().max() < 0.1
    guide = ps.MeanFieldGuide(in_batches, create_plates=lambda y, index: ["data"])
    with pytest.raises(TypeError, match=r"`create_plates` must return a pyro.plate or several"):
        guide(y, torch.arange(3))


def test_examples_in_another_order_keep_their_latents():
    """All examples in another order, where ``pyro.subsample`` does nothing."""
    y, order = torch.arange(SIZE).double(), torch.arange(SIZE).flip(0)
    guide = ps.MeanFieldGuide(in_batches_of_data, create_plates=plate_of, init_scale=1e-6)
    guide.initialize(y, order)
    guide["shift"].loc.data = y.clone()
    elbo = ps.StructuredELBO(1)
    losses = [elbo.loss(in_batches_of_data, guide, y[own], own) for own in (order.flip(0), order)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    inputs_only = lambda index: in_batches_of_data(None, index)  # noqa: E731
    for own in (order, order[:5]):
        found = ps.predict(inputs_only, guide, own).mean
        torch.testing.assert_close(found, y[own], atol=1e-4, rtol=0)

    def in_order_of_examples(index):  # as a guide of the user's own, whose values are the examples'
        with pyro.plate("data", SIZE, subsample=index):
            pyro.sample("shift", dist.Delta(y[index]))

    with pytest.warns(LocalLatentWarning, match="take the values of the posterior"):
        found = ps.predict(inputs_only, in_order_of_examples, order, num_samples=2).mean
    torch.testing.assert_close(found, y[order])
    with pytest.raises(ValueError, match=r"subsample of the plate 'data'.*create_plates"):
        ps.MeanFieldGuide(in_batches_of_data).initialize(y, order)


def test_medians_and_quantiles_of_local_latents_are_those_of_auto_normal():
    y, index = torch.randn(SIZE), torch.tensor([7, 2, 5])
    theirs = AutoNormal(in_batches, create_plates=plate_of, init_scale=0.3)
    theirs(y, index)
    values = {name: value + 0.1 for name, value in theirs.median().items() if name != "rate"}
    ours = ps.MeanFieldGuide(
        in_batches,
        create_plates=plate_of,
        init_scale=0.3,
        init_loc_fn=lambda site: values.get(site["name"], theirs.median()["rate"]),
    )
    theirs.locs.scale, theirs.locs.shift = values["scale"].log(), values["shift"]
    ours.initialize(y, index)
    for name, value in theirs.median().items():
        torch.testing.assert_close(ours.median()[name], value)
    levels = [0.1, 0.5, 0.9]
    for name, value in theirs.quantiles(levels).items():
        torch.testing.assert_close(ours.quantiles(levels)[name], value, rtol=1e-4, atol=1e-5)


def of_its_own(y, index=None):
    with pyro.plate(
        "data", SIZE, subsample=index, subsample_size=3 if index is None else None
    ) as own:
        shift = pyro.sample("shift", dist.Normal(0.0, 2.0))
        pyro.sample("obs", dist.Normal(shift, 0.5), obs=y[own] if index is None else y)


def assert_fitted(guide, y):
    assert (guide.median()["shift"] - y * 16 / 17).abs().max() < 0.5


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_guide_draws_the_batch_of_a_plate_that_draws_its_own(is_compiled):
    y, guide = torch.arange(SIZE) / 4.0, ps.MeanFieldGuide(of_its_own)
    make, options = (ps.CompiledSVI, {"backend": None}) if is_compiled else (SVI, {})
    svi = make(of_its_own, guide, pyro.optim.Adam({"lr": 0.1}), ps.StructuredELBO(), **options)
    for _ in range(150):
        svi.step(y)
    assert_fitted(guide, y)


@pytest.mark.parametrize("in_list", [False, True])
def test_a_plate_with_a_given_batch_needs_one_of_the_guide(in_list):
    """The guide would draw other examples, whose latents would take these observations."""
    data = torch.randn(SIZE), torch.tensor([7, 2, 5])
    guide = ps.MeanFieldGuide(in_batches)
    if in_list:
        part, guide = guide, AutoGuideList(in_batches)
        guide.append(part)
    with pytest.raises(
        ValueError, match=r"plate 'data', and the guide .* site 'shift'.*create_plates"
    ):
        guide(*data)
    whole = ps.MeanFieldGuide(in_batches)
    whole.initialize(data[0], torch.arange(SIZE))
    assert whole.median()["shift"].shape == (SIZE,)


def test_fit_takes_batches_of_latents_whose_plate_the_guide_creates():
    data = torch.arange(SIZE) / 4.0, torch.arange(SIZE)
    options = {"num_steps": 150, "batch_size": 4, "lr": 0.1, "progress": False}
    with pytest.raises(ValueError, match=r"'shift'.*`create_plates=`"):
        ps.fit(of_its_own, ps.MeanFieldGuide(of_its_own), data, **options)
    with pytest.raises(ValueError, match=r"'shift'.*give the guide `create_plates`"):
        ps.fit(of_a_batch, ps.MeanFieldGuide(of_a_batch), data[:1], **options)
    guide = ps.MeanFieldGuide(of_its_own, create_plates=plate_of)
    ps.fit(of_its_own, guide, data, **options)
    assert_fitted(guide, data[0])


def of_a_batch(y):
    with pyro.plate("data", len(y)):
        shift = pyro.sample("shift", dist.Normal(0.0, 2.0))
        pyro.sample("obs", dist.Normal(shift, 0.5), obs=y)


@pytest.mark.parametrize("is_whole", [pytest.param(True, marks=pytest.mark.slow), False])
def test_fit_keeps_the_order_of_latents_in_one_batch(is_whole):
    data = TensorDataset(torch.arange(SIZE) / 4.0)
    guide = ps.MeanFieldGuide(of_a_batch)
    options = {"batch_size": SIZE} if is_whole else {}
    ps.fit(of_a_batch, guide, data, num_steps=150, lr=0.1, progress=False, **options)
    assert_fitted(guide, data.tensors[0])


@pytest.mark.parametrize("own_batches", [False, True])
@pytest.mark.parametrize("in_list", [False, True])
def test_fit_refuses_a_shuffled_batch_of_latents(in_list, own_batches):
    data = TensorDataset(torch.randn(SIZE))
    batches = BatchSampler(RandomSampler(data), SIZE, drop_last=False)
    options = {"batch_sampler": batches} if own_batches else {"batch_size": SIZE, "shuffle": True}
    shuffled = DataLoader(data, **options)
    guide = ps.MeanFieldGuide(of_a_batch)
    if in_list:
        part, guide = guide, AutoGuideList(of_a_batch)
        guide.append(part)
    with pytest.raises(ValueError, match=r"\['shift'\] belong to single examples.*do not shuffle"):
        ps.fit(of_a_batch, guide, shuffled, num_steps=1, progress=False)


@pytest.mark.parametrize("name", [pytest.param("ensemble", marks=pytest.mark.slow), "mixture"])
def test_members_take_batches_of_latents_whose_plate_they_create(name):
    make = {
        "ensemble": lambda: ps.EnsembleGuide(in_batches_of_data, 2, create_plates=plate_of),
        "mixture": lambda: ps.MixtureGuide(
            in_batches_of_data, partial(ps.MeanFieldGuide, create_plates=plate_of), 2
        ),
    }
    guide, data = make[name](), (torch.arange(SIZE) / 4.0, torch.arange(SIZE))
    options = {"num_steps": 150, "batch_size": 4, "lr": 0.1, "progress": False}
    ps.fit(in_batches_of_data, guide, data, **options)
    for member in guide.members:
        assert_fitted(member, data[0])
