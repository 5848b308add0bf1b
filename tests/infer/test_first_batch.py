"""What a fit says before its first step: of data, of slow posteriors, of wrong arguments."""

from collections import UserDict
from contextlib import nullcontext

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide.initialization import init_to_median
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_structvi as ps
from pyro_structvi.infer.data_warnings import (
    DataScaleWarning,
    NumDataWarning,
    SlowFamilyWarning,
    warn_of_first_batch,
)
from tests.models import linear_function


def net_of(inputs=3, outputs=1):
    return ps.bayesianize(nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)))


def regressor(**noise):
    return ps.Regressor(net_of(), **(noise or {"noise_scale": 0.1}))


def fit(model, x, y, guide=None, **options):
    guide = guide or ps.MeanFieldGuide(model)
    return ps.fit(model, guide, (x, y), progress=False, **({"num_steps": 2} | options))


@pytest.mark.parametrize("noise", [{"noise_scale": 0.1}, {"noise": "learned"}])
def test_observations_far_outside_of_the_prior_predictive(noise):
    x = torch.randn(20, 3)
    with pytest.warns(DataScaleWarning, match=r"observations 'obs' are \d+ .* Standardize them"):
        fit(regressor(**noise), x, 5000 + 1000 * x[:, :1])
    fit(regressor(**noise), x, 3 + 2 * x[:, :1])  # warnings are errors


def test_inputs_of_a_large_scale():
    x = 1e4 * torch.randn(20, 3)
    with pytest.warns(
        DataScaleWarning, match=r"root mean square of 1.\d*e\+04; .* Standardize them"
    ):
        fit(regressor(), x, torch.randn(20, 1))
    normalized = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    model = ps.Regressor(ps.bayesianize(normalized, normalization=False), noise_scale=0.1)
    fit(model, x, torch.randn(20, 1))


@pytest.mark.parametrize("make", [ps.MeanFieldGuide, ps.GlobalInducingGuide, ps.EnsembleGuide])
def test_starts_far_outside_of_the_prior(make):
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    for layer in net[::2]:
        nn.init.constant_(layer.weight, 0.1)
        nn.init.zeros_(layer.bias)
    prior = {"0.weight": 0.1 / 40, "2.weight": 0.1 / 20, "*": 1.0}
    model = ps.Regressor(ps.bayesianize(net, prior), noise_scale=0.1)
    message = r"of \['net.0.weight'\] start far .* at 40 standard deviations. .*`init_loc_fn="
    with pytest.warns(UserWarning, match=message):
        fit(model, x, y, make(model))
    fit(model, x, y, make(model, init_loc_fn=init_to_median))  # warnings are errors


def test_a_start_in_a_plate_of_examples_is_compared_only_as_a_whole():
    def local(x, y=None):
        with pyro.plate("data", 20, subsample=torch.arange(len(x))):
            z = pyro.sample("z", dist.Normal(0.0, 1e-3))
            return pyro.sample("obs", dist.Normal(z + x, 1.0), obs=y)

    x, start = torch.randn(20), lambda site: torch.ones(20)
    guide = ps.MeanFieldGuide(local, init_loc_fn=start)
    with pytest.warns(UserWarning, match=r"of \['z'\] start far .* at 1e\+03 standard deviations"):
        fit(local, x, x, guide)


def test_counts_and_classes_have_no_scale_and_nothing_is_left_of_the_draws():
    x, model = torch.randn(20, 3), ps.Classifier(net_of(outputs=3), num_data=20)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    warn_of_first_batch((model, None), (x, torch.zeros(20).long()), {}, 1, 20)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)


def test_errors_of_the_models_code_are_not_hidden():
    class Wrong(ps.Regressor):
        def forward(self, x, y=None):
            return super().forward(x, y).missing

    model = Wrong(net_of(), num_data=5, noise_scale=0.1)
    with pytest.raises(AttributeError, match="missing"):
        warn_of_first_batch((model, None), (torch.randn(5, 3), torch.randn(5, 1)), {}, 1, 5)


