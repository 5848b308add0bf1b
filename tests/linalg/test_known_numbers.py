"""Numbers that a record may be built on."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_structvi.infer.steps.recording import Traced
from pyro_structvi.linalg.known_numbers import TakenNumbers, known_number, taking


def known_in_record(function, *inputs):
    """Return what is known of what a function computes while it is recorded, and what that takes."""
    found = []

    def record(*tensors):
        value = function(*tensors)
        found.append(known_number(value))
        return value

    taken = TakenNumbers()
    with taking(taken):
        make_fx(record)(*inputs)
    return found[0], taken


def in_place(x):
    scale = torch.ones(())
    scale.add_(x.sum())
    return scale


PAIR = torch.tensor([0.5, 2.0])
SCALAR = torch.tensor(3.0)
TRAINED = torch.nn.Parameter(torch.tensor([0.5, 2.0]))
LARGE = torch.ones(17)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: SCALAR, 3.0),
        (lambda x: SCALAR.expand(4, 3)[:1, :1].reshape(()), 3.0),
        (lambda x: [*PAIR][1], 2.0),
        (lambda x: torch.tensor(1.5), 1.5),
        (lambda x: PAIR[0] * x[0, 0], None),
        (lambda x: PAIR[0] + torch.rand(()), None),
        (lambda x: TRAINED.detach()[0], None),
        (lambda x: LARGE[0], None),
        (lambda x: PAIR, None),
        (in_place, None),
        (lambda x: SCALAR.to("meta"), None),
    ],
)
def test_what_is_known_in_a_record(function, expected):
    found, _ = known_in_record(function, torch.ones(2, 2))
    assert found == expected


def test_outside_of_a_record_a_number_is_what_it_is():
    assert known_number(PAIR[1]) == 2.0
    assert known_number(PAIR) is None
    assert known_number(TRAINED[0]) is None
    assert known_number(torch.empty((), device="meta")) is None


def test_inside_a_transform_and_a_compiler_nothing_is_known():
    found = []

    def see(x):
        found.append(known_number(SCALAR))
        return x * SCALAR

    torch.func.vmap(see)(torch.ones(2))
    torch.compile(see, backend="eager", fullgraph=True)(torch.ones(2))
    torch.jit.trace(see, torch.ones(2), check_trace=False)
    assert found == [None] * 3


def test_a_record_that_does_not_ask_knows_nothing():
    found = []
    make_fx(lambda x: (found.append(known_number(SCALAR)), x)[1])(torch.ones(2))
    assert found == [None]


def test_a_record_holds_while_the_numbers_in_memory_stay():
    """By whatever tensor they are changed, unlike versions of tensors."""
    pair = PAIR.clone()
    _, taken = known_in_record(lambda x: pair[0], torch.ones(2))
    assert taken.are_as_taken()
    pair.copy_(PAIR)
    assert taken.are_as_taken()
    pair.data[1] = 5.0
    assert not taken.are_as_taken()
    pair.data[1] = 2.0
    assert taken.are_as_taken()


def test_a_traced_function_notes_what_it_took():
    scale = torch.tensor(1.0)
    traced = Traced(lambda x: (x if known_number(scale) == 1.0 else x * scale,), [torch.ones(2)])
    assert traced.taken.are_as_taken()
    scale.fill_(2.0)
    assert not traced.taken.are_as_taken()
