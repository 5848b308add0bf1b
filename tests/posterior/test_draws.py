"""Draws and guides must fit the model that they are used with, and local latents their examples."""

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import Predictive
from pyro.infer.autoguide import AutoNormal
from pyro.infer.reparam import LocScaleReparam
from torch.utils.data import DataLoader, TensorDataset

import pyro_structvi as ps
from pyro_structvi.sites.autoguide import LocalLatentWarning
from tests.models import make_classifier, make_regressor, regression_data
from tests.posterior.passed_models import draws_of


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: {name.removeprefix("net."): value for name, value in d.items()},
            r"missing in it: \['net.0.weight', .*not in the model: \['0.weight', ",
        ),
        (lambda d: dict(list(d.items())[1:]), r"missing in it: \['net.0.weight'\].*model: \[\]"),
        (lambda d: d | {"other": torch.zeros(4)}, r"missing in it: \[\].*model: \['other'\]"),
        (
            lambda d: d | {"net.0.bias": torch.zeros(4, 7)},
            r"'net.0.bias' values of the model's shape \(5,\), but got \(7,\)",
        ),
        (lambda d: d | {"obs": torch.zeros(4, 5, 1)}, "of latent sites only, but .* 'obs'.*Leave"),
        (
            lambda d: {name: value[:0] for name, value in d.items()},
            "at least one and the same number of draws, but",
        ),
        (lambda d: {}, "at least one and the same number of draws, but got {}"),
    ],
)
def test_draws_must_have_exactly_the_latent_sites(change, message):
    model, (x, _) = make_regressor(), regression_data(5)
    draws = change(draws_of(ps.MeanFieldGuide(model), 4))
    with pytest.raises(ValueError, match=message):
        ps.predict(model, draws, x)


def test_an_observed_site_of_another_name_is_refused():
    model, (x, _) = make_regressor(), regression_data(5)
    with pytest.raises(
        ValueError, match=r"observed site must be one of \['obs'\], but got `site='y'`"
    ):
        ps.predict(model, draws_of(ps.MeanFieldGuide(model), 4), x, site="y")


def test_observations_among_the_inputs_are_refused():
    model, (x, y) = make_regressor(), regression_data(5)
    loader = DataLoader(TensorDataset(x, y, torch.ones(5)), batch_size=5)
    for inputs in [(x, y), (loader,)]:
        with pytest.raises(ValueError, match=r"was given those of \['obs'\]\. Leave them out.*y=y"):
            ps.predict(model, ps.MeanFieldGuide(model), *inputs, num_samples=2)


def test_what_is_no_posterior_of_the_model_is_refused():
    model, other, x = make_regressor(), make_classifier(), torch.zeros(5, 3)
    for posterior, message in [
        (ps.KTiedGuide, "the class KTiedGuide"),
        (AutoNormal, "the class AutoNormal"),
        (model, "got the model"),
        (poutine.scale(model, scale=0.5), "got the model"),
        (make_regressor(), r"a program with the observations \['obs'\]"),
        (None, "but got None"),
        (3, "but got 3"),
    ]:
        with pytest.raises(TypeError, match=message):
            ps.predict(model, posterior, x)
    with pytest.raises(ValueError, match=r"'net.2.weight' values of the model's shape \(1, 5\)"):
        ps.predict(model, ps.KTiedGuide(other), x)


@pytest.mark.filterwarnings("ignore::pyro_structvi.infer.DataScaleWarning")  # of the bias
def test_what_a_model_is_conditioned_on_wins():
    model, x = make_regressor(5), torch.randn(5, 3)
    value = torch.full((1,), 100.0)
    conditioned = poutine.condition(model, data={"net.2.bias": value})
    guide = ps.MeanFieldGuide(model)
    assert (ps.predict(conditioned, guide, x, num_samples=5).mean > 80).all()
    data = ps.to_inference_data(conditioned, guide, x, torch.zeros(5, 1), 5)
    assert (data.posterior_predictive["obs"].values > 80).all()
    fitted = ps.MeanFieldGuide(conditioned)
    ps.fit(conditioned, fitted, (x, x[:, :1]), num_steps=1, progress=False)
    assert (ps.predict(conditioned, fitted, x, num_samples=5).mean > 80).all()


SCHOOLS = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12], dtype=torch.float64)
ERRORS = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18], dtype=torch.float64)


def schools(errors, y=None):
    mean = pyro.sample("mean", dist.Normal(0.0, torch.tensor(5.0)))
    scale = pyro.sample("scale", dist.LogNormal(torch.tensor(2.5), torch.tensor(0.2)))
    with pyro.plate("schools", len(errors)):
        effect = pyro.sample("effect", dist.Normal(mean, scale))
        pyro.sample("obs", dist.Normal(effect, errors), obs=y)
    return effect


