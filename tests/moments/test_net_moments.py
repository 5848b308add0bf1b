"""Moments as a module: exported, differentiated, and of a net whose last layer alone is random."""

from functools import partial

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import Members, Subnetwork
from pyro_structvi.testing import guides_for
from tests.moments.one_layer import Function, output_moments, variances

GUIDES = guides_for("demo")
SLOW = ("low rank, K = 5, joined", "FCG-U")
X = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(6, 3)


def make(make_guide, outputs=2):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, outputs))
    model = ps.Classifier(ps.bayesianize(net, prior=1.0), num_data=6)
    guide = make_guide(model)
    guide.initialize(X)
    return model, guide


def exported(moments, x):
    """Return the exported module, for batches of any size."""
    shapes = ({0: torch.export.Dim("batch")},)
    return torch.export.export(moments, (x,), strict=False, dynamic_shapes=shapes).module()


@pytest.mark.filterwarnings("ignore")  # of torch's own, in tracing
@pytest.mark.parametrize(
    "name", ["k-tied, k = 2", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_the_exported_module_takes_batches_of_any_size(name):
    model, guide = make(GUIDES[name])
    moments = ps.moments.NetMoments(model, guide).eval()
    with torch.no_grad():
        module = exported(moments, X)
        for x in (X[:5], X.repeat(3, 1)):
            torch.testing.assert_close(module(x), moments(x))


CONVOLUTIONS = {
    "dense": lambda: [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)],
    "grouped": lambda: [nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Conv2d(4, 2, 2), nn.Flatten()],
    "units": lambda: [nn.Flatten(), nn.Linear(32, 3), nn.Tanh(), nn.Linear(3, 2)],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("net", "make_guide", "covariance"),
    [
        pytest.param("dense", ps.KTiedGuide, "diagonal", marks=pytest.mark.slow),
        ("grouped", ps.FullCovarianceGuide, "diagonal"),
        pytest.param("units", ps.LowRankGuide, "full", marks=pytest.mark.slow),
    ],
)
def test_products_of_a_batch_are_exported_for_any_size(net, make_guide, covariance):
    x = torch.randn(5, 2, 4, 4)
    net = nn.Sequential(*CONVOLUTIONS[net]())
    model = ps.Classifier(ps.bayesianize(net, prior=1.0), num_data=5)
    moments = ps.moments.NetMoments(model, make_guide(model, init_scale=0.3), covariance).eval()
    with torch.no_grad():
        module = exported(moments, x)
        for own in (x[:3], x.repeat(2, 1, 1, 1)):
            torch.testing.assert_close(module(own), moments(own))


@pytest.mark.filterwarnings("ignore")
def test_means_over_positions_are_exported_and_take_numpys_names():
    pool = Function(lambda h: h.mean(axis=1, keepdims=True).squeeze(1))
    net = ps.bayesianize(nn.Sequential(nn.Linear(3, 4), pool), prior=1.0)
    model = ps.Classifier(net, num_data=6)
    guide = ps.MeanFieldGuide(model, init_scale=0.3)
    moments, x = ps.moments.NetMoments(model, guide).eval(), torch.randn(6, 5, 3)
    with torch.no_grad():
        mean, variance = moments(x)
        torch.testing.assert_close(mean, guide.to_net()(x))
        scale = guide["net.0.weight"]().variance, guide["net.0.bias"]().variance
        each = x.square() @ scale[0].mT + scale[1]
        torch.testing.assert_close(variance, each.sum(1) / 25)
        module = exported(moments, x)
        for own in (x[:4], x.repeat(2, 1, 1)):
            torch.testing.assert_close(module(own), moments(own))


@pytest.mark.filterwarnings("ignore")
def test_compiled_moments_are_the_same():
    net = nn.Sequential(nn.Linear(3, 2), Function(lambda h: 2 * h + h.tanh()))
    model = ps.Classifier(ps.bayesianize(net, prior=1.0), num_data=6)
    moments, x = ps.moments.NetMoments(model, ps.KTiedGuide(model)).eval(), torch.randn(6, 3)
    expected = moments(x)
    torch.testing.assert_close(torch.compile(moments, backend="eager")(x), expected)
    with torch.no_grad():
        compiled = torch.compile(exported(moments, x), backend="eager")
        torch.testing.assert_close(compiled(x), expected)


@pytest.mark.parametrize("predict", [partial(ps.predict, num_samples=3), ps.predict_moments])
def test_a_prediction_can_be_differentiated(predict):
    model, guide = make(ps.MeanFieldGuide)

    def variance(x):
        torch.manual_seed(0)
        found = predict(model, guide, x, differentiable=True)
        return found.mean.sum(-1), found.function_variance.sum(-1), found.entropy

    x = (X[:2] + 0.05).requires_grad_(True)
    assert torch.autograd.gradcheck(variance, x)
    weight = guide["net.0.weight"].loc
    (gradient,) = torch.autograd.grad(variance(x)[1].sum(), weight)
    assert bool(gradient.any())
    assert not predict(model, guide, x).mean.requires_grad


def last_layer(frozen):
    features = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5))
    net = ps.LastLayer(features, nn.Linear(4, 3), prior=1.0, frozen=frozen)
    model = ps.Classifier(net, num_data=12)
    guide = ps.FullCovarianceGuide(model, init_scale=0.3)
    guide.initialize(X)
    return model, guide


