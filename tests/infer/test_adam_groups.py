"""Groups of parameters of ``StructuredAdam`` that are added, its saved states and its copies."""

import copy
import pickle

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from tests.infer.test_structured_adam import rates_of
from tests.models import make_regressor, regression_data


def test_a_saved_state_goes_on_where_starts_have_other_sizes():
    """A weight that had the larger steps is the smaller one when the state is loaded."""
    guide = ps.MAPGuide(make_regressor())
    weights = [nn.Parameter(torch.full((3, 2), size)) for size in (0.3, 0.1)]
    first = ps.StructuredAdam(weights, guide)
    take_step(first)
    weights[1].data.fill_(0.5)
    copies = copy.deepcopy(weights)
    second = ps.StructuredAdam(copies, guide)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    take_step(first)
    take_step(second)
    assert all(map(torch.equal, weights, copies))


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 2, (torch.float16, torch.float32)])
def test_a_saved_state_keeps_the_usual_norm_of_gradients_in_half_precision(dtypes):
    """Resumed steps and those of a copy are those of the uninterrupted run, to the last bit."""
    guide = ps.MAPGuide(make_regressor())
    weights = [nn.Parameter(torch.full((3, 2), 0.3, dtype=dtype)) for dtype in dtypes]
    first = ps.StructuredAdam(weights, guide)
    for _ in range(3):
        take_step(first)
    saved, copies = copy.deepcopy((first.state_dict(), weights))
    second = ps.StructuredAdam(copies, guide)
    second.load_state_dict(saved)
    third, others = copy.deepcopy((first, weights))
    for _ in range(3):
        for each in (first, second, third):
            take_step(each, 100.0)  # which is clipped by the norm
    assert all(map(torch.equal, weights, copies))
    assert all(map(torch.equal, weights, others))


def take_step(optimizer, scale=1.0):
    for number, group in enumerate(optimizer.param_groups):
        weight = group["params"][0]
        weight.grad = scale * (torch.arange(6.0).reshape(3, 2) + number).to(weight)
    optimizer.step()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda all: pickle.loads(pickle.dumps(all))])
@pytest.mark.parametrize("make_guide", [ps.RowwiseGuide, ps.InducingWeightGuide])
def test_a_copy_of_guide_and_optimizer_takes_the_steps_of_the_original(make_guide, copied):
    model, data = make_regressor(), regression_data()
    guide = make_guide(model)
    optimizer = ps.StructuredAdam(guide.parameters(), guide, warm_up=9)

    def train(guide, optimizer):
        torch.manual_seed(0)
        for _ in range(3):
            optimizer.zero_grad()
            ps.StructuredELBO().differentiable_loss(model, guide, *data).backward()
            optimizer.step()
        return [*guide.parameters()]

    train(guide, optimizer)
    other = copied((guide, optimizer))
    expected = [value.detach().clone() for value in train(guide, optimizer)]
    assert all(map(torch.equal, train(*other), expected))


def test_groups_that_are_added_have_their_units():
    guide = ps.RowwiseGuide(make_regressor())
    first, *others = guide.parameters()
    expected = rates_of(ps.StructuredAdam(guide.parameters(), guide, lr=0.5, warm_up=4))
    optimizer, point = (
        ps.StructuredAdam([first], guide, lr=0.5, warm_up=4),
        torch.full((3, 2), 0.25),
    )
    optimizer.add_param_group({"params": others})
    optimizer.add_param_group({"params": point, "lr": 2.0})
    assert rates_of(optimizer) == pytest.approx(expected | {point: 0.5})
    waiting = [group["params"] for group in optimizer.param_groups if group["warm_up"]]
    lower = {value for name, value in guide.named_parameters() if name.endswith("lower")}
    assert {value for own in waiting for value in own} == lower


def test_a_group_has_no_clipping_of_its_own():
    guide = ps.RowwiseGuide(make_regressor())
    first, second, *_ = guide.parameters()
    optimizer = ps.StructuredAdam([first], guide, clip=2.0)
    optimizer.add_param_group({"params": second, "clip": 2.0})
    with pytest.raises(ValueError, match=r"`clip` must be 2\.0, as of all parameters.* got None"):
        optimizer.add_param_group({"params": nn.Parameter(torch.ones(3)), "clip": None})
