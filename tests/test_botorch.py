"""Posteriors as models of BoTorch."""

import copy

import pytest
import torch
from torch import nn

import pyro_structvi as ps

pytest.importorskip("botorch")
from botorch.acquisition import PosteriorMean, qSimpleRegret
from botorch.acquisition.logei import qLogExpectedImprovement
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.models.transforms.input import InputPerturbation
from botorch.optim import optimize_acqf
from botorch.sampling.index_sampler import IndexSampler

from pyro_structvi.botorch import StructuredModel


def data(size=12, outcomes=1):
    torch.manual_seed(0)
    x = torch.rand(size, 2)
    return x, torch.stack([(3 * x).sin().sum(-1) + k for k in range(outcomes)], -1)


def make_regressor(x, y, **options):
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, y.shape[-1]))
    net = ps.bayesianize(net, prior=ps.FanIn(2.0))
    return ps.Regressor(net, noise="learned", **({"standardize": (x, y)} | options))


def make(make_guide=ps.MatrixNormalGuide, outcomes=1, **options):
    x, y = data(outcomes=outcomes)
    regressor = make_regressor(x, y)
    guide = make_guide(regressor)
    ps.fit(regressor, guide, (x, y), num_steps=20, progress=False, compiled=False)
    return StructuredModel(regressor, guide, (x, y), **({"num_draws": 6} | options))


def linear_model(num_draws=50):
    x, y = data()
    regressor = ps.Regressor(ps.bayesianize(nn.Linear(2, 1), prior=1.0), noise_scale=0.1)
    return StructuredModel(
        regressor, ps.MatrixNormalGuide(regressor, init_scale=0.5), (x, y), num_draws
    )


def by_hand(model, x):
    """Return the functions ``(S, *batch, q, 1)`` of a linear model."""
    weight, bias = model.draws["net.weight"], model.draws["net.bias"]
    shape = [len(bias)] + [1] * x.dim()
    return (x @ weight.mT.reshape(len(bias), *[1] * (x.dim() - 2), 2, 1)) + bias.reshape(shape)


@pytest.mark.parametrize("shape", [(3, 2), (4, 3, 2), (2, 4, 3, 2)])
def test_the_posterior_is_that_of_the_draws_and_differentiable(shape):
    model, x = linear_model(), torch.rand(shape).requires_grad_(True)
    posterior, functions = model.posterior(x), by_hand(model, x)
    torch.testing.assert_close(posterior.values, functions.movedim(0, -3), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(posterior.mean, functions.mean(0))
    torch.testing.assert_close(posterior.variance, functions.var(0))
    (gradient,) = torch.autograd.grad(posterior.values.select(-3, 1).sum(), x)
    expected = model.draws["net.weight"][1].expand(shape)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 2), (3, 0, 2), (0, 3, 2)])
def test_the_posterior_at_no_input_is_empty(shape):
    """As that of a Gaussian process."""
    (x, y), ours = data(), make(num_draws=3)
    gaussian = SingleTaskGP(x, (y - y.mean(0)) / y.std(0))
    found, expected = (model.posterior(torch.rand(shape)) for model in (ours, gaussian))
    assert found.mean.shape == expected.mean.shape
    assert found.variance.shape == expected.variance.shape
    size = torch.Size([5])
    assert found.rsample(size).shape == expected.rsample(size).shape
    assert ours.sample(0).posterior(torch.rand(shape)).mean.shape == expected.mean.shape


def test_acquisition_functions_are_means_over_the_functions():
    model, x, count = linear_model(), torch.rand(3, 2, 2), 20_000
    found = qSimpleRegret(model, IndexSampler(torch.Size([count]), seed=0))(x)
    largest = by_hand(model, x)[..., 0].max(-1).values  # (S, batch)
    # A difference of 5 standard errors has a probability of 6e-7.
    assert ((found - largest.mean(0)).abs() < 5 * largest.std(0) / count**0.5).all()


