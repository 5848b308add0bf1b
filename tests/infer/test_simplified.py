"""Simplified records: they return and write the same as the function."""

import pytest
import torch

from pyro_structvi.infer.steps.recording import Record


def assert_same_as_function(make, inputs, calls=3):
    """Compare replays with calls of the function; return the names of its operations."""
    function, found = make()
    expected = [function(*inputs) for _ in range(calls)]
    own_function, own_found = make()
    record = Record(own_function, inputs)
    outputs = [record.outputs] + [record(inputs) for _ in range(calls - 1)]
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0)
    torch.testing.assert_close(own_found, found, rtol=0, atol=0)
    return names_of(record)


def names_of(record):
    return [str(operation) for operation in record.operations]


def test_a_view_is_taken_once():
    def make():
        w = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)

        def function(x):
            return (x @ w.t().t()).sum(), w.t().exp(), w.t() * 2, w.detach().sum()

        return function, [w]

    names = assert_same_as_function(make, [torch.ones(4, 2, dtype=torch.float64)])
    assert names.count("aten.t.default") == 1
    assert "aten.detach.default" not in names


def test_inputs_in_one_memory_are_inputs_of_their_own():
    """In later calls they may lie apart, from each other and from a tensor that is found."""
    x = torch.ones(3)
    record = Record(lambda a, b: (a.view(3, 1) + 1, b.view(3, 1) * 2, x.view(3, 1) * 3), [x, x])
    own = record([torch.full((3,), 5.0), torch.full((3,), 7.0)])
    assert [float(value[0]) for value in own] == [6.0, 14.0, 3.0]


def test_what_nothing_needs_is_left_out():
    record = Record(lambda x: ((x * 2).exp(), (x * 3).sin())[:1], [torch.ones(2)])
    assert names_of(record) == ["aten.mul.Tensor", "aten.exp.default"]


def test_numbers_of_other_types_are_other_operations():
    def make():
        def function(x):
            return x.sum() * 1, x.sum() * 1.0, x.sum() * True

        return function, []

    assert_same_as_function(make, [torch.arange(3)])


def test_what_is_written_between_is_read_again():
    def make():
        w = torch.ones(3, dtype=torch.float64)
        whole = torch.zeros(4, dtype=torch.float64)
        part = whole[1:]  # of the memory of another tensor that is found

        def function(x):
            before = (w * x).sum(), (whole * 2).sum()
            w.add_(x)
            part.sub_(x)
            return *before, (w * x).sum(), (whole * 2).sum()

        return function, [w, whole]

    names = assert_same_as_function(make, [torch.arange(3.0, dtype=torch.float64)])
    assert names.count("aten.mul.Tensor") == 4


def test_what_an_operation_is_told_to_write_is_read_again():
    """Parts of the memory of a tensor: by an argument ``out``, and one of several views."""

    def make():
        whole = torch.arange(4.0, dtype=torch.float64)
        part = whole[1:]

        def function(x):
            before = (whole * 3).sum()
            torch.add(part, x, out=part)
            again = (whole * 3).sum()
            whole.split(2)[1].mul_(x.sum())  # one of several views
            return before, again, (whole * 3).sum()

        return function, [whole]

    assert_same_as_function(make, [torch.arange(3.0, dtype=torch.float64)])


def test_results_that_are_written_into_are_not_shared():
    def make():
        def function(x):
            first, second = x * 2, x * 2
            row = second.view(3, 1)[1]
            row.add_(1)
            return first + 0, second + 0

        return function, []

    assert_same_as_function(make, [torch.arange(3.0, dtype=torch.float64)])


def test_views_of_other_places_are_told_apart():
    """They have the same shape and strides."""

    def make():
        w = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)

        def function(x):
            rows = w.split(2)
            first, last = w[0], w[3]
            return x * first, x * last, rows[0] * x, rows[1] * x, w[1:3] * x, *w.unbind(1)

        return function, [w]

    assert_same_as_function(make, [torch.full((3,), 2.0, dtype=torch.float64)])


def test_parts_of_a_result_of_several_are_told_apart():
    def make():
        def function(x):
            values, places = x.sort()
            return values * 1.0, places * 1.0, *torch._foreach_norm([x, x + 1.0])

        return function, []

    assert_same_as_function(make, [torch.tensor([2.0, -1.0, 5.0], dtype=torch.float64)])


def test_what_is_returned_twice_can_be_written_into():
    record = Record(lambda x: (x * 2, x * 2), [torch.ones(2)])
    first, second = record([torch.ones(2)])
    first.add_(1)
    torch.testing.assert_close(second, torch.full((2,), 2.0), rtol=0, atol=0)


def test_draws_are_not_shared():
    record = Record(
        lambda x: (x + torch.randn(2), x + torch.randn(2), x + torch.arange(2)), [torch.ones(2)]
    )
    names = names_of(record)
    assert names.count("aten.randn.default") == 2
    first, second, shifted = record([torch.zeros(2)])
    assert bool((first != second).all())
    torch.testing.assert_close(shifted, torch.arange(2.0), rtol=0, atol=0)
    assert bool((record([torch.zeros(2)])[0] != first).all())


@pytest.mark.parametrize("training", [True, False])
def test_statistics_of_a_layer_used_twice_are_updated_twice(training):
    def make():
        layer = torch.nn.BatchNorm1d(2, dtype=torch.float64).train(training)

        def function(x):
            return layer(x).detach(), layer(x).detach()

        return function, dict(layer.state_dict())

    assert_same_as_function(make, [torch.randn(5, 2, dtype=torch.float64)])


def test_a_constant_that_is_written_into_is_made_anew():
    def function(x):
        counts = torch.zeros(2)
        counts.add_(x)
        return (counts * 1,)

    record = Record(function, [torch.ones(2)])
    for _ in range(2):
        torch.testing.assert_close(record([torch.ones(2)])[0], torch.ones(2), rtol=0, atol=0)
