"""A prior that is known to be the joint's own: its divergence needs no product of the weight's size."""

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from pyro_structvi.distributions import JoinedPrior
from pyro_structvi.structures.inducing.outputs import InducingSide
from tests.distributions.cases import MATRIX, make_mean_field
from tests.distributions.inducing.inducing_laws import make
from tests.distributions.subject import named_arguments, rebuilt


def as_prior(scales, loc, is_learned, joined):
    """Return a prior of one weight; where its scales are learned they may become other numbers."""
    scales = [scale.detach().clone().requires_grad_(is_learned) for scale in scales]
    if not joined:
        return Independent(Normal(loc, scales[0]).expand(MATRIX), 2)
    weight, bias = (Normal(loc, scale) for scale in scales)
    return JoinedPrior(
        Independent(weight.expand((MATRIX[0], MATRIX[1] - 1)), 2),
        Independent(bias.expand(MATRIX[:1]), 1),
    )


@pytest.mark.parametrize(("joined", "bias_scale"), [(False, False), (True, False), (True, True)])
def test_the_divergence_is_the_same_whether_the_prior_is_known(joined, bias_scale, monkeypatch):
    q = make(make_mean_field, bias_scale=bias_scale)
    scales = [q.joint.scale, q.joint.bias_scale if bias_scale else q.joint.scale]
    loc = torch.zeros(())
    expected = kl_divergence(q, as_prior(scales, loc, True, joined))
    others = [
        as_prior(scales, loc + 0.1, False, joined),
        *(
            as_prior([s * f for s, f in zip(scales, factors, strict=True)], loc, False, joined)
            for factors in ([(1.1, 1.0), (1.0, 1.1)] if joined else [(1.1, 1.1)])
        ),
    ]
    for other in others:
        assert abs(kl_divergence(q, other) - expected) > 1e-3
    fresh = rebuilt(q, named_arguments(q))

    def refuse(*_):
        raise AssertionError("the factors are not needed")

    monkeypatch.setattr(InducingSide, "of", refuse)
    found = kl_divergence(fresh, as_prior(scales, loc, False, joined))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