def test_functions_are_the_same_in_each_call_and_one_alone_is_a_model():
    model, x = make(outcomes=2), torch.rand(3, 4, 2)
    values = model.posterior(x).values
    assert values.shape == (3, 6, 4, 2)
    assert torch.equal(model.posterior(x).values, values)
    torch.testing.assert_close(model.posterior(x[1]).values, values[1], rtol=1e-10, atol=1e-12)
    functions = ps.predict(model.model, model.draws, x[1]).functions
    torch.testing.assert_close(values[1], functions, rtol=1e-10, atol=1e-12)
    for number in range(6):
        alone = model.sample(number).posterior(x).mean
        torch.testing.assert_close(alone, values[:, number], rtol=1e-10, atol=1e-12)
    assert model.num_outputs == model.sample().num_outputs == 2
    assert torch.equal(model.posterior(x, output_indices=[1]).values, values[..., 1:])


def test_an_ensemble_of_points_has_its_members_and_weights():
    guide = make(lambda regressor: ps.EnsembleGuide(regressor, size=3), num_draws=None).guide
    guide.weights.copy_(torch.tensor([0.8, 0.15, 0.05]))
    model = StructuredModel(guide.model, guide, data())
    x = torch.rand(4, 2)
    members = torch.stack([
        ps.predict(guide.model, member, x, num_samples=1).functions[0] for member in guide.members
    ])
    torch.testing.assert_close(model.posterior(x).values, members, rtol=1e-10, atol=1e-12)
    mean = torch.einsum("k,kno->no", guide.weights, members)
    torch.testing.assert_close(model.posterior(x).mean, mean, rtol=1e-10, atol=1e-12)
    other = model.condition_on_observations(x, mean.detach(), num_steps=1, compiled=False)
    assert torch.equal(other.ensemble_weights, guide.weights)
    assert make(num_draws=None).num_draws == 128


def test_given_draws_are_the_functions():
    model, x = make(), torch.rand(3, 2)
    given = StructuredModel(model.model, model.draws, model.data)
    assert torch.equal(given.posterior(x).values, model.posterior(x).values)
    some = StructuredModel(model.model, model.draws, model.data, num_draws=3)
    expected = model.posterior(x).values[[0, 2, 5]]  # evenly spaced
    torch.testing.assert_close(some.posterior(x).values, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="`num_draws` must be at most the 6 given draws"):
        StructuredModel(model.model, model.draws, model.data, num_draws=7)
    with pytest.raises(TypeError, match="A model of draws has no guide"):
        given.condition_on_observations(x, torch.rand(3, 1))


def test_candidates_are_found_by_gradients():
    model = make()
    improvement = qLogExpectedImprovement(model, best_f=model.data[1].max())
    options = {"num_restarts": 2, "raw_samples": 8, "options": {"maxiter": 5}}
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    candidates, _ = optimize_acqf(improvement, bounds, q=2, **options)
    assert candidates.shape == (2, 2)
    path = PosteriorMean(model.sample(0))
    candidate, value = optimize_acqf(path, bounds, q=1, **options)
    assert value >= path(torch.rand(8, 1, 2)).max()
    assert ((candidate >= 0) & (candidate <= 1)).all()


def test_transforms_are_applied_to_inputs_and_undone_for_outcomes():
    x, y = data(outcomes=2)
    x = 5 * x - 2
    normalize, standardize = Normalize(2), Standardize(2)
    scaled = normalize(x), standardize(y)[0]
    regressor = make_regressor(*scaled, standardize=None)
    guide = ps.MeanFieldGuide(regressor)
    plain = StructuredModel(regressor, guide, scaled, 4)
    model = StructuredModel(
        regressor, guide, (x, y), 4, input_transform=normalize, outcome_transform=standardize
    )
    model.draws = plain.draws
    new = 5 * torch.rand(3, 2) - 2
    before = normalize.bounds.clone()
    model.sample(0).posterior(20 * new)
    assert torch.equal(normalize.bounds, before)
    expected = plain.posterior(normalize(new)).values * y.std(0) + y.mean(0)
    torch.testing.assert_close(model.posterior(new).values, expected)
    torch.testing.assert_close(model.sample(1).posterior(new).mean, expected[1])
    other = model.condition_on_observations(20 * new, y[:3], num_steps=1, compiled=False)
    assert torch.equal(other.data[0], torch.cat([x, 20 * new]))
    assert torch.equal(normalize.bounds, before)
    assert other.input_transform is not normalize


