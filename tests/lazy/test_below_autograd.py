"""Weights that are used where autograd does not see a stand-in, or where no gradient leads at all."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from tests.models import hierarchical_function, regression_data


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class OwnFunction(nn.Linear):
    """Applies its weight by a function with a gradient of its own."""

    def forward(self, x):
        return Product.apply(x, self.weight) + self.bias


def scripted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


class Scripted(nn.Linear):
    def forward(self, x):
        function = vars(self).setdefault("function", torch.jit.script(scripted))
        return function(x, self.weight) + self.bias


class Jagged(nn.Linear):
    def forward(self, x):
        rows = torch.nested.as_nested_tensor([x[:4], x[4:]], layout=torch.jagged)
        return super().forward(rows).values()


NETS = [OwnFunction, Jagged, Scripted]


def make(layer, guide=ps.MeanFieldGuide, prior=1.0, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), layer(4, 1))
    model = ps.Regressor(ps.bayesianize(net, prior), 12, 0.3)
    return model, guide(model, init_scale=0.3, **options)


def gradients(model, guide):
    torch.manual_seed(1)
    data = regression_data()
    ps.StructuredELBO(kl_weight=0.0).loss_and_grads(model, guide, *data)
    return {name: parameter.grad for name, parameter in guide.named_parameters()}


@pytest.mark.parametrize("layer", NETS)
def test_such_a_weight_is_drawn_and_has_the_gradient_of_a_drawn_one(layer):
    model, guide = make(layer)
    found = {each.name: each for each in guide.report(*regression_data()).parameters}
    assert found["net.2.weight"].drawn == "weight"
    assert found["net.2.weight"].why == "an operation below autograd"
    assert found["net.0.weight"].drawn == "outputs"  # as before
    for use in guide.uses.values():
        use.local_reparam = False
    own = gradients(model, guide)
    torch.testing.assert_close(own, gradients(*make(layer, local_reparam=False)))
    assert own["posteriors.net/2/weight.loc"].abs().sum() > 1


JOINED = partial(ps.MatrixNormalGuide, join_bias=True)


@pytest.mark.parametrize("local_reparam", [True, False])
@pytest.mark.parametrize("guide", [ps.InducingWeightGuide, JOINED])
def test_so_is_one_that_would_be_applied_in_factors_or_with_its_bias(guide, local_reparam):
    """Factors are a way to apply a drawn weight, and wait for its input, too."""
    own = gradients(*make(OwnFunction, guide, local_reparam=local_reparam))
    ends = "2/weight.loc", "inducing_loc"
    (mean,) = (value for name, value in own.items() if name.endswith(ends) and "net/2" in name)
    assert mean.abs().sum() > 1
    with pytest.raises(RuntimeError, match=r"weights \['net.2.weight'\].*another family"):
        make(OwnFunction, partial(ps.GlobalInducingGuide, inputs=regression_data()[0]))


class WithoutGradient(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


class Detached(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.detach(), self.bias)


@pytest.mark.parametrize(
    ("layer", "sites"),
    [
        (WithoutGradient, r"\['net.0.bias', 'net.0.weight', 'net.2.bias', 'net.2.weight'\]"),
        (Detached, r"\['net.2.weight'\]"),
    ],
)
@pytest.mark.parametrize("local_reparam", [True, False])
def test_a_weight_that_no_gradient_leads_to_is_refused(layer, sites, local_reparam):
    _, guide = make(layer, local_reparam=local_reparam)
    for _ in range(2):  # a second call does not go on in silence
        with pytest.raises(RuntimeError, match=rf"depend on the sites {sites}, and no gradient"):
            guide(*regression_data())
    _, guide = make(Detached, prior={"2.weight": None, "*": 1.0})
    guide(*regression_data())


@pytest.mark.parametrize("product", [F.linear, Product.apply, lambda x, w: F.linear(x, w.detach())])
def test_an_observation_may_be_what_depends_on_a_weight(product):
    def model(x, y):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(1, 3), 1.0).to_event(2))
        pyro.sample(
            "obs", dist.Normal(torch.zeros(12, 1), 0.3).to_event(2), obs=y - product(x, weight)
        )

    guide = ps.MeanFieldGuide(model)
    if product in (F.linear, Product.apply):
        guide.initialize(*regression_data())
        assert guide.uses["weight"].allows_outputs == (product is F.linear)
    else:
        with pytest.raises(
            RuntimeError, match=r"depend on the sites \['weight'\], and no gradient"
        ):
            guide.initialize(*regression_data())


class Skipping(nn.Linear):
    """Computes what nothing is made of, as a head that another task has."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.unused = nn.Linear(*sizes)

    def forward(self, x):
        self.unused(x)
        return super().forward(x)


def test_a_layer_or_a_scale_of_a_prior_that_decides_nothing_may_have_no_gradient():
    _, guide = make(Skipping)
    guide.initialize(*regression_data())
    assert guide.uses["net.2.unused.weight"].allows_outputs
    guide = ps.MeanFieldGuide(hierarchical_function)
    guide.initialize(*regression_data())
    assert guide.uses["weight"].allows_outputs


def test_values_without_a_gradient_are_compared_inside_of_their_support():
    """A probability that hidden classes are drawn with, so that no gradient leads to it."""

    def mixture(y):
        share = pyro.sample("share", dist.Beta(20.0, 1.0))  # most samples above two thirds
        with pyro.plate("data", len(y)):
            label = pyro.sample("label", dist.Bernoulli(share))
            pyro.sample("obs", dist.Normal(label, 1.0), obs=y)

    guide = ps.MeanFieldGuide(pyro.poutine.block(mixture, hide=["label"]))
    guide.initialize(torch.randn(6))
    assert guide.site_names == ["share"]