def test_a_family_whose_step_takes_hundreds_of_times_its_layers():
    model = ps.Regressor(ps.bayesianize(nn.Linear(2800, 1, bias=False), ps.FanIn()), 2, 1.0)
    x, y = torch.randn(2, 2800), torch.randn(2, 1)
    with pytest.warns(
        SlowFamilyWarning, match=r"2e\+10 products for the MatrixNormalFamily of 'net.weight'"
    ):
        warn_of_first_batch((model, ps.MatrixNormalGuide(model)), (x, y), {}, 1, 2)
    warn_of_first_batch((model, ps.KTiedGuide(model)), (x, y), {}, 1, 2)  # warnings are errors


@pytest.mark.parametrize("y", [1.0, np.ones(3)])
def test_an_observation_that_is_no_tensor_is_refused(y):
    def model(x):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("obs", dist.Normal(z + x, 1.0), obs=y)

    with pytest.raises(
        TypeError, match=r"observation of 'obs' must be a tensor, but got .*`obs=to"
    ):
        ps.fit(model, ps.MeanFieldGuide(model), torch.zeros(3), num_steps=1, progress=False)


# ---- arguments -----------------------------------------------------------------------------------


def test_a_net_or_another_model_in_the_place_of_the_model():
    net, x, y = net_of(), torch.randn(5, 3), torch.randn(5, 1)
    with pytest.raises(
        TypeError, match=r"take the 2 arguments .* wrap it, as in `Regressor\(net\)`"
    ):
        fit(net, x, y)
    guide = ps.MeanFieldGuide(ps.Regressor(net, noise_scale=0.1))
    message = r"`guide` must be made of `model`, a torch.nn.PyroSequential, but"
    with pytest.raises(ValueError, match=message):
        fit(net, x, y, guide)
    message = r"made of another module, a Regressor. Write `fit\(guide.model, guide, data\)`"
    with pytest.raises(ValueError, match=message):
        fit(regressor(), x, y, guide)


class Encoding(UserDict):
    """A mapping that is no dict, as a ``BatchEncoding``."""


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, input_ids, attention_mask=None):
        return self.head(self.embedding(input_ids).mean(1))


def test_mappings_of_inputs_and_labels():
    words, y = torch.randint(5, (6, 3)), torch.randint(2, (6,))
    inputs = Encoding(input_ids=words, attention_mask=torch.ones(6, 3))

    def train(data):
        model = ps.Classifier(ps.bayesianize(Words()), 6)
        return ps.fit(model, ps.MeanFieldGuide(model), data, num_steps=2, progress=False)

    train((inputs, y))
    train([Encoding(x=inputs, y=y)])
    with pytest.raises(TypeError, match=r"an Encoding.*a mapping of inputs goes into the tuple"):
        train(inputs)
    with pytest.raises(TypeError, match=r"argument: 'x'. Give .* or `\{'x': inputs, 'y': y\}`"):
        train([Encoding(input_ids=words, labels=y)])
    with pytest.raises(ValueError, match=r"`data` must hold what the model observes.*`collate_fn`"):
        train((inputs,))


def test_a_report_without_inputs():
    guide = ps.MeanFieldGuide(regressor())
    for _ in range(2):
        with pytest.raises(TypeError, match=r"a Regressor says: missing a required argument: 'x'"):
            guide.report()
        guide.initialize(torch.randn(5, 3))


def test_labels_out_of_range():
    binary = torch.tensor([[0.0], [2.0], [1.0], [3.0]])
    for model, y, words in (
        (ps.Classifier(net_of(outputs=3)), torch.tensor([0, 3, -1, 2]), "upper_bound=2"),
        (ps.BinaryClassifier(net_of()), binary, "Boolean"),
    ):
        message = rf"{words}.* 2 of 4 observations are not. Mend"
        with pytest.raises(ValueError, match=message) as error:
            fit(model, torch.randn(4, 3), y)
        assert "tensor(" not in str(error.value)


def test_a_rate_that_is_too_large_is_named():
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    model = regressor()
    with pytest.raises(ValueError, match=r"At step \d: The net's output.* smaller `lr`") as error:
        fit(model, x, y, ps.KTiedGuide(model), lr=1000.0, num_steps=20)
    assert "Trace Shapes" not in str(error.value)