def test_a_transform_of_predictions_alone_is_not_applied_to_the_data():
    """Conditioning took four perturbed copies of each input, whose number was not the outcomes'."""
    plain = make()
    perturbation = InputPerturbation(0.1 * torch.randn(4, 2)).eval()
    model = StructuredModel(plain.model, plain.guide, plain.data, input_transform=perturbation)
    new, options = (torch.rand(3, 2), torch.rand(3, 1)), {"num_steps": 2, "compiled": False}
    found = []
    for each in (model, plain):
        torch.manual_seed(0)
        found.append(each.condition_on_observations(*new, **options).guide.state_dict())
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert model.posterior(new[0]).mean.shape == (12, 1)


@pytest.mark.parametrize(
    "make_guide", [pytest.param(ps.MatrixNormalGuide, marks=pytest.mark.slow), ps.EnsembleGuide]
)
def test_a_model_moves_as_a_whole(make_guide):
    model, x = make(make_guide, num_draws=None), torch.rand(4, 3, 2)
    expected = model.posterior(x).mean
    single = model.float()
    torch.testing.assert_close(
        single.posterior(x.float()).mean.double(), expected, rtol=1e-4, atol=1e-4
    )
    new = torch.rand(2, 2).float(), torch.rand(2, 1).float()
    after = single.condition_on_observations(*new, num_steps=2)
    assert after.posterior(x.float()).mean.dtype == torch.float32


def test_conditioning_fits_a_copy_to_all_data():
    model = make()
    x, y = torch.rand(3, 2), torch.full((3, 1), 9.0)
    before = {name: value.clone() for name, value in model.guide.state_dict().items()}
    values = model.posterior(x).values
    other = model.condition_on_observations(x, y, num_steps=150, compiled=False)
    assert other.guide.model is other.model is not model.model
    assert (other.model.num_data, model.model.num_data) == (15, 12)
    assert torch.equal(other.data[1], torch.cat([model.data[1], y]))
    distances = [(each.posterior(x).mean - y).abs().mean() for each in (other, model)]
    assert distances[0] < 0.8 * distances[1]
    assert torch.equal(model.posterior(x).values, values)
    assert all(torch.equal(before[name], each) for name, each in model.guide.state_dict().items())
    assert other.num_draws == 6


def test_a_copy_is_conditioned():
    model = copy.deepcopy(make())
    other = model.condition_on_observations(torch.rand(3, 2), torch.ones(3, 1), num_steps=1)
    assert other.guide.model is other.model is not model.model


def test_an_interrupt_ends_conditioning():
    class Interrupted(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyboardInterrupt

    options = {"optimizer": Interrupted, "compiled": False}
    with pytest.raises(KeyboardInterrupt):
        make().condition_on_observations(torch.rand(3, 2), torch.rand(3, 1), **options)


def test_outputs_that_are_no_outcomes_are_refused():
    model, (x, y) = make(outcomes=2), data()
    net = ps.bayesianize(nn.Linear(2, 3), prior=1.0)
    classifier = ps.Classifier(net)
    of_classes = ps.MeanFieldGuide(classifier)
    for own, guide in ((model.model, model.guide), (classifier, of_classes)):
        wrong = StructuredModel(own, guide, (x, y), 4)
        for use in (wrong.posterior, wrong.sample(0).posterior):
            with pytest.raises(ValueError, match=r"`model` must return means of 1 outcomes"):
                use(x[:5])


def test_other_draws_and_data_are_refused():
    model, (x, y) = make(), data()
    for number in (-1, 6):
        with pytest.raises(ValueError, match="`number` must be from 0 to 5, that of a draw"):
            model.sample(number)
    for wrong, message in (
        ((x, y[:, 0]), r"`data` must hold inputs \(n, d\) and outcomes \(n, m\)"),
        ((x, y[1:]), r"`data\[1\]` must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            StructuredModel(model.model, model.guide, wrong)
    with pytest.raises(ValueError, match="`X` must have shape"):
        model.condition_on_observations(torch.rand(3, 4), torch.rand(3, 1))
    with pytest.raises(ValueError, match="`Y` must have shape"):
        model.condition_on_observations(torch.rand(3, 2), torch.rand(3, 2))
