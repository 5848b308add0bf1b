"""Gradients of chains: compiled, and in groups that fit into the cache."""

from time import sleep
from unittest.mock import Mock

import pytest
import torch
from torch.func import grad_and_value, vmap

import pyro_structvi as ps
from pyro_structvi.infer.steps.recording import Record
from pyro_structvi.reference import chains
from pyro_structvi.reference.chains import gradients_of
from pyro_structvi.reference.log_joint import LogJoint
from tests.infer.compiled_steps import compiles
from tests.models import make_regressor, regression_data


def target_and_positions(count):
    model, data = make_regressor(), regression_data()
    guide = ps.MeanFieldGuide(model)
    guide.initialize(*data)
    target = LogJoint(model, guide, data)
    return target, torch.randn(count, target.size)


def num_elements(target, positions):
    return Record(vmap(grad_and_value(target)), [positions]).num_elements


def test_whether_a_gradient_is_compiled_depends_on_no_measured_time(monkeypatch):
    """Draws with one seed differed on a busy computer, by the rounding of inductor."""
    replay = Record.__call__

    def slow(record, inputs):
        sleep(0.003)
        return replay(record, inputs)

    monkeypatch.setattr(chains, "WORTH_COMPILING", 0.1)
    monkeypatch.setattr(Record, "__call__", slow)
    monkeypatch.setattr(Record, "compile", compiled := Mock())
    target, positions = target_and_positions(3)
    gradients_of(target, positions, 100, "auto")
    assert not compiled.called
    gradients_of(target, positions, 10_000, "auto")
    assert compiled.called


SHARES = [
    (0.99, 3),
    (0.1, 1),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1.0, 6), (0.4, 2))),
]


@pytest.mark.parametrize(("share", "size"), SHARES)
def test_gradients_of_groups_of_chains_are_those_of_all(monkeypatch, share, size):
    replay, sizes = Record.__call__, []

    def note(record, inputs):
        sizes.append(len(inputs[0]))
        return replay(record, inputs)

    target, positions = target_and_positions(6)
    expected = gradients_of(target, positions, 1, compiled=False)(positions)
    total = num_elements(target, positions)
    monkeypatch.setattr(chains, "LARGEST_PASS", share * total)
    monkeypatch.setattr(Record, "__call__", note)
    found = gradients_of(target, positions, 1, compiled=False)(positions)
    assert sizes == [size] * (6 // size)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@compiles
@pytest.mark.parametrize("share", [1.0, 0.1])
def test_a_compiled_gradient_is_the_gradient(monkeypatch, share):
    target, positions = target_and_positions(3)
    total = num_elements(target, positions)
    monkeypatch.setattr(chains, "LARGEST_PASS", share * total)
    plain, compiled = (
        gradients_of(target, positions, 1, each)(positions) for each in (False, True)
    )
    torch.testing.assert_close(compiled, plain, rtol=1e-10, atol=1e-10)
