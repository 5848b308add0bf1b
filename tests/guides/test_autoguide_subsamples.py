"""Guides in the place of Pyro's: subsamples, starts, supports and batches."""

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.distributions import constraints
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import (
    AutoNormal,
    init_to_feasible,
    init_to_generated,
    init_to_mean,
    init_to_median,
    init_to_sample,
    init_to_uniform,
    init_to_value,
)
from torch.distributions import Normal

import pyro_structvi as ps
from pyro_structvi.extend import Family
from tests.guides.autoguide_models import GUIDES, PROBS, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:No closed-form KL"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


# ---- subsamples ----------------------------------------------------------------------------------


SIZE = 12


def in_batches(y, index):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", SIZE, subsample=index):
        shift = pyro.sample("shift", dist.Normal(0.0, 2.0))
        rate = pyro.sample("rate", dist.Dirichlet(torch.ones(3)))
        pyro.sample("obs", dist.Normal(shift + rate[..., 0], scale), obs=y[index])


def plate_of(y, index):
    return pyro.plate("data", SIZE, subsample=index)


@pytest.mark.parametrize(
    ("make", "make_loss"),
    [
        (ps.MeanFieldGuide, Trace_ELBO),
        *((make, ps.StructuredELBO) for make in (ps.MeanFieldGuide, ps.MAPGuide)),
        (GUIDES["ensemble"], ps.StructuredELBO),
    ],
)
def test_a_batch_trains_its_rows(make, make_loss):
    y, index = torch.randn(SIZE), torch.tensor([7, 2, 5])
    guide = make(in_batches, create_plates=plate_of)
    guide.initialize(y, index)
    before = {name: value.clone() for name, value in guide.named_parameters()}
    train(in_batches, guide, make_loss(), (y, index), steps=5)
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
    for name, value in theirs.quantiles(PROBS).items():
        torch.testing.assert_close(ours.quantiles(PROBS)[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_guide_draws_the_batch_of_a_plate_that_draws_its_own(is_compiled):
    def model(y):
        with pyro.plate("data", SIZE, subsample_size=3) as index:
            shift = pyro.sample("shift", dist.Normal(0.0, 2.0))
            pyro.sample("obs", dist.Normal(shift, 0.5), obs=y[index])

    y, guide = torch.arange(SIZE) / 4.0, ps.MeanFieldGuide(model)
    make, options = (ps.CompiledSVI, {"backend": None}) if is_compiled else (SVI, {})
    svi = make(model, guide, pyro.optim.Adam({"lr": 0.1}), ps.StructuredELBO(), **options)
    for _ in range(150):
        svi.step(y)
    assert (guide.median()["shift"] - y * 16 / 17).abs().max() < 0.5


def test_fit_takes_batches_of_latents_whose_plate_the_guide_creates():
    def model(y, index):
        with pyro.plate("data", SIZE, subsample=index):
            shift = pyro.sample("shift", dist.Normal(0.0, 2.0))
            pyro.sample("obs", dist.Normal(shift, 0.5), obs=y)

    data = torch.arange(SIZE) / 4.0, torch.arange(SIZE)
    options = {"num_steps": 150, "batch_size": 4, "lr": 0.1, "progress": False}
    with pytest.raises(ValueError, match=r"'shift'.*give the guide `create_plates`"):
        ps.fit(model, ps.MeanFieldGuide(model), data, **options)
    guide = ps.MeanFieldGuide(model, create_plates=plate_of)
    ps.fit(model, guide, data, **options)
    assert (guide.median()["shift"] - data[0] * 16 / 17).abs().max() < 0.5


# ---- starts and supports -------------------------------------------------------------------------


REAL, POSITIVE, ORDERED = (
    dist.ImproperUniform(support, (), (3,))
    for support in (constraints.real_vector, constraints.positive, constraints.ordered_vector)
)
BETA, UNIFORM = dist.Beta(2.0, 3.0).expand([3]).to_event(1), init_to_uniform(radius=1.0)
STARTS = (
    *(init_to_mean, init_to_median, init_to_feasible, UNIFORM, init_to_sample),
    init_to_value(values={"z": torch.full((3,), 0.2)}),
    init_to_generated(generate=lambda: init_to_median(num_samples=5)),
)


def test_every_start_of_pyro_serves():
    pairs = [(BETA, start) for start in STARTS]
    for prior, start in (*pairs, (REAL, UNIFORM), (POSITIVE, UNIFORM), (ORDERED, UNIFORM)):
        model = lambda prior=prior: pyro.sample("z", prior)  # noqa: E731
        guide = ps.MeanFieldGuide(model, init_loc_fn=start)
        train(model, guide, Trace_ELBO(), ())
        median = guide.median()["z"]
        assert median.shape == (3,)
        assert bool(prior.support.check(median).all())


def test_supports_of_fewer_dimensions():
    for prior, size in (
        (dist.Dirichlet(torch.ones(4)), 3),
        (dist.LKJCholesky(3), 3),
        (dist.ImproperUniform(constraints.corr_cholesky, (), (4, 4)), 6),
    ):
        model = lambda prior=prior: pyro.sample("z", prior)  # noqa: E731
        guide = ps.MeanFieldGuide(model)
        train(model, guide, ps.StructuredELBO(), ())
        assert guide["z"].loc.shape == (size,)
        assert prior.support.check(guide.draw()["z"])
        assert guide.quantiles([0.4, 0.6])["z"].shape == (2, *prior.shape())


class OnTheSphere(Family):
    needs = "a direction"

    def fits(self, site):
        return site.support is constraints.sphere

    def init(self, site, loc, scale):
        return {"loc": loc.clone()}

    def distribution(self, site, loc):
        return dist.VonMises3D(loc).mask(False)


@pytest.mark.parametrize(
    ("support", "shape"), [(constraints.sphere, (3,)), (constraints.positive_definite, (3, 3))]
)
def test_a_support_without_a_bijection_needs_a_family_of_ones_own(support, shape):
    def model():
        pyro.sample("direction", dist.ImproperUniform(support, (), shape))

    for make_guide in GUIDES.values():
        with pytest.raises(ValueError, match=r"'direction' lies on .*ProjectedNormalReparam"):
            make_guide(model).initialize()

    def projected():
        pyro.sample("direction", dist.ProjectedNormal(torch.ones(3)))

    guide = ps.StructuredGuide(projected, {"direction": OnTheSphere()})
    guide.initialize()
    assert guide["direction"].loc.shape == (3,)


# ---- batches without plates ----------------------------------------------------------------------


def test_a_site_of_one_element_needs_no_event():
    def model():
        return pyro.sample("z", dist.Normal(torch.zeros(1), 1.0))

    for make_guide in GUIDES.values():
        guide = make_guide(model)
        for loss in (Trace_ELBO(), ps.StructuredELBO()):
            train(model, guide, loss, ())
        assert guide.median()["z"].shape == (1,)


def test_a_batch_in_no_plate_gets_what_takes_batches_or_an_error_that_says_what_to_write():
    def model():
        return pyro.sample("z", dist.Normal(torch.zeros(2, 3), torch.tensor(1.0)))

    guide = ps.MeanFieldGuide(model)
    terms = ps.StructuredELBO().terms(model, guide)
    expected = torch.distributions.kl_divergence(Normal(0.0, 0.01), Normal(0.0, 1.0))
    means = guide["z"].loc.square().sum() / 2
    torch.testing.assert_close(terms.kl["z"], 6 * expected + means)
    message = r"KTied.*'z' is a batch of shape \(2, 3\) in no plate.*2\)`"
    with pytest.raises(ValueError, match=message):
        ps.KTiedGuide(model).initialize()