Y = torch.tensor([0, 1, 2, 2, 1, 0])


def test_jensens_bound_is_that_of_the_dense_moments_and_below_the_expectation():
    model, guide = last_layer(frozen=True)
    loc, covariance = output_moments(guide, model.net.features(X))
    means = loc[range(6), Y] - torch.logsumexp(loc + variances(covariance) / 2, -1)
    found = {
        name: ps.StructuredELBO(estimator=name).terms(model, guide, X, Y).log_likelihood["obs"]
        for name in ("bound", "moments")
    }
    torch.testing.assert_close(found["bound"], 2 * means.sum())
    assert found["bound"] < found["moments"] < found["bound"] + 5


@pytest.mark.parametrize("frozen", [True, False])
def test_features_are_frozen_or_trained_along(frozen):
    model, guide = last_layer(frozen)
    model.num_data = len(X)
    before = [value.clone() for value in model.net.features.parameters()]
    elbo = ps.StructuredELBO(estimator="bound")
    ps.fit(model, guide, (X, Y), num_steps=3, elbo=elbo, progress=False)
    after = list(model.net.features.parameters())
    same = [torch.equal(*pair) for pair in zip(before, after, strict=True)]
    assert all(same) if frozen else not any(same)
    assert model.net.features.training is not frozen
    assert set(guide.site_names) == {"net.head.weight", "net.head.bias"}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        return x @ (self.weight.flip(0) / 2).T


@pytest.mark.filterwarnings("ignore")  # of torch's own, in tracing
def test_a_function_of_a_correlated_weight_is_exported_and_trained():
    model = ps.Regressor(ps.bayesianize(Scaled(), prior=1.0), 5, noise_scale=0.3)
    guide, x = ps.MatrixNormalGuide(model, init_scale=0.1), torch.randn(5, 3)
    moments = ps.moments.NetMoments(model, guide).eval()
    with torch.no_grad():
        torch.testing.assert_close(exported(moments, x)(x), moments(x))
    elbo = ps.StructuredELBO(estimator="moments")
    history = ps.fit(model, guide, (x, torch.randn(5, 4)), num_steps=3, elbo=elbo, progress=False)
    assert torch.tensor(history.elbo).isfinite().all()


SINGLE = {"weight": 0.5, "*": None}  # a net of one site


@pytest.mark.parametrize("prior", [0.5, SINGLE], ids=["two sites", "one site"])
@pytest.mark.parametrize("family", [Subnetwork(), Members(3)], ids=["subnetwork", "members"])
def test_sites_that_are_drawn_jointly_are_refused(family, prior):
    model = ps.Classifier(ps.bayesianize(nn.Linear(3, 2), prior), num_data=6)
    guide, y = ps.StructuredGuide(model, {"*": family}, init_scale=0.3), torch.arange(6) % 2
    elbo = ps.StructuredELBO(estimator="moments")
    uses = (
        lambda: ps.predict_moments(model, guide, X),
        lambda: ps.moments.NetMoments(model, guide)(X),
        lambda: elbo.terms(model, guide, X, y),
    )
    if prior is SINGLE and isinstance(family, Members):  # exact
        members = guide["net.weight"]().members
        outputs = X @ members.mT + model.net.bias
        found = ps.moments.NetMoments(model, guide)(X)
        torch.testing.assert_close(found[0], outputs.mean(0))
        torch.testing.assert_close(found[1], outputs.var(0, correction=0))
        return
    for use in uses:
        with pytest.raises(NotImplementedError, match="are drawn jointly"):
            use()
