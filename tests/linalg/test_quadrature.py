"""Roots of increasing functions."""

import pytest
import torch

from pyro_structvi.linalg.quadrature import find_root

FUNCTIONS = {
    "line": lambda x: 0.1 * x - 0.05,
    "step": lambda x: (400 * (x - 0.3)).tanh(),
    "flat at its root": lambda x: (x - 0.7).pow(3),
    "normal tail": lambda x: torch.special.ndtr(x) - 1e-4,
}
ROOTS = {"line": 0.5, "step": 0.3, "flat at its root": 0.7, "normal tail": -3.719016485455681}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_roots_are_found_in_fewer_steps_than_halvings(name):
    steps = []

    def counted(x):
        steps.append(x)
        return FUNCTIONS[name](x)

    low = torch.tensor([-9.0, -4.0, ROOTS[name]])
    found = find_root(counted, low, torch.tensor([5.0, 40.0, 2.0]))
    expected = torch.full((3,), ROOTS[name])
    error = 1e-5 if name == "flat at its root" else 1e-10  # its values are below rounding there
    torch.testing.assert_close(found, expected, rtol=0, atol=error)
    assert len(steps) < 40


def test_a_bracket_of_one_point_is_its_root():
    at = torch.tensor([2.0, 0.0])
    assert torch.equal(find_root(lambda x: x - 2, at, at), at)
