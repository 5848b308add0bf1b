"""Clipping, states and results of steps in the units of prior and posterior."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

import pyro_structvi as ps
from pyro_structvi.families import FullCovariance
from pyro_structvi.infer import CosineDecay
from pyro_structvi.infer.structured_adam import _excess, _excess_on_cpu
from pyro_structvi.sites.parameterization import factor_parameters
from tests.guide_cases import GUIDES
from tests.infer.structured_steps import gradients, make, posteriors, snapshot
from tests.models import regression_data

# ---- clipping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_guide", [ps.MeanFieldGuide, ps.RowwiseGuide])
def test_gradients_far_above_their_usual_norm_are_divided_by_the_excess(make_guide):
    """Against the same steps without clipping, of gradients that were divided by hand."""
    factors, clip, usual, ones = [1.0, 1.5, 1.0, 1e4, 2.0, 300.0, 1.0], 2.0, 0.0, 0.0
    own, other = make(make_guide), make(make_guide)
    other[0].load_state_dict(own[0].state_dict())
    other[1].load_state_dict(own[1].state_dict())
    clipping, plain = (
        ps.StructuredAdam(guide.parameters(), guide, clip=bound)
        for (_, guide), bound in ((own, clip), (other, None))
    )
    divided = []
    for number, factor in enumerate(factors):
        for model, guide in (own, other):
            gradients(guide, model, number)
            for value in guide.parameters():
                value.grad *= factor
        square = sum(float(value.grad.square().sum()) for value in own[1].parameters())
        limit = clip**2 * usual / ones if ones else math.inf
        divided.append(max(1.0, math.sqrt(square / limit)))
        usual, ones = 0.99 * usual + 0.01 * min(square, limit), 0.99 * ones + 0.01
        for value in other[1].parameters():
            value.grad /= torch.tensor(divided[-1]).float()  # as a scale of gradients is
        clipping.step()
        plain.step()
        for name, value in snapshot(own[1]).items():
            torch.testing.assert_close(value, snapshot(other[1])[name], rtol=1e-9, atol=1e-12)
    assert [each > 10 for each in divided] == [factor > 10 for factor in factors]


def test_a_first_gradient_of_zero_does_not_clip_the_others_to_it():
    model, guide = make(ps.MeanFieldGuide)
    optimizer = ps.StructuredAdam(guide.parameters(), guide)
    for number, factor in enumerate((0.0, 1.0)):
        gradients(guide, model, number)
        for value in guide.parameters():
            value.grad *= factor
        before = snapshot(guide)
        optimizer.step()
        moved = [not torch.equal(value, before[name]) for name, value in snapshot(guide).items()]
        assert all(moved) == any(moved) == bool(factor)


@pytest.mark.parametrize("square", [0.0, 0.5, 80.0, math.inf])
@pytest.mark.parametrize("before", [(0.0, 0.0), (0.2, 0.1), (1e-9, 0.5)])
def test_the_limit_of_the_norm_is_one_on_every_device(square, before):
    """On a CPU it is computed by Python's numbers."""
    arguments = torch.tensor(square), torch.tensor(before), 3.0
    (excess, usual), (on_cpu, usual_on_cpu) = _excess(*arguments), _excess_on_cpu(*arguments)
    torch.testing.assert_close(torch.tensor(1.0).float() if on_cpu is None else on_cpu, excess)
    torch.testing.assert_close(usual_on_cpu, usual)


def test_a_step_that_is_skipped_leaves_the_usual_norm():
    model, guide = make(ps.MeanFieldGuide)
    optimizer = ps.StructuredAdam(guide.parameters(), guide)
    gradients(guide, model, 0)
    optimizer.step()
    [norm] = [state["norm"] for state in optimizer.state.values() if "norm" in state]
    before = norm.clone()
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()).float(), None
    optimizer.step()
    assert torch.equal(norm, before)
    optimizer.found_inf = torch.zeros(()).float()
    optimizer.step()
    assert not torch.equal(norm, before)


# ---- as an optimizer of torch --------------------------------------------------------------------


