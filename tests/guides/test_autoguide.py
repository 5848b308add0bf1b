"""Guides in the place of Pyro's: their interface, subsamples, starts, supports and batches."""

import copy
import io
import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.distributions import constraints
from pyro.infer import (
    SVI,
    JitTrace_ELBO,
    JitTraceMeanField_ELBO,
    Predictive,
    Trace_ELBO,
    TraceMeanField_ELBO,
)
from pyro.infer.autoguide import (
    AutoGuide,
    AutoGuideList,
    AutoNormal,
    init_to_feasible,
    init_to_generated,
    init_to_mean,
    init_to_median,
    init_to_sample,
    init_to_uniform,
    init_to_value,
)
from torch import nn
from torch.distributions import Normal

import pyro_structvi as ps
from pyro_structvi.extend import Family
from pyro_structvi.families import FullCovariance
from tests.models import make_regressor, regression_data

NORMAL = {
    "mean field": ps.MeanFieldGuide,
    "k-tied": lambda model, **options: ps.KTiedGuide(model, rank=2, **options),
    "low rank": lambda model, **options: ps.AutoLowRankLRT(model, rank=2, **options),
    "full": ps.FullCovarianceGuide,
    "matrix normal": ps.MatrixNormalGuide,
    "rowwise": ps.RowwiseGuide,
    "inducing weights": lambda model, **options: ps.InducingWeightGuide(model, (2, 2), **options),
}
GUIDES = NORMAL | {
    "points": ps.MAPGuide,
    "ensemble": lambda model, **options: ps.EnsembleGuide(model, 3, **options),
    "dropout": ps.MCDropoutGuide,
}
PROBS = [0.1, 0.5, 0.9]


def train(model, guide, loss, data, steps=3):
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), loss)
    return [svi.step(*data) for _ in range(steps)]


