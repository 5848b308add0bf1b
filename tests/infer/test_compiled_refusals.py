"""What cannot be compiled is refused, with the line, and nothing is changed."""

from contextlib import nullcontext
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from torch import nn

import pyro_structvi as ps
from pyro_structvi.infer import CompileFallbackWarning
from tests.infer.compiled_steps import adam, make_k_tied, train
from tests.models import regression_data


class Deciding(nn.Module):
    """Decides by a value, behind noise and a running mean."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3, affine=False), nn.Linear(3, 1)

    def forward(self, x):
        x = self.norm(x) + 0 * torch.randn(3)
        return self.linear(x if x.sum() > 100 else -x)  # the line at fault


def deciding():
    return ps.Regressor(ps.bayesianize(Deciding(), prior=1.0), 12, 0.3)


def test_reading_a_value_is_an_error_that_names_the_line_and_changes_nothing():
    x, y = regression_data()
    model, guide = make_k_tied(deciding)
    svi = ps.CompiledSVI(model, guide, adam(), ps.StructuredELBO(), backend=None)
    for _ in range(2):
        svi.step(x, y)
    before = [value.clone() for part in (model, guide) for value in part.state_dict().values()]
    random_state = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"test_compiled_refusals\.py:\d+, `.*the line at fault`.*fallback"
        ):
            svi.step(x, y)
    after = [value for part in (model, guide) for value in part.state_dict().values()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert svi.loss.step == 2


@pytest.mark.parametrize(
    ("read", "cause"),
    [
        (lambda x: x.detach().numpy().mean(), "reads a tensor's value by `numpy`"),
        (lambda x: sum(x[:, 0].tolist()), "reads a tensor's value by `tolist`"),
        (lambda x: len(x[x[:, 0] > 0]), "the size of a result depends on values in `aten.index"),
        (lambda x: len(torch.unique(x)), "the size of a result depends on values in `aten._unique"),
        (
            lambda x: torch.tensor_split(x[:, 0], (x[:1, 0] > 0).long())[0].sum(),
            "reads a tensor's value by `tensor_split`",
        ),
    ],
    ids=["numpy", "tolist", "mask", "unique", "split"],
)
def test_values_that_python_reads_on_other_ways_are_refused(read, cause):
    class Reading(nn.Linear):
        def forward(self, x):
            return super().forward(x) + float(read(x))  # here

    model = ps.Regressor(ps.bayesianize(Reading(3, 1), prior=1.0), 12, 0.3)
    svi = ps.CompiledSVI(model, ps.KTiedGuide(model), adam(), ps.StructuredELBO(), backend=None)
    for _ in range(2):
        svi.step(*regression_data())
    with pytest.raises(RuntimeError, match=rf"{cause}.*, at .*test_compiled_refusals\.py:"):
        svi.step(*regression_data())


class Averaging(nn.Linear):
    """Has a new tensor for its buffer in each pass."""

    def __init__(self):
        super().__init__(3, 1)
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x):
        self.average = 0.5 * self.average + 0.5 * x.detach().mean()
        return super().forward(x - self.average)


def averaging():
    return ps.Regressor(ps.bayesianize(Averaging(), prior=1.0), 12, 0.3)


def test_a_buffer_that_forward_replaces_is_refused_before_anything_changes():
    model, guide = make_k_tied(averaging)
    svi = ps.CompiledSVI(model, guide, adam(), ps.StructuredELBO(), backend=None)
    for _ in range(2):
        svi.step(*regression_data())
    buffer, before = model.net.average, [value.clone() for value in guide.parameters()]
    with pytest.raises(
        RuntimeError, match=r"a step changes `average` of .*, change these in place"
    ):
        svi.step(*regression_data())
    assert model.net.average is buffer
    torch.testing.assert_close([*guide.parameters()], before, rtol=0, atol=0)
    assert svi.loss.step == 2


class Experiment:
    """Has a model as a method, and counts its calls."""

    calls = 0

    def model(self):
        self.calls += 1
        pyro.sample("mean", dist.Normal(0.0, 1.0 if self.calls < 100 else 2.0))

    def guide(self):
        pyro.sample("mean", dist.Normal(pyro.param("loc", torch.zeros(())), 1.0))


def test_the_object_of_a_method_is_looked_at():
    own = Experiment()
    svi = ps.CompiledSVI(own.model, own.guide, adam(), ps.StructuredELBO(), backend=None)
    svi.step(), svi.step()
    with pytest.raises(RuntimeError, match="a step changes `model` of the variables outside"):
        svi.step()


@pytest.mark.parametrize(
    ("model_of", "cause"), [(deciding, "the line at fault"), (averaging, "changes `average`")]
)
def test_fallback_warns_once_and_goes_on_as_svi(model_of, cause):
    data = regression_data()
    expected, state, _ = train(lambda: make_k_tied(model_of), data, compiled=False)
    with pytest.warns(CompileFallbackWarning, match=cause) as said:
        losses, own, _ = train(lambda: make_k_tied(model_of), data, compiled=True, fallback=True)
    assert len(said) == 1
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(own, state, rtol=1e-6, atol=1e-7)


def test_other_objectives_are_refused():
    data = regression_data()
    with pytest.raises(TypeError, match=r"`loss` must be a StructuredELBO, but got a Trace_ELBO"):
        train(make_k_tied, data, compiled=True, loss=Trace_ELBO)


def forget(parameter):
    parameter.grad.zero_()


def test_hooks_of_gradients_are_not_left_out():
    model, guide = make_k_tied()
    guide.initialize(*regression_data())
    next(guide.parameters()).register_post_accumulate_grad_hook(forget)
    svi = ps.CompiledSVI(model, guide, adam(), ps.StructuredELBO(), backend=None)
    for _ in range(2):
        svi.step(*regression_data())
    with pytest.raises(
        RuntimeError, match=r"hook for its `\.grad`, which a replay would leave out"
    ):
        svi.step(*regression_data())


@dataclass(frozen=True)
class Options:
    """A hashable value by its class, and not by its contents."""

    values: list[int]


@pytest.mark.parametrize("place", ["argument", "global"])
def test_gradients_of_other_tensors_are_not_left_out(place):
    """Those of a net in front of the model with an optimizer of its own."""
    before, (x, y) = nn.Linear(3, 3), regression_data()
    model, guide = make_k_tied()

    def program(x, y):
        return model(x if place == "argument" else before(x), y)

    svi = ps.CompiledSVI(program, guide, adam(), ps.StructuredELBO(), backend=None, fallback=True)
    for number in range(6):
        before.zero_grad()
        said = pytest.warns(CompileFallbackWarning, match="or a tensor outside .* takes a gradient")
        with said if number == 2 else nullcontext():
            svi.step(before(x) if place == "argument" else x, y)
        assert before.weight.grad is not None


def test_arguments_must_be_tensors_or_hashable():
    model, guide = make_k_tied()
    svi = ps.CompiledSVI(model, guide, adam(), ps.StructuredELBO(), backend=None)
    with pytest.raises(TypeError, match="tensors or hashable, but got a ndarray"):
        svi.step(torch.randn(3, 3).numpy(), torch.randn(3, 1))
    with pytest.raises(TypeError, match=r"tensors or hashable, but got a.*Options"):
        svi.step(*regression_data(), Options([1]))


def test_there_must_be_something_to_train():
    model, guide = make_k_tied()
    guide.requires_grad_(False)
    svi = ps.CompiledSVI(model, guide, adam(), ps.StructuredELBO(), backend=None)
    with pytest.raises(ValueError, match="must have a parameter to train"):
        svi.step(*regression_data())


def test_what_is_wrong_in_any_case_the_model_says_itself():
    x, y = regression_data()
    model, guide = make_k_tied()
    svi = ps.CompiledSVI(model, guide, adam(), ps.StructuredELBO(), backend=None)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        svi.step(x[:, :2], y)
