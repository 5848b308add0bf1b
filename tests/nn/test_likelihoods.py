"""Likelihoods around a net, of examples and of tokens."""

import math

import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from scipy.special import logsumexp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_structvi as ps
from pyro_structvi.infer.data_warnings import NumDataWarning
from pyro_structvi.nn.tokens import PaddedCategorical
from pyro_structvi.posterior.one_pass import student_t_plus_normal_log_prob


def log_likelihood(model, values, x, y):
    trace = poutine.trace(poutine.condition(model, values)).get_trace(x, y)
    return trace.log_prob_sum(lambda name, site: name == "obs")


def draw(model, x):
    trace = poutine.trace(model).get_trace(x)
    return {
        name: trace.nodes[name]["value"]
        for name in trace.stochastic_nodes
        if name not in ("data", "obs")
    }


def normal(outputs, y, scale):
    return torch.distributions.Normal(outputs, scale).log_prob(y)


COUNTS, LABELS = torch.randint(9, (6, 2)), torch.randint(2, (6, 2))
CLASSES, TARGETS = torch.randint(4, (6,)), torch.randn(6, 2, dtype=torch.float64)
ONE_LABEL = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
GIVEN = torch.tensor([0.1, 0.2], dtype=torch.float64)
TAGS, TOKENS = nn.Sequential(nn.Unflatten(1, (3, 1)), nn.Linear(1, 4)), torch.randint(4, (6, 3))
TOKENS[:, -1] = -100
DENSITIES = {  # the log densities of observations, by the net's outputs and the scale of noise
    "classes": (ps.Classifier, nn.Linear(3, 4), {}, CLASSES, lambda f, y, _: -ce(f, y)),
    "given": (ps.Regressor, nn.Linear(3, 2), {"noise_scale": GIVEN}, TARGETS, normal),
    "gamma": (ps.Regressor, nn.Linear(3, 2), {"noise_scale": dist.Gamma(2, 3)}, TARGETS, normal),
    "noise": (ps.Regressor, nn.Linear(3, 2), {"noise": 0.3}, TARGETS, normal),
    "learned": (ps.Regressor, nn.Linear(3, 2), {"noise": "learned"}, TARGETS, normal),
    "heteroscedastic": (
        *(ps.Regressor, nn.Linear(3, 4), {"noise": "heteroscedastic"}, TARGETS),
        lambda f, y, _: normal(f[:, :2], y, (1 + f[:, 2:].exp()).log()),
    ),
    "student": (
        *(ps.Regressor, nn.Linear(3, 2), {"noise": 0.3, "df": 3}, TARGETS),
        lambda f, y, scale: torch.tensor(scipy.stats.t(3, f, scale).logpdf(y)),
    ),
    "labels": (ps.BinaryClassifier, nn.Linear(3, 2), {}, LABELS == 1, lambda f, y, _: -bce(f, y)),
    "one label": (ps.BinaryClassifier, ONE_LABEL, {}, LABELS[:, 0], lambda f, y, _: -bce(f, y)),
    "counts": (
        *(ps.PoissonRegressor, nn.Linear(3, 2), {}, COUNTS),
        lambda f, y, _: torch.tensor(scipy.stats.poisson(f.exp()).logpmf(y)),
    ),
    "tokens": (ps.TokenClassifier, TAGS, {}, TOKENS, lambda f, y, _: -ce(f.mT, y)),
    "shifted": (
        *(ps.TokenClassifier, TAGS, {"shift": True, "ignore_index": 0}, TOKENS.clamp_min(0)),
        lambda f, y, _: -ce(f[:, :-1].mT, y[:, 1:], ignore_index=0),
    ),
}


def ce(outputs, y, **options):
    return F.cross_entropy(outputs, y, reduction="none", **options)


def bce(outputs, y):
    return F.binary_cross_entropy_with_logits(outputs, y.double(), reduction="none")