pytestmark = [
    pytest.mark.filterwarnings("ignore:No closed-form KL"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


def make_model():
    return make_regressor(noise_scale=dist.HalfNormal(1.0))


# ---- the interface -------------------------------------------------------------------------------


@pytest.mark.parametrize("make_guide", NORMAL.values(), ids=NORMAL)
def test_quantiles_are_those_of_the_dense_normal(make_guide):
    guide = make_guide(make_model(), init_scale=0.3)
    quantiles = guide.quantiles(torch.tensor(PROBS))
    for posterior in guide.posteriors.values():
        q, site = posterior(), posterior.site
        if site.name == "noise_scale":
            continue
        scale = q.covariance_matrix.diagonal().sqrt().reshape(q.event_shape)
        expected = Normal(q.mean, scale).icdf(torch.tensor(PROBS).reshape(-1, *[1] * q.mean.dim()))
        for name, values in site.split(expected).items():
            torch.testing.assert_close(quantiles[name], values, rtol=1e-4, atol=1e-5)
    noise = guide["noise_scale"]()
    expected = Normal(noise.base_dist.mean, noise.base_dist.stddev).icdf(torch.tensor(PROBS)).exp()
    torch.testing.assert_close(quantiles["noise_scale"], expected)


def test_quantiles_of_points_and_their_mixtures():
    model, site, probs = make_model(), "net.0.weight", torch.tensor(PROBS)
    guide = ps.MAPGuide(model)
    for name, values in guide.quantiles(PROBS).items():
        assert torch.equal(values, guide.median()[name].expand_as(values))
    guide = ps.EnsembleGuide(model, 5)
    members = torch.stack([each.median()[site] for each in guide.members]).sort(0).values
    assert torch.equal(guide.quantiles([0.0, 0.5, 1.0])[site], members[[0, 2, 4]])
    guide = ps.MCDropoutGuide(model, rate=0.3)
    draws = torch.stack([guide.draw()[site] for _ in range(400)])
    found = guide.quantiles([0.1, 0.9])[site]
    torch.testing.assert_close(found, draws.quantile(probs[[0, 2]], 0))
    guide = ps.InducingWeightGuide(model, (2, 2), "ensemble", init_scale=0.3)
    q, found = guide[site](), guide.quantiles(PROBS)
    values = torch.cat([found[site], found["net.0.bias"].unsqueeze(-1)], -1)
    given = [q.condition(member) for member in q.inducing.members]
    cdf = sum(Normal(each.mean, each.variance.sqrt()).cdf(values) for each in given) / len(given)
    torch.testing.assert_close(cdf, probs.reshape(-1, 1, 1).expand_as(cdf))


def test_quantiles_rise_on_every_support():
    for support, back in (
        (constraints.less_than(1.0), lambda values: (1 - values).log().flip(0)),
        (constraints.interval(-1.0, 3.0), lambda values: ((values + 1) / 4).logit()),
    ):
        prior = dist.ImproperUniform(support, (), (2,))
        guide = ps.MeanFieldGuide(lambda prior=prior: pyro.sample("z", prior), init_scale=0.5)
        guide.initialize()
        expected = Normal(guide["z"].loc, 0.5).icdf(torch.tensor([[0.2], [0.8]]))
        torch.testing.assert_close(back(guide.quantiles([0.2, 0.8])["z"]), expected)


def test_quantiles_are_of_probabilities_and_known_distributions():
    for wrong in ([0.5, -0.1], [float("nan")]):
        with pytest.raises(ValueError, match="`quantiles` must be numbers from 0 to 1"):
            ps.MeanFieldGuide(make_model()).quantiles(wrong)
    guide = ps.InducingWeightGuide(make_model(), (2, 2), FullCovariance(), shared=True)
    with pytest.raises(NotImplementedError, match=r"'net.0.weight', 'net.2.weight'.*guide.draw()"):
        guide.quantiles([0.5])
    half = ps.Regressor(ps.bayesianize(nn.Linear(3, 2).bfloat16(), prior=1.0), 12, 0.3)
    for name in ("k-tied", "ensemble"):
        found = GUIDES[name](half).quantiles([0.1, 0.9])["net.weight"]
        assert found.dtype == torch.float32
        assert bool(torch.isfinite(found).all())


# ---- among Pyro's guides -------------------------------------------------------------------------


@pytest.mark.parametrize("make_guide", GUIDES.values(), ids=GUIDES)
def test_a_guide_is_a_part_of_a_list(make_guide):
    model, data = make_model(), regression_data()
    first = ["net.0.weight", "net.0.bias"]

    def make():
        guide = AutoGuideList(model)
        guide.append(make_guide(poutine.block(model, expose=first), init_scale=0.3))
        guide.append(AutoNormal(poutine.block(model, hide=first)))
        return guide

    guide = make()
    for elbo in (Trace_ELBO(), ps.StructuredELBO()):
        assert all(loss == loss for loss in train(model, guide, elbo, data))
    names = {*first, "net.2.weight", "net.2.bias", "noise_scale"}
    assert guide.median(*data).keys() == guide.quantiles(PROBS, *data).keys() == names
    assert guide[0].is_initialized
    other = make()
    other(*data)
    other.load_state_dict(guide.state_dict())
    for name, value in guide.median().items():
        assert torch.equal(other.median()[name], value)


def test_parts_of_a_list_stand_in_one_plate():
    def model(y):
        with pyro.plate("data", len(y)):
            first = pyro.sample("first", dist.Normal(0.0, 1.0))
            second = pyro.sample("second", dist.Normal(0.0, 1.0))
            pyro.sample("obs", dist.Normal(first + second, 1.0), obs=y)

    guide = AutoGuideList(model, create_plates=lambda y: pyro.plate("data", len(y)))
    guide.append(ps.MeanFieldGuide(poutine.block(model, hide=["second"])))
    guide.append(AutoNormal(poutine.block(model, hide=["first"])))
    y = torch.randn(5)
    train(model, guide, Trace_ELBO(), (y,))
    assert {name: value.shape for name, value in guide.median().items()} == {
        "first": (5,),
        "second": (5,),
    }
    wrong = AutoGuideList(model)
    wrong.append(ps.MeanFieldGuide(model, create_plates=lambda y: pyro.plate("data", len(y))))
    with pytest.raises(ValueError, match="`create_plates` must be None for a guide in an Auto"):
        wrong(y)


@pytest.mark.parametrize("make_guide", GUIDES.values(), ids=GUIDES)
def test_a_guide_answers_as_pyros_and_has_copies(make_guide):
    model, data = make_model(), regression_data()
    guide = make_guide(model, init_scale=0.3)
    assert isinstance(guide, AutoGuide)
    median, quantiles = guide.median(*data), guide.quantiles(PROBS, *data)
    assert median.keys() == quantiles.keys() == set(guide.site_names)
    assert guide.is_initialized
    drawn = guide(*data)
    shapes = [drawn[name].shape for name in sorted(drawn)]
    assert [each.shape for each in guide.call(*data)] == shapes
    train(model, guide, Trace_ELBO(), data)
    file = io.BytesIO()
    torch.save(guide, file)
    file.seek(0)
    unpickled, median = torch.load(file, weights_only=False), guide.median()
    for each, own in ((copy.deepcopy(guide), model), (unpickled, None)):
        assert all(torch.equal(each.median()[name], value) for name, value in median.items())
        assert each.model is own
    assert Predictive(model, guide=guide, num_samples=3)(data[0])["obs"].shape == (3, 12, 1)


def assert_compiled_is_eager(compiled, eager, model, guide, data):
    """Compare losses and gradients of one seed, after the call that compiles."""
    found = []
    for objective in (eager, compiled):
        objective.loss_and_grads(model, guide, *data)
        guide.zero_grad()
        pyro.set_rng_seed(3)
        value = objective.loss_and_grads(model, guide, *data)
        gradients = [p.grad.flatten() for p in guide.parameters() if p.grad is not None]
        found.append(torch.cat([torch.tensor([value]), *gradients]))
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-7)


def latents_in_a_plate(x, y):
    with pyro.plate("groups", 4):
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 12):
        pyro.sample("obs", dist.Normal(shift.sum(-1, True), 1.0), obs=y[:, 0])


