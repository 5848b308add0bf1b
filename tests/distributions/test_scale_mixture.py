"""ScaleMixtureNormal: its density, moments and draws, and its use as a prior."""

import math
import warnings

import pyro.poutine as poutine
import pytest
import torch
from torch import nn
from torch.distributions import MixtureSameFamily

import pyro_structvi as ps
from pyro_structvi.distributions import ScaleMixtureNormal
from pyro_structvi.infer import SampledKLWarning
from pyro_structvi.testing.noise import assert_mean
from tests.guide_cases import GUIDES, POINTS
from tests.models import make_regressor, regression_data

SPIKE_AND_SLAB = ScaleMixtureNormal(*torch.tensor([[1.0, 0.1], [0.25, 0.75]], dtype=torch.float64))


def oracle(q):
    components = torch.distributions.Normal(torch.zeros_like(q.scales), q.scales)
    return MixtureSameFamily(torch.distributions.Categorical(q.probs), components)


@pytest.mark.parametrize("shapes", [((2,), (2,)), ((4, 3, 2), (2,)), ((3, 2), (4, 1, 2))], ids=str)
def test_density_and_moments_are_those_of_a_mixture(shapes):
    scales, probs = (torch.rand(shape) + 0.3 for shape in shapes)
    q = ScaleMixtureNormal(scales, probs)
    assert (q.batch_shape, q.event_shape) == (oracle(q).batch_shape, ())
    torch.testing.assert_close(q.probs.sum(-1), torch.ones(q.batch_shape))
    value = torch.randn(5, *q.batch_shape)
    torch.testing.assert_close(q.log_prob(value), oracle(q).log_prob(value))
    torch.testing.assert_close(q.mean, oracle(q).mean)
    torch.testing.assert_close(q.stddev, oracle(q).stddev)
    wide = q.expand((6, *q.batch_shape))
    assert wide.sample().shape == wide.variance.shape == (6, *q.batch_shape)
    assert wide.scales.shape == wide.probs.shape == (6, *q.batch_shape, 2)
    numbers = torch.randn(wide.batch_shape)
    torch.testing.assert_close(wide.log_prob(numbers), q.log_prob(numbers))

    def log_prob(value, scales, probs):
        return ScaleMixtureNormal(scales, probs, validate_args=False).log_prob(value)

    leaves = [tensor.requires_grad_() for tensor in (value[0], scales, probs)]
    assert torch.autograd.gradcheck(log_prob, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scales", [(1.0, 0.1), (0.1, 0.1), (0.1, math.exp(-8.0))], ids=str)
def test_the_density_and_its_gradient_stay_finite(scales, dtype):
    q = ScaleMixtureNormal(torch.tensor(scales, dtype=dtype), torch.ones(2, dtype=dtype))
    value = torch.tensor([0.0, 1e-20, 1e-3, 1.0, -30.0, 1e6], dtype=dtype, requires_grad=True)
    density = q.log_prob(value)
    (gradient,) = torch.autograd.grad(density.sum(), value)
    assert torch.isfinite(density).all()
    assert torch.isfinite(gradient).all()
    far = -value.detach() / max(scales) ** 2  # where the wider normal is all there is
    torch.testing.assert_close(gradient[3:], far[3:])


@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 1e20), (torch.float64, 1e200)])
def test_a_density_that_rounds_to_zero_has_the_logarithm_of_zero(dtype, far):
    q = ScaleMixtureNormal(torch.tensor([1.0, 0.1], dtype=dtype), torch.ones(2, dtype=dtype))
    value = torch.tensor([far, 1.0, -far], dtype=dtype)
    torch.testing.assert_close(q.log_prob(value), oracle(q).log_prob(value))
    assert q.log_prob(value)[0] == -math.inf


def test_draws_have_the_moments_of_their_elements():
    q = ScaleMixtureNormal(torch.rand(3, 2) + 0.1, torch.rand(3, 2) + 0.1)
    draws = q.sample((20_000,))
    assert draws.shape == (20_000, 3)
    assert_mean(draws, q.mean)
    assert_mean(draws.square(), q.variance)
    # The fourth moment tells a mixture from a normal.
    assert_mean(draws.pow(4), (3 * q.probs * q.scales.pow(4)).sum(-1))


@pytest.mark.parametrize(
    ("scales", "probs", "message"),
    [
        (torch.ones(2), torch.ones(3), r"must have shape \(\*batch, K\) .* \(2,\) and \(3,\)"),
        (torch.tensor(1.0), torch.tensor(1.0), r"must have shape \(\*batch, K\)"),
        (torch.tensor([1.0, 0.0]), torch.ones(2), "`scales` must be positive"),
        (torch.ones(2), torch.tensor([1.0, 0.0]), "`probs` must be positive"),
        (torch.ones(2), torch.ones(2).half(), "`probs` must have the dtype of `scales`"),
    ],
)
def test_arguments_that_do_not_fit(scales, probs, message):
    with pytest.raises(ValueError, match=message):
        ScaleMixtureNormal(scales, probs)


def test_it_moves_and_converts_with_the_net():
    bayes_net = ps.bayesianize(nn.Linear(2, 3).float(), prior=SPIKE_AND_SLAB)  # in = K
    for dtype in (torch.float32, torch.float64):
        drawn = poutine.block(bayes_net.to(dtype))(torch.zeros(1, 2, dtype=dtype))
        assert drawn.dtype == dtype
    names = [name for name, _ in bayes_net.named_buffers()]
    assert names[:2] == ["weight_prior_scales", "weight_prior_probs"]
    for_each_row = ScaleMixtureNormal(torch.rand(3, 1, 2) + 0.1, torch.ones(2))
    ps.bayesianize(nn.Linear(2, 3, bias=False), prior=for_each_row)
    with pytest.raises(ValueError, match=r"scales` must broadcast to that of 'weight' = \(3, 5\)"):
        ps.bayesianize(nn.Linear(5, 3, bias=False), prior=ScaleMixtureNormal(*torch.ones(2, 2, 4)))


@pytest.mark.parametrize("guide_name", ["k-tied", "inducing weights", "points"])
def test_every_guide_samples_the_kl_and_says_so_once(guide_name):
    """Known values have any density."""
    model, elbo, data = make_regressor(prior=SPIKE_AND_SLAB), ps.StructuredELBO(), regression_data()
    guide = (GUIDES | POINTS)[guide_name](model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [elbo.loss_and_grads(model, guide, *data) for _ in range(2)]
    assert all(map(math.isfinite, found))
    assert all(torch.isfinite(p.grad).all() for p in guide.parameters() if p.grad is not None)
    said = [warning.category for warning in caught]
    assert said == ([] if guide_name == "points" else [SampledKLWarning])


def test_a_number_has_a_density_for_each_element():
    q = ScaleMixtureNormal(torch.tensor([1.0, 0.1]), torch.tensor([0.5, 0.5])).expand((6,))
    torch.testing.assert_close(q.log_prob(torch.tensor(0.2)), q.log_prob(torch.full((6,), 0.2)))
