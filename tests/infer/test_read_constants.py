"""Constants that Python reads while a step is recorded."""

import pytest
import torch

from pyro_structvi._torch import can_read
from pyro_structvi.infer.steps.recording import Record


def in_place(x):
    scale = torch.ones(())
    scale.add_(x.sum())
    return scale


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
        lambda x: PAIR[0] * x[0, 0],
        lambda x: x.new_full((1,), 2.0) + x.sum(),
        lambda x: torch.randn(()),
        lambda x: PAIR[0] + torch.rand(()),
        lambda x: TRAINED[0],
        lambda x: TRAINED.detach()[0],
        lambda x: torch.ones(17)[0] * LARGE[0],
        in_place,
    ],
)
def test_other_values_are_refused(function):
    with pytest.raises(RuntimeError, match="Python reads a tensor's value"):
        Record(scaled_by(function), [torch.ones(2, 2)])


LARGE = torch.ones(17)


def test_a_record_holds_while_the_constants_in_memory_stay():
    """By whatever tensor they are changed, unlike versions of tensors."""
    pair = PAIR.clone()
    record = Record(scaled_by(lambda x: pair[0]), [torch.ones(2)])
    pair.copy_(PAIR)
    assert record.holds
    pair.data[1] = 5.0
    assert not record.holds
    pair.data[1] = 2.0
    assert record.holds


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
