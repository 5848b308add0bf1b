"""Guides with inducing weights whose factors are copied."""

import torch


def randomize(guide):
    """Move every parameter."""
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def draw(guide):
    """Return one draw without gradients, the same for guides that are the same."""
    torch.manual_seed(0)
    with torch.no_grad():
        return guide.draw()


def assert_same_draws(guide, other):
    ours, theirs = draw(guide), draw(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name])
