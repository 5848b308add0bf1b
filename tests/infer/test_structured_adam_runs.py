"""Clipping, states and results of steps in the units of prior and posterior."""

import math

import pyro
import pytest
import torch

import pyro_structvi as ps
from pyro_structvi.infer import CosineDecay
from pyro_structvi.infer.structured_adam import _excess, _excess_on_cpu
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


def test_parameters_without_a_gradient_stay_and_a_closure_is_called_with_gradients():
    model, guide = make(GUIDES["rowwise, joined"])
    first = posteriors(guide)[0]

    def closure():
        gradients(guide, model, 0)
        first.loc.grad = None
        return 3.0

    before = snapshot(first)
    assert ps.StructuredAdam(guide.parameters(), guide).step(closure) == 3.0
    assert torch.equal(first.loc, before["loc"])
    assert not torch.equal(first.lower, before["lower"])


# ---- in a fit ------------------------------------------------------------------------------------


def test_fit_takes_it_with_a_rate_that_falls_to_zero():
    def fit(is_made):
        def optimizer(parameters, lr):
            return ps.StructuredAdam(parameters, guide, lr=lr)

        pyro.set_rng_seed(0)
        model, guide = make(ps.RowwiseGuide)
        options = {"num_steps": 5, "compiled": False, "progress": False}
        options |= {"lr": 0.1, "optimizer": optimizer} if is_made else {}
        return ps.fit(model, guide, regression_data(), **options).lr, snapshot(guide)

    rates, found = fit(is_made=False)
    assert rates == pytest.approx([0.1 * CosineDecay(5)(step) for step in range(5)])
    _, expected = fit(is_made=True)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


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
    model, guide = make(ps.MeanFieldGuide)
    options = {"optimizer": torch.optim.Adam, "kl_weight": 1.0, "progress": False}
    lr = ps.fit(model, guide, regression_data(), num_steps=1, **options).lr
    assert lr == [1e-3], "an optimizer's own"


def test_scaled_gradients_are_divided_by_their_scale():
    """As mixed precision scales them, by another factor in each step."""

    def train(scales):
        torch.manual_seed(0)
        model, guide = make(ps.RowwiseGuide)
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