@pytest.mark.parametrize("name", DENSITIES)
def test_the_log_likelihood_is_scaled_to_all_data(name):
    kind, net, options, y, density = DENSITIES[name]
    model, x = kind(ps.bayesianize(net.double()), num_data=60, **options), torch.randn(6, 3)
    values = draw(model, x)
    outputs = poutine.condition(model.net, values)(x)
    scale = values.get("noise_scale", getattr(model, "noise_scale", None))
    expected = 10 * density(outputs, y, scale).sum()
    torch.testing.assert_close(log_likelihood(model, values, x, y), expected)
    returned = poutine.condition(model, values)(x)
    parts = {"heteroscedastic": (..., slice(2)), "shifted": (slice(None), slice(-1))}
    torch.testing.assert_close(returned, outputs[parts.get(name, ...)])
    if name == "gamma":
        single = draw(model.float(), torch.zeros(1, 3, dtype=torch.float32))
        assert single["noise_scale"].dtype == torch.float32, "its prior moves with the model"


def test_counts_have_their_density_and_gradient_at_extreme_rates():
    """In single precision, where rates are zero or terms of large counts cancel."""
    logs = torch.tensor([[-200.0], [-90.0], [9.2], [13.8], [18.4]]).float().requires_grad_()
    y = torch.tensor([[1.0], [0.0], [1e4], [1e6], [1e8]])
    model = ps.PoissonRegressor(nn.Identity(), num_data=5)
    found = log_likelihood(model, {}, logs, y)
    f, count = logs.detach().double(), y.double()
    expected = (count * f - f.exp() - torch.lgamma(count + 1)).sum()
    torch.testing.assert_close(found, expected.float())
    (gradient,) = torch.autograd.grad(found, logs)
    torch.testing.assert_close(gradient, (count - f.exp()).float(), rtol=1e-6, atol=0)
    never = torch.full((1, 1), -torch.inf).float().requires_grad_()  # without exposure
    found = log_likelihood(model, {}, never, torch.zeros(1, 1))
    assert (found, *torch.autograd.grad(found, never)) == (0, 0)
    drawn = poutine.trace(model).get_trace(torch.full((1, 1), 50.0)).nodes["obs"]["value"]
    assert drawn.item() == pytest.approx(math.exp(50)), "not the largest number of int64"


def test_noise_of_many_degrees_of_freedom_has_its_density_in_single_precision():
    """Its normalization is a difference of numbers of their size."""
    model = ps.Regressor(nn.Identity(), 1, noise_scale=0.3, df=1e8).float()
    x, y = torch.full((1, 1), 0.2).float(), torch.full((1, 1), 0.7).float()
    expected = scipy.stats.t(1e8, x.item(), 0.3).logpdf(y.item())
    assert log_likelihood(model, {}, x, y).item() == pytest.approx(expected, abs=1e-5)
    of_sum = student_t_plus_normal_log_prob(y - x, *torch.tensor([1e6, 0.3, 1e-12]).float())
    assert of_sum.item() == pytest.approx(expected, abs=1e-5)


def test_learned_noise_has_a_half_normal_prior():
    model = ps.Regressor(ps.bayesianize(nn.Linear(3, 2)), 60, noise="learned")
    prior = poutine.trace(model).get_trace(torch.zeros(6, 3)).nodes["noise_scale"]["fn"]
    value = torch.tensor(0.7)
    torch.testing.assert_close(prior.log_prob(value), dist.HalfNormal(1.0).log_prob(value))


@pytest.mark.parametrize("df", ["learned", dist.Exponential(0.2)])
def test_learned_degrees_of_freedom_are_above_one(df):
    """Each draw of them has the density of its own, and the prior is that of the excess."""
    model = ps.Regressor(nn.Identity(), 6, 0.3, df=df)
    prior = dist.Gamma(2.0, 0.1) if df == "learned" else df
    found = poutine.trace(model).get_trace(torch.zeros(6, 2)).nodes["df_minus_one"]["fn"]
    value = torch.tensor(7.0)
    torch.testing.assert_close(found.log_prob(value), prior.log_prob(value))
    x, y, excess = torch.randn(6, 2), torch.randn(6, 2), torch.tensor([0.5, 3.0, 40.0])
    density = ps.predict(model, {"df_minus_one": excess}, x, y=y).log_density
    each = [scipy.stats.t(1 + e, x, 0.3).logpdf(y).sum(-1) for e in excess.numpy()]
    torch.testing.assert_close(density, torch.tensor(logsumexp(each, 0) - math.log(3)))