def test_a_state_dict_goes_on():
    model, guide = make(GUIDES["rowwise, joined"])
    optimizer = ps.StructuredAdam(guide.parameters(), guide)
    for number in range(3):
        gradients(guide, model, number)
        optimizer.step()
    kept, state = snapshot(guide), optimizer.state_dict()
    state = {
        "state": {k: {n: v.clone() for n, v in each.items()} for k, each in state["state"].items()},
        "param_groups": state["param_groups"],
    }
    gradients(guide, model, 9)
    optimizer.step()
    expected = snapshot(guide)
    with torch.no_grad():
        for name, value in guide.named_parameters():
            value.copy_(kept[name])
    other = ps.StructuredAdam(guide.parameters(), guide, lr=0.5)
    other.load_state_dict(state)
    gradients(guide, model, 9)
    other.step()
    assert all(torch.equal(value, expected[name]) for name, value in snapshot(guide).items())


def test_parameters_without_a_gradient_stay():
    model, guide = make(GUIDES["rowwise, joined"])
    gradients(guide, model, 0)
    first = posteriors(guide)[0]
    first.loc.grad = None
    before = snapshot(first)
    ps.StructuredAdam(guide.parameters(), guide).step()
    assert torch.equal(first.loc, before["loc"])
    assert not torch.equal(first.lower, before["lower"])


def test_a_closure_is_called_with_gradients():
    model, guide = make(ps.MeanFieldGuide)
    optimizer = ps.StructuredAdam(guide.parameters(), guide)

    def closure():
        gradients(guide, model, 0)
        return 3.0

    before = snapshot(guide)
    assert optimizer.step(closure) == 3.0
    assert not torch.equal(posteriors(guide)[0].loc, before["posteriors.net/0/weight.loc"])


def test_groups_of_parameters_are_refused():
    _, guide = make(ps.MeanFieldGuide)
    with pytest.raises(TypeError, match="`parameters` must be"):
        ps.StructuredAdam([{"params": [*guide.parameters()]}], guide)


# ---- where it goes -------------------------------------------------------------------------------


def test_it_finds_the_posterior_of_a_conjugate_model():
    """In closed form; with ten seeds the divergence was 0.0061 nats at most."""
    x = torch.randn(40, 3) @ torch.tensor([[1.0, 0.9, 0.0], [0.0, 0.4, 0.0], [0.0, 0.0, 3.0]])
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.5 * torch.randn(40)

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(x @ w, 0.5).to_event(1), obs=y)

    guide = ps.StructuredGuide(model, {"w": FullCovariance()})
    guide.initialize()
    optimizer = ps.StructuredAdam(guide.parameters(), guide, lr=0.1)
    steps, objective = 300, ps.StructuredELBO(num_particles=32, vectorize_particles=True)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, CosineDecay(steps))
    for _ in range(steps):
        optimizer.zero_grad()
        objective.differentiable_loss(model, guide).backward()
        optimizer.step()
        decay.step()
    covariance = torch.linalg.inv(torch.eye(3) + x.T @ x / 0.25)
    expected = MultivariateNormal(covariance @ x.T @ y / 0.25, covariance)
    q = guide["w"]()
    found = MultivariateNormal(q.mean, q.covariance_matrix)
    assert torch.distributions.kl_divergence(found, expected) < 0.01


def test_fit_takes_it_with_a_rate_that_falls_to_zero():
    def fit(**options):
        pyro.set_rng_seed(0)
        model, guide = make(ps.RowwiseGuide)
        history = ps.fit(
            model, guide, regression_data(), num_steps=5, progress=False, compiled=False, **options
        )
        return history, snapshot(guide)

    history, found = fit()
    assert history.lr == pytest.approx([0.1 * CosineDecay(5)(step) for step in range(5)])

    def made(parameters, lr):
        return ps.StructuredAdam(parameters, made.guide, lr=lr)

    pyro.set_rng_seed(0)
    model, made.guide = make(ps.RowwiseGuide)
    ps.fit(
        model,
        made.guide,
        regression_data(),
        num_steps=5,
        lr=0.1,
        optimizer=made,
        compiled=False,
        progress=False,
    )
    assert all(torch.equal(value, found[name]) for name, value in snapshot(made.guide).items())