@pytest.fixture
def guide_of_schools():
    guide = ps.MeanFieldGuide(schools, init_scale=1e-6)
    guide.initialize(ERRORS, SCHOOLS)
    guide["effect"].loc.data = SCHOOLS.clone()
    return guide


def test_predictive_takes_local_posteriors_at_the_examples_trained_on_only(guide_of_schools):
    predictive = Predictive(schools, guide=guide_of_schools, num_samples=100)
    with pytest.warns(LocalLatentWarning, match=r"\['effect'\] of single examples take"):
        effects = predictive(ERRORS)["effect"]
    torch.testing.assert_close(effects, SCHOOLS.expand(100, 8), atol=1e-4, rtol=0)
    with pytest.warns(LocalLatentWarning, match=r"\['effect'\] of single examples are drawn"):
        effects = predictive(ERRORS[:5])["effect"]
    assert effects.shape == (100, 5)
    spread = effects.std() / guide_of_schools.median()["scale"]
    assert 0.8 < spread < 1.2  # 500 draws: a standard error of 3 %


@pytest.mark.parametrize("is_guide", [True, False])
def test_predict_takes_local_posteriors_of_as_many_examples(guide_of_schools, is_guide):
    draws = guide_of_schools.joint_posterior().draw_many(range(3), local=True)
    posterior = guide_of_schools if is_guide else draws
    with pytest.warns(LocalLatentWarning, match="take the values"):
        whole = ps.predict(schools, posterior, ERRORS, num_samples=3).functions
    torch.testing.assert_close(whole, SCHOOLS.expand(3, 8), atol=1e-4, rtol=0)
    # Batches of eight are not the eight examples, though they are as many.
    for x, batch_size in [(ERRORS.repeat(2), 8), (ERRORS[:5], None)]:
        with pytest.warns(LocalLatentWarning, match="drawn from the model"):
            functions = ps.predict(
                schools, posterior, x, num_samples=3, batch_size=batch_size
            ).functions
        assert functions.std(0).min() > 0.1
    with pytest.warns(LocalLatentWarning, match="take the values"):
        data = ps.to_inference_data(schools, posterior, ERRORS, SCHOOLS, 3)
    assert data.posterior["effect"].shape == (1, 3, 8)
    with pytest.warns(LocalLatentWarning, match="drawn from the model"):
        data = ps.to_inference_data(schools, posterior, ERRORS[:5], SCHOOLS[:5], 3)
    assert "effect" not in data.posterior


def groups(group, y=None):
    """Groups with a latent each, non-centred, seen through examples in another plate."""
    scale = pyro.sample("scale", dist.HalfNormal(torch.tensor(1.0)))
    with pyro.plate("groups", 3):
        shift = pyro.sample("shift", dist.Normal(torch.tensor(0.0), scale))
        pyro.deterministic("twice", 2 * shift)
    with pyro.plate("data", len(group)):
        pyro.sample("obs", dist.Normal(shift[group], 0.1), obs=y)
    return shift[group]


def reparametrized(group, y=None):
    return poutine.reparam(groups, {"shift": LocScaleReparam(0.0)})(group, y)


@pytest.mark.parametrize(
    ("model", "site"), [(groups, "shift"), (reparametrized, "shift_decentered")]
)
def test_only_data_make_the_latents_of_a_plate_local(model, site):
    group, truth = torch.arange(60) % 3, torch.tensor([3.0, -2.0, 0.5])
    guide = ps.MeanFieldGuide(model, init_scale=1e-6)
    guide.initialize(group, truth[group])
    guide[site].loc.data = truth / guide.median()["scale"] if model is reparametrized else truth
    assert guide.local_site_names == []
    assert {"scale", site} <= guide.median().keys() & guide.draw().keys()
    prediction = ps.predict(model, guide, torch.tensor([0, 1, 2, 2]), num_samples=50, site="obs")
    torch.testing.assert_close(prediction.mean, truth[[0, 1, 2, 2]], rtol=0, atol=1e-4)


def test_given_draws_fit_the_plates_and_sites_of_an_unmarked_model():
    def model(x):
        with pyro.plate("groups", 3):
            shift = pyro.sample("shift", dist.Normal(torch.tensor(0.0), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(shift.sum(), torch.ones(len(x))))

    with pytest.raises(ValueError, match=r"'shift' values of the model's shape \(3,\)"):
        ps.predict(model, {"shift": torch.zeros(2, 4)}, torch.zeros(6), site="obs")
    with pytest.raises(ValueError, match=r"not in the model: \['shifts'\]"):
        ps.predict(model, {"shifts": torch.zeros(2, 3)}, torch.zeros(6), site="obs")