@pytest.mark.parametrize(
    "make", [lambda net: ps.Classifier(net), lambda net: ps.Regressor(net, noise_scale=0.1)]
)
def test_fit_tells_the_model_how_many_examples_there_are(make):
    model = make(ps.bayesianize(nn.Linear(3, 2)))
    guide, x = ps.MeanFieldGuide(model), torch.zeros(6, 3)
    y = torch.zeros(6, dtype=torch.long) if isinstance(model, ps.Classifier) else torch.zeros(6, 2)
    assert poutine.block(model)(x).shape == (6, 2)
    with pytest.raises(ValueError, match=r"`num_data`.*train by `fit`"):
        ps.StructuredELBO().terms(model, guide, x, y)
    for size in (6, 4):  # what `fit` has set, it sets anew
        data = x[:size], y[:size]
        for form in (data, DataLoader(TensorDataset(*data), 3), TensorDataset(*data)):
            options = {} if isinstance(form, DataLoader) else {"batch_size": 2}
            ps.fit(model, guide, form, num_steps=1, progress=False, **options)
            assert model.num_data == size
    with pytest.raises(ValueError, match=r"`num_data` must be given.*(Classifier|Regressor)\(net"):
        ps.fit(model, guide, [(x, y)], num_steps=1, progress=False)


def test_fit_names_both_numbers_of_examples():
    model = ps.Regressor(ps.bayesianize(nn.Linear(3, 2)), 7, 0.1)
    guide, data = ps.MeanFieldGuide(model), (torch.zeros(6, 3), torch.zeros(6, 2))
    with pytest.warns(NumDataWarning, match=r"num_data=7 examples, and `data` has 6"):
        ps.fit(model, guide, data, num_steps=1, progress=False)
    assert model.num_data == 7


