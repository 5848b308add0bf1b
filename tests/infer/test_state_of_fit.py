"""States that a fit takes and leaves: of optimizers, schedules, and data."""

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from tests.models import make_regressor, regression_data

OPTIONS = {"num_steps": 4, "progress": False}


def test_an_optimizer_of_the_user_has_its_rate_again():
    model = make_regressor()
    guide = ps.KTiedGuide(model, rank=1)
    made = torch.optim.Adam(guide.parameters(), lr=0.01)
    for _ in range(2):
        found = ps.fit(model, guide, regression_data(), optimizer=lambda _: made, **OPTIONS)
        assert found.lr[0] == 0.01
        assert made.param_groups[0]["lr"] == 0.01


def test_a_schedule_of_tensors_is_written_down_as_numbers():
    weight = torch.zeros(())
    model = make_regressor()
    found = ps.fit(
        model,
        ps.KTiedGuide(model, rank=1),
        regression_data(),
        kl_weight=lambda step: weight,
        **OPTIONS,
    )
    weight += 1.0
    assert found.kl_weight == [0.0] * 4


@pytest.mark.parametrize("name", ["lr", "kl_weight"])
def test_a_schedule_that_returns_nothing_is_named(name):
    model = make_regressor()
    guide = ps.KTiedGuide(model, rank=1)
    with pytest.raises(ValueError, match=f"`{name}` must return a finite number .* got None"):
        ps.fit(model, guide, regression_data(), **{name: lambda step: None}, **OPTIONS)


def test_a_guide_without_a_parameter_to_train_is_refused():
    model = make_regressor()
    guide = ps.KTiedGuide(model, rank=1).requires_grad_(False)
    with pytest.raises(ValueError, match="must have a parameter to train, but got none"):
        ps.fit(model, guide, regression_data(), **OPTIONS)


@pytest.mark.parametrize("batch_size", [None, 6])
def test_data_of_inference_mode_are_trained_on(batch_size):
    model = make_regressor()
    losses = []
    for is_inference in (False, True):
        torch.manual_seed(0)
        guide = ps.KTiedGuide(model, rank=1)
        with torch.inference_mode(is_inference):
            data = tuple(value.clone() for value in regression_data())
        torch.manual_seed(1)
        losses.append(ps.fit(model, guide, data, batch_size=batch_size, **OPTIONS).elbo)
    assert losses[0] == losses[1]


def test_sparse_gradients_are_those_of_a_dense_embedding():
    index, y = torch.randint(0, 5, (12,)), torch.randn(12, 1)
    weights = []
    for sparse in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(5, 4, sparse=sparse), ps.bayesianize(nn.Linear(4, 1)))
        model = ps.Regressor(net, noise_scale=0.1)
        ps.fit(model, ps.MeanFieldGuide(model), (index, y), **OPTIONS)
        weights.append(net[0].weight.detach())
    torch.testing.assert_close(*weights)


def test_validation_takes_inputs_in_a_mapping():
    class Keyed(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs["features"])

    model = ps.Regressor(ps.bayesianize(Keyed(3, 1)), noise_scale=0.1)
    data = {"features": torch.randn(12, 3)}, torch.randn(12, 1)
    validation = ps.Validation(data, every=2)
    found = ps.fit(model, ps.MeanFieldGuide(model), data, validation=validation, **OPTIONS)
    assert found.validation_steps == [0, 2, 4]