def test_a_longer_run_goes_on_with_its_own_cosine(tmp_path):
    def fit(num_steps, **options):
        model, guide = make(ps.MeanFieldGuide)
        checkpoint = ps.Checkpoint(tmp_path / "run.pt", resume=True)
        options |= {"num_steps": num_steps, "checkpoint": checkpoint, "progress": False}
        return ps.fit(model, guide, regression_data(), **options).lr

    fit(4)
    rates = [CosineDecay(4)(step) for step in range(4)] + [CosineDecay(6)(4), CosineDecay(6)(5)]
    assert fit(6) == pytest.approx([0.1 * rate for rate in rates])
    with pytest.raises(ValueError, match=r"at step 0 is 0.2 here, and 0.1 in"):
        fit(6, lr=0.2)
    with pytest.raises(ValueError, match=r"`lr` is 'a function' here, and 'a number or None' in"):
        fit(6, lr=CosineDecay(6, 0.1))


def test_without_a_rate_an_optimizer_has_its_own():
    model, guide = make(ps.MeanFieldGuide)
    options = {"optimizer": torch.optim.Adam, "kl_weight": 1.0, "progress": False}
    assert ps.fit(model, guide, regression_data(), num_steps=1, **options).lr == [1e-3]


@pytest.mark.parametrize("make_guide", [ps.MeanFieldGuide, ps.RowwiseGuide])
def test_scaled_gradients_are_divided_by_their_scale(make_guide):
    """As mixed precision scales them, by another factor in each step."""

    def train(scales):
        torch.manual_seed(0)
        model, guide = make(make_guide)
        optimizer = ps.StructuredAdam(guide.parameters(), guide)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scales is not None)
        for number in range(3):
            torch.manual_seed(number)
            optimizer.zero_grad()
            loss = ps.StructuredELBO().differentiable_loss(model, guide, *regression_data())
            scaler.scale(1e3 * loss if number == 2 else loss).backward()  # which is clipped
            scaler.step(optimizer)
            scaler.update(None if scales is None else scales[number])
        return snapshot(guide)

    torch.testing.assert_close(train([64.0, 8192.0, 1.0]), train(None), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [ps.FullCovarianceGuide, ps.RowwiseGuide])
def test_one_full_natural_step_solves_a_conjugate_model(kind):
    """A (A' g) by the posterior's own noise is the natural gradient: it leads to the mean at once."""
    torch.manual_seed(0)
    x, y, noise = torch.randn(12, 3), torch.randn(12, 1), 0.4
    model = ps.Regressor(ps.bayesianize(nn.Linear(3, 1), prior=1.5), 12, noise)
    guide = kind(model, join_bias=True)
    guide.initialize(x, y)
    design = torch.cat([x, torch.ones(12, 1)], 1)
    precision = design.T @ design / noise**2 + torch.eye(4) / 1.5**2
    exact = torch.linalg.solve(precision, design.T @ y / noise**2)
    [posterior] = [each for each in posteriors(guide) if each.site.bias is not None]
    factor = torch.linalg.cholesky(torch.linalg.inv(precision))
    log_diagonal, lower = factor_parameters(factor)
    with torch.no_grad():
        posterior.loc.copy_(torch.randn(1, 4))
        posterior.log_diagonal.copy_(log_diagonal.reshape(posterior.log_diagonal.shape))
        posterior.lower.copy_(lower.reshape(posterior.lower.shape))
    q = posterior()
    # The gradient of the expected loss is that at the mean: the loss is quadratic in the weights.
    expected = (design @ q.mean.mT - y).square().sum() / (
        2 * noise**2
    ) + q.mean.square().sum() / 4.5
    (gradient,) = torch.autograd.grad(expected, posterior.loc)
    e = torch.zeros(q.noise_shape, requires_grad=True)
    (own,) = torch.autograd.grad(q.scale_noise(e), e, gradient)
    with torch.no_grad():
        solved = posterior.loc - q.scale_noise(own)
    torch.testing.assert_close(solved.mT, exact, rtol=1e-10, atol=1e-10)
