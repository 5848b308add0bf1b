"""Moments as a module: exported, differentiated, and of a net whose last layer alone is random."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import Members, Subnetwork
from pyro_structvi.moments import RandomTensor, Settings
from pyro_structvi.moments.own_draws import OwnDraws
from pyro_structvi.testing import guides_for
from tests.moments.one_layer import Function, output_moments, variances
from tests.moments.signs import assert_same, known

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


@pytest.mark.slow
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


# ---- functions that draw, of known inputs ---------------------------------------------------------

P = 0.3


def dropped_features():
    features = nn.Sequential(nn.Linear(3, 4), Function(lambda h: F.dropout(h.tanh(), P)))
    return ps.LastLayer(features, nn.Linear(4, 2), prior=1.0)


def dropped_inputs():
    return ps.bayesianize(nn.Sequential(nn.Dropout(P), nn.Linear(3, 2)), prior=1.0)


NETS = {
    "features": (dropped_features, "net.head", lambda net, x: net.features[0](x).tanh()),
    "inputs": (dropped_inputs, "net.1", lambda net, x: x),
}


def dropped(name):
    """Return model and guide, and the exact mean and covariance of the net's output at X."""
    make_net, layer, inputs = NETS[name]
    model = ps.Regressor(make_net(), num_data=6, noise_scale=0.3).train()
    guide = ps.MeanFieldGuide(model, init_scale=0.2)
    q, of_bias = guide[f"{layer}.weight"](), guide[f"{layer}.bias"]()
    h = inputs(model.net, X)
    of_dropped = h.square() * P / (1 - P)
    covariance = torch.einsum("ni,oi,pi->nop", of_dropped, q.mean, q.mean)
    of_weights = h.square() / (1 - P) @ q.variance.mT + of_bias.variance
    return model, guide, (h @ q.mean.mT + of_bias.mean, covariance + torch.diag_embed(of_weights))


@pytest.mark.parametrize("name", NETS)
def test_dropout_of_what_is_known_has_its_variance_and_no_draws(name):
    model, guide, (mean, covariance) = dropped(name)
    found = ps.moments.NetMoments(model, guide)(X)
    torch.testing.assert_close(found, (mean, variances(covariance)))
    found = ps.moments.NetMoments(model, guide, covariance="full")(X)
    torch.testing.assert_close(found, (mean, covariance))
    y = torch.zeros(6, 2)
    terms = ps.StructuredELBO(estimator="moments").terms(model, guide, X, y)
    likelihood = torch.distributions.Normal(mean, 0.3).log_prob(y) - variances(covariance) / 0.18
    torch.testing.assert_close(terms.log_likelihood["obs"], likelihood.sum())


def test_a_prediction_in_one_pass_has_the_variance_of_dropped_features():
    model, guide, (mean, covariance) = dropped("features")
    prediction = ps.predict_moments(model, guide, X)
    torch.testing.assert_close(prediction.mean, mean)
    torch.testing.assert_close(prediction.function_variance, variances(covariance))


def test_jensens_bound_is_that_given_the_dropped_features():
    model, guide = last_layer(frozen=False)
    torch.manual_seed(0)
    loc, covariance = output_moments(guide, model.net.features(X))
    means = loc[range(6), Y] - torch.logsumexp(loc + variances(covariance) / 2, -1)
    torch.manual_seed(0)
    found = ps.StructuredELBO(estimator="bound").terms(model, guide, X, Y).log_likelihood["obs"]
    torch.testing.assert_close(found, 2 * means.sum())


def dropped_attention(x):
    weights = F.dropout((known(x) @ known(x).mT / 2).softmax(-1), P)
    return weights @ x


def dropped_heads(layer, x):
    """Return the layer's output for known inputs, by its parts, and its weights."""
    parts = F.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in parts)
    weights = F.dropout(known((q @ k.mT / 2**0.5).softmax(-1)), P)
    return layer.out_proj((weights @ v).transpose(1, 2).flatten(2)), weights.mean(1)


