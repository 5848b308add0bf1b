"""Every guide of the registry obeys the contract of guides."""

import pytest
import torch

from pyro_structvi.distributions import PointMixture
from pyro_structvi.guides import GlobalInducingGuide
from pyro_structvi.structures.inducing.normal import InducingNormal
from pyro_structvi.testing import check_guide
from tests.guide_cases import GUIDES, POINTS
from tests.models import linear_function, make_regressor

GUIDES = GUIDES | POINTS


def counts_inducing_weights(guide):
    """Whether the KL of some site is an upper bound."""
    laws = [guide[name]() for name in guide.site_names]
    return any(
        isinstance(q, InducingNormal) and not isinstance(q.inducing, PointMixture) for q in laws
    )


def check(name, model, *data):
    def make(model):
        return GUIDES[name](model, init_scale=0.3)

    guide = make(model)
    guide.initialize(*data)
    check_guide(make, model, *data, is_bound=counts_inducing_weights(guide))


@pytest.mark.parametrize("name", GUIDES)
def test_contract(name):
    check(name, linear_function, torch.randn(6, 3), torch.randn(6, 2))


@pytest.mark.parametrize("name", ["k-tied, joined", "dropout"])
def test_contract_on_a_net(name):
    check(name, make_regressor(6), torch.randn(6, 3), torch.randn(6, 1))


def test_contract_of_layers_given_the_ones_before():
    x, y = torch.randn(6, 3), torch.randn(6, 1)
    make = lambda model: GlobalInducingGuide(model, x[:4], init_scale=0.3)  # noqa: E731
    check_guide(make, make_regressor(6), x, y)
