"""A posterior over chosen elements: its optimum in a linear regression, its bound, the choosing."""

import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.nn import PyroModule
from torch import nn
from torch.distributions import MultivariateNormal

import pyro_structvi as ps
from pyro_structvi import element_scores
from pyro_structvi.families import LowRank, MeanField, PointEstimate, Subnetwork
from pyro_structvi.sites.finding import UnusedSiteWarning
from tests.guides.subnetworks import CHOSEN, NUM_DATA, PRIOR, SIZE, close, joint, make_guide
from tests.models import linear_function, make_regressor, regression_data
from tests.unit_noise import assert_draws


def test_draws_have_the_joint_law_and_leave_the_rest():
    guide = make_guide()
    q, index = joint(guide)
    median = torch.cat([value.flatten() for value in guide.median().values()])
    close(median[index], q.mean.detach())
    covariance = torch.zeros(len(median), len(median))
    covariance[index[:, None], index] = q.covariance_matrix.detach()
    draw = lambda: torch.cat([v.flatten() for v in guide.draw().values()]).detach()  # noqa: E731
    assert_draws(draw, median, covariance)


def test_the_divergence_is_closed_and_that_of_two_normals_and_points():
    guide, data = make_guide(), regression_data(NUM_DATA)
    guide.initialize(*data)
    q, index = joint(guide)
    median = torch.cat([value.flatten() for value in guide.median().values()])
    rest = torch.ones(len(median), dtype=torch.bool)
    rest[index] = False
    prior = MultivariateNormal(torch.zeros(SIZE), PRIOR**2 * torch.eye(SIZE))
    posterior = MultivariateNormal(q.mean, q.covariance_matrix)
    expected = torch.distributions.kl_divergence(posterior, prior)
    expected = (expected - dist.Normal(0.0, PRIOR).log_prob(median[rest]).sum()).detach()
    model = guide.model
    for program, factor in (
        (model, 1.0),
        (poutine.scale(model, scale=0.25), 0.25),
        (poutine.mask(model, mask=torch.tensor(False)), 0.0),
    ):
        kl = ps.StructuredELBO().terms(program, guide, *data).kl
        close(torch.as_tensor(sum(kl.values())).detach(), factor * expected)


def count(guide):
    return sum(parameter.numel() for parameter in guide.parameters())


def test_parameters_are_those_of_the_chosen_elements():
    assert count(make_guide()) == SIZE + SIZE * (SIZE + 1) // 2
    assert count(make_guide(posterior=MeanField())) == 2 * SIZE
    assert count(make_guide(posterior=LowRank(2))) == 4 * SIZE
    assert count(make_guide(train_rest=True)) == SIZE + SIZE * (SIZE + 1) // 2 + 26
    model = make_regressor()
    guide = ps.StructuredGuide(model, {"net.2.*": Subnetwork(), "*": PointEstimate()})
    assert guide.couplings["net/2/weight"].posterior().event_shape == (6,)
    assert count(guide) == 20 + 6 + 6 * 7 // 2
    first, second = guide.draw(), guide.draw()
    assert torch.equal(first["net.0.weight"], second["net.0.weight"])
    assert (first["net.2.weight"] != second["net.2.weight"]).all()
    center = ps.MAPGuide(model)
    ps.fit(model, center, regression_data(), num_steps=3, lr=0.05, progress=False)
    guide = ps.SubnetworkGuide(model, CHOSEN, center)
    for name, value in center.median().items():
        assert torch.equal(guide.median()[name], value)


@pytest.mark.parametrize("train_rest", [False, True])
def test_training_moves_the_rest_only_if_asked(train_rest):
    guide, data = make_guide(train_rest=train_rest), regression_data(NUM_DATA)
    before = guide.median()
    ps.fit(guide.model, guide, data, num_steps=5, lr=0.02, progress=False)
    after = guide.median()
    assert torch.equal(before["net.0.bias"], after["net.0.bias"]) != train_rest
    assert not torch.equal(before["net.0.weight"], after["net.0.weight"])
    prediction = ps.predict(guide.model, guide, data[0], num_samples=10)
    assert (prediction.function_variance > 0).all()


class Late(PyroModule):
    """A layer, one that is not used, a site drawn in forward, and a latent for each example."""

    def __init__(self):
        super().__init__()
        self.layer = ps.bayesianize(nn.Linear(3, 1))
        self.unused = ps.bayesianize(nn.Linear(2, 2))

    def forward(self, x, y=None):
        shift = pyro.sample("shift", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        mean = self.layer(x) + shift
        with pyro.plate("data", len(x)):
            own = pyro.sample("own", dist.Normal(0.0, torch.tensor(0.1)))
            mean = mean + own.unsqueeze(-1)
            options = {"obs": y, "infer": {"is_observation": True}}
            pyro.sample("obs", dist.Normal(mean, 0.5).to_event(1), **options)


@pytest.mark.filterwarnings("ignore::pyro_structvi.sites.finding.UnusedSiteWarning")
def test_sites_that_are_found_late():
    model, data, chosen = Late(), regression_data(), torch.tensor([True])
    center = ps.MAPGuide(model)
    with pytest.warns(UnusedSiteWarning, match=r"\['unused.weight', 'unused.bias'\]"):
        ps.fit(model, center, data, num_steps=3, progress=False)
    variances = element_scores.laplace_variances(model, center, data[0])
    assert set(variances) == set(center.site_names) - {"own"}
    torch.testing.assert_close(variances["unused.bias"], torch.ones(2))  # the prior's
    guide = ps.SubnetworkGuide(model, {"layer.bias": chosen}, center)
    ps.fit(model, guide, data, num_steps=5, lr=0.05, progress=False)
    assert torch.equal(guide.median()["shift"], center.median()["shift"])
    late = ps.SubnetworkGuide(model, {"layer.bias": chosen, "shift": chosen})
    with pytest.raises(ValueError, match="found only now"):
        late.initialize(*data)
    unused = ps.SubnetworkGuide(model, {"unused.bias": torch.tensor([True, False])}, init_scale=0.5)
    terms = ps.StructuredELBO().terms(model, unused, *data)
    first, second = unused.median()["unused.bias"].tolist()
    chosen_one = math.log(1 / 0.5) + (0.5**2 + first**2 - 1) / 2
    fixed_one = (math.log(2 * math.pi) + second**2) / 2
    names = (f"subnetwork of {unused.site_names[0]}", "unused.bias")
    kl = sum(terms.kl[name].item() for name in names)
    assert kl == pytest.approx(chosen_one + fixed_one)


def test_a_plain_function():
    chosen = {"weight": torch.eye(2, 3, dtype=torch.bool)}
    guide = ps.SubnetworkGuide(linear_function, chosen, init_scale=0.1)
    data = torch.randn(12, 3), torch.randn(12, 2)
    guide.initialize(*data)
    assert len(guide.couplings["weight"].posterior().mean) == 2
    wrong = ps.SubnetworkGuide(linear_function, {**chosen, "wieght": chosen["weight"]})
    with pytest.raises(ValueError, match=r"has masks for \['wieght'\]"):
        wrong.initialize(*data)