def dropped_steps(layer, x):
    parts = [nn.GRU(size, 3, batch_first=True) for size in (4, 3)]
    for number, part in enumerate(parts):
        for name, value in part.named_parameters():
            value.data = getattr(layer, name.replace("l0", f"l{number}")).data
    return parts[1](F.dropout(known(parts[0](x)[0]), P))[0]


ATTENTION = nn.MultiheadAttention(4, 2, P, batch_first=True)
GRU = nn.GRU(4, 3, 2, dropout=P, batch_first=True)
# A function with dropout, and the same for an input that is random without variance.
DRAWING = {
    **{
        each.__name__: (partial(each, p=P, training=True), lambda x, f: f(known(x)))
        for each in (F.dropout, F.dropout1d)
    },
    "torch's own": (lambda x: torch.dropout(x, P, train=True), lambda x, _: F.dropout(known(x), P)),
    "channels": (
        lambda x: torch.feature_dropout(x, p=P, train=True),
        lambda x, _: F.dropout1d(known(x), P),
    ),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=P),
        lambda x, _: dropped_attention(x),
    ),
    "heads": (lambda x: ATTENTION(x, x, x)[0], lambda x, _: dropped_heads(ATTENTION, x)[0]),
    "heads without weights": (
        lambda x: ATTENTION(x, x, x, need_weights=False)[0],
        lambda x, _: dropped_heads(ATTENTION, x)[0],
    ),
    "between layers": (lambda x: GRU(x)[0], lambda x, _: dropped_steps(GRU, x)),
}


@pytest.mark.parametrize("name", DRAWING)
def test_functions_that_call_dropout_have_its_moments(name):
    function, expected = DRAWING[name]
    x = torch.randn(2, 5, 4)
    for module in (ATTENTION, GRU):
        module.double().requires_grad_(False)
    with OwnDraws(Settings()):
        found = function(x)
    assert found.variance.min() > 0
    assert_same(found, expected(x, function))


def test_what_draws_nothing_is_left_to_torch():
    x, state = torch.randn(2, 5, 4), torch.get_rng_state()
    gru = nn.GRU(4, 3, 1, batch_first=True)  # which has no layers to drop between
    for function in (
        *(partial(each, p=P, training=False) for each in (F.dropout, F.alpha_dropout)),
        partial(F.dropout, p=0.0),
        lambda x: torch.dropout(x, P, train=False),
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: nn.MultiheadAttention(4, 2, P, batch_first=True).eval()(x, x, x)[0],
        lambda x: gru(x)[0],
        F.rrelu,
    ):
        torch.set_rng_state(state)
        with OwnDraws(Settings()), torch.no_grad():
            found = function(x)
        torch.set_rng_state(state)
        assert not isinstance(found, RandomTensor)
        assert torch.equal(found, function(x))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (partial(F.alpha_dropout, training=True), "Alpha dropout has no moments"),
        (partial(F.feature_alpha_dropout, training=True), "Alpha dropout has no moments"),
        (partial(F.rrelu, training=True), "RReLU has no moments where it draws slopes"),
        (nn.Dropout(P, inplace=True), "`dropout` would make a known tensor random in place"),
        (lambda x: torch.dropout_(x, P, True), "`dropout_` would make a known tensor random"),
        (
            nn.MultiheadAttention(4, 2, P, add_zero_attn=True),
            "`multi_head_attention_forward` has no",
        ),
    ],
)
@pytest.mark.parametrize("linearize", [False, True])
def test_what_draws_without_moments_is_refused(function, message, linearize):
    x = torch.randn(2, 5, 4)
    arguments = (x, x, x) if isinstance(function, nn.MultiheadAttention) else (x,)
    with OwnDraws(Settings(linearize=linearize)), pytest.raises(NotImplementedError, match=message):
        function(*arguments)
