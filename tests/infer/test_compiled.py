"""A compiled step is SVI's step: same losses, parameters and buffers for the same noise."""

import pyro
import pytest
import torch

import pyro_structvi as ps
from tests.infer.compiled_steps import (
    GUIDE_CASES,
    STEPS,
    assert_same,
    function_pair,
    image_model,
    make_k_tied,
    steps_of,
    still,
    subsampled,
    train,
)
from tests.models import HandWritten, make_classifier, make_regressor, regression_data

# Those whose steps differ most: joined biases, factors, masks.
FAST = {"k-tied, joined", "dropout"}
EACH_WAY = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in GUIDE_CASES
]


@pytest.mark.parametrize("name", EACH_WAY)
def test_losses_and_parameters_are_those_of_svi(name):
    def make():
        model = make_regressor()
        return model, GUIDE_CASES[name](model)

    losses = assert_same(make, regression_data())
    assert len(set(losses)) == STEPS


@pytest.mark.parametrize("local_reparam", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_buffers_and_point_estimates_are_updated(local_reparam):
    data = torch.randn(6, 1, 4, 4), torch.randint(3, (6,))
    assert_same(lambda: make_k_tied(image_model, local_reparam=local_reparam), data)


@pytest.mark.filterwarnings("ignore::pyro_structvi.infer.SampledKLWarning")
def test_modules_of_the_users_own_compile():
    assert_same(lambda: make_k_tied(HandWritten), (torch.randn(6, 3), torch.randn(6, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("vectorize", [False, True])
def test_particles_compile(vectorize):
    def loss():
        return ps.StructuredELBO(num_particles=3, vectorize_particles=vectorize)

    assert_same(make_k_tied, regression_data(), loss=loss)


def test_noise_is_fresh_at_each_step():
    losses = assert_same(make_k_tied, regression_data(), optim=still, steps=20)
    assert len(set(losses)) == 20


def test_functions_with_constrained_parameters_and_subsamples_compile():
    assert_same(function_pair, ())


def test_every_step_has_a_subsample_of_its_own():
    """Of 210 subsamples, 30 draws would hardly be fewer than 10."""
    losses = assert_same(subsampled, (), optim=still, steps=30)
    assert len(set(losses)) > 10


def test_other_shapes_arguments_and_modes_are_compiled_apart():
    x, y = regression_data()

    def data(number):
        size = 5 if number % 2 else 12
        return x[:size], y[:size]

    losses, *_ = train(make_k_tied, data, compiled=False)
    own, _, svi = train(make_k_tied, data, compiled=True)
    torch.testing.assert_close(own, losses, rtol=1e-10, atol=0)
    assert len(steps_of(svi)) == 2
    svi.model.eval()
    svi.step(x, y)
    assert len(steps_of(svi)) == 3
    next(svi.guide.parameters()).requires_grad_(False)
    svi.step(x, y)
    assert len(steps_of(svi)) == 4
    svi.step(x, y=y)
    assert len(steps_of(svi)) == 5


@pytest.mark.slow
def test_autocast_is_traced_and_not_applied_twice():
    def both(compiled):
        torch.set_default_dtype(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            losses, *_ = train(
                lambda: make_k_tied(make_classifier), (x.float(), y), compiled, optim=still
            )
        return losses

    x, y = torch.randn(12, 3), torch.randint(4, (12,))

    pyro.set_rng_seed(0)
    expected = both(compiled=False)
    pyro.set_rng_seed(0)
    assert both(compiled=True) == expected


def test_evaluate_loss_takes_no_step():
    x, y = regression_data()
    _, state, svi = train(make_k_tied, (x, y), compiled=True)
    step = svi.loss.step
    assert svi.evaluate_loss(x, y) > 0
    assert svi.loss.step == step
    torch.testing.assert_close(
        dict(svi.guide.state_dict()),
        {k[2:]: v for k, v in state.items() if k[2:] in svi.guide.state_dict()},
    )