def test_class_weights_are_those_of_torch():
    weights = torch.tensor([0.5, 1.0, 4.0])
    x, y = torch.randn(6, 3), torch.tensor([0, 1, 2, 2, 0, 1])
    model = ps.Classifier(ps.bayesianize(nn.Linear(3, 3)), 60, class_weights=weights)
    guide = ps.MeanFieldGuide(model, init_scale=1e-9)
    guide.initialize(x, y)
    logits = F.linear(x, *guide.median().values())
    loss = F.cross_entropy(logits, y, weights, reduction="sum")
    for estimator in ("draws", "moments", "bound"):
        terms = ps.StructuredELBO(estimator=estimator).terms(model, guide, x, y.byte())
        torch.testing.assert_close(terms.log_likelihood["obs"], -10 * loss, rtol=1e-6, atol=0)
    density = ps.predict(model, guide, x, num_samples=2, y=y).log_density
    torch.testing.assert_close(density, -ce(logits, y), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("df", [None, 5.0])
def test_a_floor_of_the_noise_adds_to_its_variance(df):
    net, x = nn.Linear(3, 2), torch.randn(6, 3)
    y = 7.0 * x[:, :1]
    model = ps.Regressor(net, 6, **HETERO, df=df, noise_floor=0.2, standardize=(x, y))

    def noise():
        return poutine.trace(model).get_trace(x).nodes["obs"]["fn"].base_dist

    with torch.no_grad():
        raw = net((x - x.mean(0)) / x.std(0, correction=0))[:, 1:]
    unit = y.std(correction=0)
    expected = (F.softplus(raw) ** 2 + 0.04).sqrt() * unit
    torch.testing.assert_close(noise().scale, expected)
    nn.init.constant_(net.bias, -300.0)
    torch.testing.assert_close(noise().scale, (0.2 * unit).expand(6, 1))


# ---- bad input -----------------------------------------------------------------------------------


HETERO = {"noise": "heteroscedastic"}
RIGHT_WEIGHTS, WRONG_WEIGHTS = ({"class_weights": torch.ones(size)} for size in (2, 3))


@pytest.mark.parametrize(
    ("kind", "options", "x", "y", "message"),
    [
        (ps.Classifier, {}, (6, 3), torch.zeros(5).long(), r"shape \(batch,\) = \(6,\), but got"),
        (ps.Classifier, {}, (6, 3), torch.zeros(6), "`y` must hold classes as integers, but got"),
        (ps.Classifier, {}, (6, 5, 3), None, r"shape \(batch, classes\), but got \(6, 5, 2\)"),
        (ps.Classifier, WRONG_WEIGHTS, (2, 3), torch.tensor([0, 1]), "`class_weights` must h"),
        (ps.Classifier, RIGHT_WEIGHTS, (2, 3), torch.tensor([0, 2]), "classes count from 0"),
        (ps.TokenClassifier, {}, (6, 3), None, r"\(batch, length, classes\), but got \(6, 2\)"),
        (ps.TokenClassifier, {}, (6, 0, 3), None, r"at least one token, but .* \(6, 0, 2\)"),
        (ps.TokenClassifier, {"shift": True}, (6, 1, 3), None, r"tokens?.* two with `shift=True`"),
        (ps.TokenClassifier, {}, (6, 5, 3), torch.zeros(6).long(), r"shape .* = \(6, 5\), but got"),
        (ps.BinaryClassifier, {}, (6, 3), torch.zeros(6), r"that of the net's output = \(6, 2\)"),
        (ps.Regressor, {"noise": 1.0}, (6, 3), torch.zeros(6), r"net's output = \(6, 2\), but got"),
        (ps.Regressor, HETERO, (6, 3), torch.zeros(6, 2), r"that of the means = \(6, 1\)"),
        (ps.Regressor, {"noise": torch.ones(3)}, (6, 3), None, "broadcast to the shape of a targ"),
    ],
)
def test_data_that_do_not_fit(kind, options, x, y, message):
    model = kind(nn.Linear(3, 2), 6, **options)
    with pytest.raises(ValueError, match=message):
        poutine.block(model)(torch.zeros(x), y)
    with pytest.raises(ValueError, match=r"2 \* size\), under heteroscedastic.*got \(6, 3\)"):
        ps.Regressor(nn.Linear(3, 3), 6, **HETERO)(torch.zeros(6, 3))
    with pytest.raises(ValueError, match="`df` must be a finite number above 1"):
        ps.Regressor(nn.Linear(3, 2), 6, 0.1, df=1.0)
    for options in ({"noise": dist.Normal(1.0, 0.1)}, {"noise": 0.1, "df": dist.Normal(5.0, 1.0)}):
        with pytest.raises(TypeError, match="a distribution over positive numbers"):
            ps.Regressor(nn.Linear(3, 2), 6, **options)
    with pytest.raises(ValueError, match="`noise_scale` must be given"):
        ps.Regressor(nn.Linear(3, 2), 6, 0.1, noise=0.1)
    with pytest.raises(ValueError, match=r"`noise_floor` is of .*, but got 0.2 for `noise_scale`"):
        ps.Regressor(nn.Linear(3, 2), 6, 0.1, noise_floor=0.2)


@pytest.mark.parametrize("name", ["regression", "classes"])
def test_an_example_of_weight_two_counts_twice(name):
    """And one of weight zero not at all."""
    net = nn.Linear(3, 2)
    model = ps.Regressor(net, 5, 0.3) if name == "regression" else ps.Classifier(net, 5)
    x = torch.randn(5, 3)
    y = torch.randn(5, 2) if name == "regression" else torch.randint(2, (5,))
    weights = torch.tensor([2.0, 1.0, 0.0, 1.0, 0.5])

    def log_likelihood(*data):
        return poutine.trace(model).get_trace(*data).log_prob_sum()

    each = torch.stack([log_likelihood(x[i : i + 1], y[i : i + 1]) / 5 for i in range(5)])
    torch.testing.assert_close(log_likelihood(x, y, weights), (weights * each).sum())
    with pytest.raises(ValueError, match="`weights` must not be negative"):
        model(x, y, -weights)
    with pytest.raises(ValueError, match="`weights` must have shape"):
        model(x, y, weights[:4])


# ---- standardization -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "outputs"), [(0.3, 2), ("heteroscedastic", 4), (dist.LogNormal(0.0, 1.0), 2)]
)
def test_a_standardized_regressor_is_the_model_of_standardized_data(noise, outputs):
    x = torch.randn(12, 3) * torch.tensor([1.0, 1e4, 1e-3]) + 7.0
    y = 5000 + 1000 * torch.randn(12, 2)
    x[:, 2] = 1.5  # a constant
    net = ps.bayesianize(nn.Linear(3, outputs), prior=1.0)
    model = ps.Regressor(net, 12, noise=noise, standardize=(x, y))
    plain = ps.Regressor(ps.bayesianize(nn.Linear(3, outputs), prior=1.0), 12, noise=noise)
    z = (x - x.mean(0)) / torch.tensor([*x.std(0, correction=0)[:2], 1.0])
    center, scale = y.mean(0), y.std(0, correction=0)
    values = ps.MAPGuide(plain).draw()
    found, expected = (
        poutine.trace(poutine.condition(own, values)).get_trace(*data)
        for own, data in ((model, (x, y)), (plain, (z, (y - center) / scale)))
    )
    difference = found.log_prob_sum() - expected.log_prob_sum()
    torch.testing.assert_close(difference, -12 * scale.log().sum())
    returned = [trace.nodes["_RETURN"]["value"] for trace in (found, expected)]
    torch.testing.assert_close(returned[0], returned[1] * scale + center)
    draws = {name: value.unsqueeze(0) for name, value in values.items()}
    predictions = ps.predict(model, draws, x), ps.predict(plain, draws, z)
    torch.testing.assert_close(
        predictions[0].variance, predictions[1].variance * scale.square(), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("constant", [0.1, 1 / 3, 123.456])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_has_the_scale_one(constant, dtype):
    """Also where the mean of its column rounds, so that the computed deviation is not zero."""
    column = torch.full((333, 1), constant, dtype=dtype)
    model = ps.Regressor(nn.Linear(1, 1), noise=0.1, standardize=(column, column))
    assert float(model.input_scale) == float(model.target_scale) == 1


def test_scales_are_saved_with_the_model():
    x = torch.randn(12, 3) * 100
    make = lambda x: ps.Classifier(nn.Linear(3, 2), 12, standardize=x)  # noqa: E731
    model, other = make(x), make(torch.randn(5, 3))
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x), model(x))
    torch.testing.assert_close(model(x), model.net((x - x.mean(0)) / x.std(0, correction=0)))


