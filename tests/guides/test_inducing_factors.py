"""InducingWeightGuide as an object: copies, factors that are kept and never stale, errors."""

import copy
import pickle

import pytest
import torch

import pyro_structvi as ps
from tests.guides.inducing_guides import (
    EVERY_KIND,
    KINDS,
    assert_same_draws,
    draw,
    make_guide,
    randomize,
)
from tests.models import make_regressor, regression_data

SOME_KINDS = pytest.mark.parametrize("kind", ["diagonal", "full, shared", "ensemble", "nested"])


def load_into_a_new_guide(guide, options):
    new = make_guide(guide.model, **options)
    new.load_state_dict(guide.state_dict())
    return new


DUPLICATES = {
    "state dict": load_into_a_new_guide,
    "deepcopy": lambda guide, options: copy.deepcopy(guide),
    "pickle": lambda guide, options: pickle.loads(pickle.dumps(guide)),
}


@SOME_KINDS
def test_a_copy_is_the_same_and_apart(kind):
    options = KINDS[kind]
    guide = make_guide(**options)
    randomize(guide)
    before = draw(guide)  # so that there are factors to copy
    for duplicate in DUPLICATES.values():
        twin = duplicate(guide, options)
        assert_same_draws(guide, twin)
        randomize(twin)
        after, theirs = draw(guide), draw(twin)
        for name, value in before.items():
            assert torch.equal(after[name], value)
            assert not torch.equal(theirs[name], value)


@SOME_KINDS
def test_a_step_factors_each_side_of_each_layer_once_and_predictions_once_in_all(
    kind, factorizations
):
    guide, data = make_guide(**KINDS[kind]), regression_data()
    guide.initialize(*data)
    elbo, sides = ps.StructuredELBO(num_particles=3), 8 if kind == "nested" else 4
    factorizations.clear()
    for steps in range(1, 4):
        elbo.differentiable_loss(guide.model, guide, *data).backward()
        assert len(factorizations) == steps * sides
    factorizations.clear()
    for _ in range(3):
        ps.predict(guide.model, guide, data[0], num_samples=4)
        guide.median()
        draw(guide)
    assert len(factorizations) <= sides


def take_a_step(guide):
    optimizer = torch.optim.SGD(guide.parameters(), lr=1e-3)
    ps.StructuredELBO().differentiable_loss(guide.model, guide, *regression_data()).backward()
    optimizer.step()


def assign_data(guide):
    for parameter in guide.parameters():
        parameter.data = parameter.data + 0.1


def write_data(guide):
    for parameter in guide.parameters():
        parameter.data.mul_(1.1)


def write_without_gradients(guide):
    """Change one entry only."""
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.view(-1)[-1] += 0.1


def load_a_state_dict(guide):
    guide.load_state_dict({name: value + 0.1 for name, value in guide.state_dict().items()})


CHANGES = {
    "step": take_a_step,
    "assignment of data": assign_data,
    "data written to": write_data,
    "written without gradients": write_without_gradients,
    "state dict": load_a_state_dict,
}


@pytest.mark.parametrize("kind", ["full, shared", "nested"])
def test_kept_factors_are_never_stale(kind):
    for name, change in CHANGES.items():
        guide = make_guide(**KINDS[kind])
        guide.initialize(*regression_data())
        before = draw(guide)
        change(guide)
        fresh = load_into_a_new_guide(guide, KINDS[kind])
        assert_same_draws(guide, fresh)
        after = draw(guide)
        assert all(not torch.equal(after[site], value) for site, value in before.items()), name
        median, expected = guide.median(), fresh.median()
        assert all(torch.equal(median[site], expected[site]) for site in median), name
    guide = make_guide(make_regressor().float(), **KINDS[kind])
    assert {value.dtype for value in draw(guide).values()} == {torch.float32}
    guide = guide.double()
    fresh = load_into_a_new_guide(guide, KINDS[kind]).double()
    fresh.load_state_dict(guide.state_dict())
    assert_same_draws(guide, fresh)


@EVERY_KIND
def test_gradients_reach_the_parameters_after_a_pass_without(options):
    guide = make_guide(**options)
    guide.initialize(*regression_data())
    draw(guide)
    ps.StructuredELBO().differentiable_loss(guide.model, guide, *regression_data()).backward()
    for name, parameter in guide.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.ne(0).any(), name


def test_a_law_without_gradients_stays_what_it_was():
    guide = make_guide()
    with torch.no_grad():
        law = guide["net.0.weight"]()
        before = law.mean.clone()
        randomize(guide)
        assert torch.equal(law.mean, before)
        assert not torch.equal(guide["net.0.weight"]().mean, before)