def test_representations_are_short():
    model, x = regressor(), torch.randn(50, 3)
    guide = ps.MeanFieldGuide(model)
    history = fit(model, x, torch.randn(50, 1), guide, num_steps=30)
    assert repr(history) == f"History(30 steps, elbo={history.elbo[-1]:.6g})"
    assert repr(ps.infer.History()) == "History(0 steps)"
    text = repr(ps.predict(model, guide, x, num_samples=20))
    assert text.startswith(
        "Prediction(mean: (50, 1), variance: (50, 1), function_variance: (50, 1)"
    )
    assert text.endswith("functions: (20, 50, 1); 20 draws)")


# ---- numbers of examples, frozen parts -----------------------------------------------------------


def scaled_function(x, y=None):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
    with pyro.plate("data", 12, subsample=x):
        mean = nn.functional.linear(x, weight)
        pyro.sample("obs", dist.Normal(mean, 0.5).to_event(1), obs=y)


DATA = torch.ones(12, 3, dtype=torch.float64), torch.ones(12, 2, dtype=torch.float64)
FORMS = {
    "tensors": (DATA, {"batch_size": 4}),
    "loader": (DataLoader(TensorDataset(*DATA), 4), {}),
    "batches": ([tuple(part[:4] for part in DATA)] * 3, {}),
}


@pytest.mark.parametrize(("data", "options"), FORMS.values(), ids=FORMS)
def test_a_model_that_counts_a_batch_for_all_is_named(data, options):
    guide = ps.MeanFieldGuide(linear_function)
    with pytest.warns(NumDataWarning, match=r"\['obs'\] count a mini-batch.*has 3 mini-batches"):
        ps.fit(linear_function, guide, data, num_steps=1, progress=False, **options)


@pytest.mark.parametrize(
    ("model", "data", "options"),
    [(linear_function, DATA, {}), *((scaled_function, *form) for form in FORMS.values())],
    ids=["all at once", *FORMS],
)
def test_a_plate_that_knows_all_examples_is_fine(model, data, options):
    ps.fit(model, ps.MeanFieldGuide(model), data, num_steps=1, progress=False, **options)


def constraint(x):
    pyro.factor("further", torch.tensor(-1.0))


def measured_constraint(x):
    pyro.sample("further", dist.Normal(torch.zeros(2), 1.0).to_event(1), obs=torch.ones(2))


def in_no_plate(x):
    pyro.sample("further", dist.Normal(0.0, 1.0).expand([len(x)]).to_event(1), obs=x[:, 0])


def in_a_plate_of_the_batch(x):
    with pyro.plate("batch", len(x)):
        pyro.sample("further", dist.Normal(0.0, 1.0), obs=x[:, 0])


@pytest.mark.parametrize(
    ("further", "is_named"),
    [
        (constraint, False),
        (measured_constraint, False),
        (in_no_plate, True),
        (in_a_plate_of_the_batch, True),
    ],
)
def test_beside_scaled_observations_those_of_the_weights_need_no_scale(further, is_named):
    def model(x, y=None):
        further(x)
        scaled_function(x, y)

    match = r"observed sites \['further'\] count a mini-batch"
    with pytest.warns(NumDataWarning, match=match) if is_named else nullcontext():
        fit(model, *DATA, batch_size=4)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        parts = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.backbone = nn.Sequential(*parts).requires_grad_(False)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))
        self.modes = []

    def forward(self, x):
        self.modes.append([part.training for part in (*self.backbone, *self.head)])
        return self.head(self.backbone(x))


@pytest.mark.parametrize(("in_evaluation", "whole"), [(True, True), (True, False), (False, False)])
def test_a_frozen_part_in_evaluation_mode_stays_so(in_evaluation, whole):
    net = Backbone()
    bayes_net = ps.bayesianize(net, normalization=False)
    model = ps.Regressor(bayes_net, 12, 0.5)
    if in_evaluation:
        (model if whole else bayes_net.backbone).eval()
    before = bayes_net.backbone[1].running_mean.clone()
    modes = [part.training for part in model.modules()]
    ps.fit(model, ps.MeanFieldGuide(model), DATA, num_steps=2, progress=False)
    frozen = not in_evaluation
    assert bayes_net.modes[-1] == [frozen, frozen, frozen, True, True]
    assert torch.equal(bayes_net.backbone[1].running_mean, before) == in_evaluation
    assert [part.training for part in model.modules()] == modes