EXPANDING = {"num_particles": 3, "vectorize_particles": True, "max_plate_nesting": 1}
MODELS = {"net": make_model, "plate": lambda: latents_in_a_plate}
TRACED = GUIDES | {
    "inducing ensemble": lambda model, **options: ps.InducingWeightGuide(
        model, (2, 2), "ensemble", **options
    )
}
TRACED_CASES = [
    *((name, "net", EXPANDING) for name in ("mean field", "inducing weights")),
    *((name, "plate", EXPANDING) for name in ("mean field", "points")),
    *(
        pytest.param(name, "net", options, marks=pytest.mark.slow)
        for name, options in (
            *(("inducing weights", {}), ("inducing ensemble", {})),
            *(("full", EXPANDING), ("points", EXPANDING)),
        )
    ),
]


@pytest.mark.parametrize(("name", "make", "options"), TRACED_CASES)
def test_pyros_compiled_objective_has_the_eager_gradients(name, make, options):
    """Sites are expanded by the plate of particles, or by one of the model."""
    model, data = MODELS[make](), regression_data()
    objectives = [each(**options) for each in (JitTrace_ELBO, Trace_ELBO)]
    guide = TRACED[name](model, init_scale=0.3)
    assert_compiled_is_eager(*objectives, model, guide, data)
    if name == "mean field":  # at draws that do not differ, since it takes noise in another order
        guide = ps.MeanFieldGuide(model, init_scale=1e-9)
        both = [each(**options) for each in (JitTraceMeanField_ELBO, TraceMeanField_ELBO)]
        losses = [objective.loss_and_grads(model, guide, *data) for objective in both]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        with pytest.raises(NotImplementedError, match="draws a member in each call"):
            train(model, GUIDES["ensemble"](model), JitTrace_ELBO(), data)


# ---- starts and supports -------------------------------------------------------------------------


def test_every_start_of_pyro_serves():
    beta, uniform = dist.Beta(2.0, 3.0).expand([3]).to_event(1), init_to_uniform(radius=1.0)
    starts = (
        *(init_to_mean, init_to_median, init_to_feasible, uniform, init_to_sample),
        init_to_value(values={"z": torch.full((3,), 0.2)}),
        init_to_generated(generate=lambda: init_to_median(num_samples=5)),
    )
    supports = constraints.real_vector, constraints.positive, constraints.ordered_vector
    improper = [(dist.ImproperUniform(support, (), (3,)), uniform) for support in supports]
    for prior, start in (*((beta, start) for start in starts), *improper):
        model = lambda prior=prior: pyro.sample("z", prior)  # noqa: E731
        guide = ps.MeanFieldGuide(model, init_loc_fn=start)
        train(model, guide, Trace_ELBO(), ())
        median = guide.median()["z"]
        assert median.shape == (3,)
        assert bool(prior.support.check(median).all())


@pytest.mark.parametrize(
    ("prior", "start"),
    [
        (dist.HalfNormal(1.0), -1.0),
        (dist.HalfNormal(1.0), 0.0),
        (dist.HalfCauchy(1.0), math.inf),
        (dist.Normal(0.0, 1.0), math.nan),
        (dist.Dirichlet(torch.ones(3)), [0.5, 0.5, 0.5]),
    ],
)
def test_a_start_must_be_inside_of_the_support(prior, start):
    guide = ps.MeanFieldGuide(
        lambda: pyro.sample("z", prior), init_loc_fn=lambda site: torch.tensor(start)
    )
    with pytest.raises(ValueError, match=r"finite numbers inside of .* for the site 'z', but some"):
        guide.initialize()


def test_a_start_is_a_tensor_and_takes_the_priors_dtype():
    def guide_with(start):
        return ps.MeanFieldGuide(
            lambda: pyro.sample("z", dist.HalfNormal(1.0)), init_loc_fn=lambda site: start
        )

    guide = guide_with(torch.tensor(0.5, dtype=torch.float32))
    guide.initialize()
    assert guide.median()["z"].dtype == torch.float64
    with pytest.raises(
        TypeError, match=r"`init_loc_fn\(site\)` must be a torch.Tensor, but got 0.5"
    ):
        guide_with(0.5).initialize()


def test_supports_of_fewer_dimensions():
    correlations = dist.ImproperUniform(constraints.corr_cholesky, (), (4, 4))
    for prior, size in (
        (dist.Dirichlet(torch.ones(4)), 3),
        (dist.LKJCholesky(3), 3),
        (correlations, 6),
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


def test_a_support_without_a_bijection_needs_a_family_of_ones_own():
    for support, shape in ((constraints.sphere, (3,)), (constraints.positive_definite, (3, 3))):
        prior = dist.ImproperUniform(support, (), shape)
        for make_guide in GUIDES.values():
            guide = make_guide(lambda prior=prior: pyro.sample("direction", prior))
            with pytest.raises(ValueError, match=r"'direction' lies on .*ProjectedNormalReparam"):
                guide.initialize()

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
