"""Cached properties are computed once, in the gradient mode of their object."""

import pytest
import torch

from pyro_structvi.linalg.matrices import grad_cached_property


class Squares:
    def __init__(self, value):
        self.value, self.count = value, 0
        self._with_grad = torch.is_grad_enabled()

    @grad_cached_property
    def squares(self):
        """The squares."""
        self.count += 1
        return self.value.square()


@pytest.mark.parametrize(
    ("made", "read"),
    [(torch.enable_grad, torch.no_grad), (torch.no_grad, torch.enable_grad)],
    ids=["made with gradients", "made without"],
)
def test_a_value_is_formed_once_in_the_mode_of_its_object(made, read):
    value = torch.ones(2, requires_grad=True)
    with made():
        owner = Squares(value)
    assert owner.count == 0
    with read():
        first = owner.squares
    assert owner.squares is first
    assert owner.count == 1
    assert first.requires_grad is owner._with_grad
    assert Squares(value).squares is not first
    assert Squares.squares.__doc__ == "The squares."
