"""Values that Python reads while a step is recorded."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_structvi as ps
from pyro_structvi._torch import can_read
from pyro_structvi.infer.steps.recording import Record
from tests.infer.compiled_steps import steps_of, train


def in_place(x):
    scale = torch.ones(())
    scale.add_(x.sum())
    return scale


def in_place_by_a_view(x):
    scale = torch.ones(2)
    scale[0].add_(x.sum())
    return scale[0] + scale[1]


PAIR = torch.tensor([0.5, 2.0])
SCALAR = torch.tensor(3.0)
TRAINED = torch.nn.Parameter(torch.tensor([0.5, 2.0]))


def scaled_by(function):
    """Return a function that multiplies its input by a number that Python reads."""
    return lambda x: (x * float(function(x)),)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: SCALAR.expand(4, 3)[:1, :1].reshape(()), 3.0),
        (lambda x: [*PAIR][1], 2.0),
        (lambda x: PAIR[:1].square(), 0.25),
        (lambda x: torch.tensor(1.5), 1.5),
        (lambda x: torch.distributions.Normal(0.0, 2.0).scale, 2.0),
        (lambda x: torch.zeros(()), 0.0),
    ],
)
def test_small_constants_are_read(function, expected):
    x = torch.ones(2, 2)
    record = Record(scaled_by(function), [x])
    torch.testing.assert_close(record([x + 1])[0], (x + 1) * expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.randn(()),
        lambda x: PAIR[0] + torch.rand(()),
        lambda x: TRAINED[0],
        lambda x: TRAINED.detach()[0],
        lambda x: x.sum() * TRAINED[0],
        in_place,
        in_place_by_a_view,
    ],
)
def test_other_values_are_refused(function):
    with pytest.raises(RuntimeError, match="Python reads a tensor's value"):
        Record(scaled_by(function), [torch.ones(2, 2)])


def test_a_record_holds_while_the_constants_in_memory_stay():
    """By whatever tensor they are changed, unlike versions of tensors."""
    pair, x = PAIR.clone(), torch.ones(2)
    record = Record(scaled_by(lambda x: pair[0] + pair[1]), [x])
    pair.copy_(PAIR)
    assert record.holds([x])
    pair.data[1] = 5.0
    assert not record.holds([x])
    pair.data[1] = 2.0
    assert record.holds([x])


def test_a_record_holds_for_inputs_of_which_python_reads_the_same():
    def function(x):
        half = torch.full((), 0.5)
        return (x * 2 if (x > half).all() else x - 1,)

    x = torch.tensor([1.0, 3.0])
    record = Record(function, [x])
    assert record.holds([x + 4])
    torch.testing.assert_close(record([x + 4])[0], 2 * (x + 4))
    assert not record.holds([-x])
    record = Record(lambda x: (x * float(torch.zeros(()) + 2.0),), [x])
    assert len(record.operations) == 1


def test_each_branch_that_inputs_choose_is_a_record_of_its_own():
    """As for masks of padded tokens, which nets of transformers skip where all tokens are seen."""

    def model(x):
        scale = pyro.sample("scale", dist.Normal(0.0, 1.0))
        mean = scale * (x if bool((x > 0).all()) else x.abs() + 1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=x)

    batches = [torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 2.0])]

    def data(number):
        return (batches[number % 3 % 2],)

    def make():
        return model, ps.MeanFieldGuide(model)

    expected, *_ = train(make, data, compiled=False, steps=18)
    losses, _, svi = train(make, data, compiled=True, steps=18)
    assert losses == expected
    assert len(steps_of(svi)) == 2
    assert all(not step.to_come for step in steps_of(svi))


def test_constants_can_be_read_outside_of_other_tracers():
    found = [can_read(PAIR[1]), can_read(TRAINED[0]), can_read(torch.empty((), device="meta"))]
    assert found == [True, False, False]

    def see(x):
        found.append(can_read(SCALAR))
        return x * SCALAR

    torch.func.vmap(see)(torch.ones(2))
    torch.compile(see, backend="eager", fullgraph=True)(torch.ones(2))
    torch.jit.trace(see, torch.ones(2), check_trace=False)
    assert found[3:] == [False] * len(found[3:])
    assert len(found) >= 6