def test_data_without_scales_are_refused():
    for wrong in (torch.zeros(1, 3), torch.zeros(4, 3).long(), torch.full((4, 3), torch.nan)):
        with pytest.raises(ValueError, match=r"`standardize` (must|holds)"):
            ps.Classifier(nn.Linear(3, 2), 4, standardize=wrong)
    data = torch.randn(4, 3), torch.randn(4, 2)
    for options in ({"noise_scale": 0.1}, {"noise": "heteroscedastic"}):
        # One mean for two targets, whose scales would give it their shape.
        net = nn.Linear(3, 2 if "noise" in options else 1)
        with pytest.raises(ValueError, match=r"`standardize\[1\].* \(1,\), but got shape \(2,\)"):
            ps.Regressor(net, 4, standardize=data, **options)(*data)
    model = ps.Classifier(nn.Linear(3, 2), 4, standardize=torch.randn(4, 3))
    with pytest.raises(TypeError, match="`x` must be a tensor for a model with `standardize`"):
        model({"input": torch.randn(4, 3)})


# ---- tokens --------------------------------------------------------------------------------------


def test_padding_has_no_gradient_and_stays_when_a_padded_categorical_grows():
    y = torch.randint(4, (6, 5))
    y[:, -2:] = -100
    logits = torch.randn(6, 5, 4, requires_grad=True)
    PaddedCategorical(logits=logits).log_prob(y).sum().backward()
    assert not logits.grad[:, -2:].any()
    assert logits.grad[:, :-2].any()
    tokens = PaddedCategorical(logits=torch.zeros(3, 2), ignore_index=7).expand((4, 3))
    assert tokens.log_prob(torch.full((4, 3), 7)).eq(0).all()
    own = PaddedCategorical(logits=torch.zeros(1, 256)).log_prob(torch.tensor([156]).byte())
    torch.testing.assert_close(own, -torch.tensor([256.0]).log())
    with pytest.raises(ValueError, match="within the support"):
        PaddedCategorical(logits=torch.zeros(3, 2), validate_args=True).log_prob(torch.tensor(5))
