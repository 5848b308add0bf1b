"""predict: moments, densities, streaming, batches, every kind of posterior."""

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.nn.functional as F
from pyro.infer.autoguide import AutoNormal
from torch import nn

import pyro_structvi as ps
from pyro_structvi.infer.validation import mean_log_density
from tests.models import linear_function, make_classifier, make_regressor, regression_data
from tests.posterior.passed_models import draws_of
from tests.unit_noise import assert_draws


def wide_guide(model):
    return ps.KTiedGuide(model, init_scale=0.3)


def seeded(seed, *args, predict=ps.predict, **options):
    torch.manual_seed(seed)
    return predict(*args, **options)


def test_regression_moments_are_those_of_the_function_values():
    model, (x, y) = make_regressor(), regression_data()
    prediction = ps.predict(model, wide_guide(model), x, num_samples=50, y=y)
    functions, close = prediction.functions, torch.testing.assert_close
    assert functions.shape == (50, 12, 1)
    close(prediction.mean, functions.mean(0))
    close(prediction.function_variance, functions.var(0, correction=0))
    close(prediction.variance, functions.var(0, correction=0) + 0.3**2)
    densities = torch.distributions.Normal(functions, 0.3).log_prob(y).sum(-1)
    close(prediction.log_density, densities.logsumexp(0) - math.log(50))
    assert prediction.entropy is None
    assert prediction.num_samples == 50
    assert not prediction.mean.requires_grad


@pytest.mark.parametrize("memory", [1.0, 1e-9])
def test_noise_without_a_variance_has_an_infinite_one(memory):
    model = ps.Regressor(ps.bayesianize(nn.Linear(3, 1)), 12, noise_scale=0.3, df=1.5)
    prediction = ps.predict(model, wide_guide(model), torch.randn(4, 3), max_memory=memory)
    assert torch.isposinf(prediction.variance).all()
    assert prediction.function_variance.isfinite().all()


def test_classification_moments_are_those_of_the_logits():
    model, x, y = make_classifier(), torch.randn(9, 3), torch.randint(4, (9,))
    prediction = ps.predict(model, wide_guide(model), x, num_samples=50, y=y)
    probabilities, close = prediction.functions.softmax(-1), torch.testing.assert_close
    mean = probabilities.mean(0)
    close(prediction.mean, mean)
    close(prediction.variance, mean * (1 - mean))
    close(prediction.entropy, -(mean * mean.log()).sum(-1))
    of_draws = -(probabilities * probabilities.log()).sum(-1).mean(0)
    close(prediction.mutual_information, prediction.entropy - of_draws)
    assert (prediction.mutual_information >= 0).all()
    close(prediction.log_density, mean.gather(1, y[:, None]).log().squeeze(1))


@pytest.mark.parametrize("batch_size", [5, 100])
def test_batches_and_streaming_change_nothing(batch_size):
    model, (x, y) = make_regressor(), regression_data()
    guide = wide_guide(model)
    whole = seeded(1, model, guide, x, num_samples=20, y=y)
    streamed = seeded(1, model, guide, x, num_samples=20, y=y, batch_size=batch_size, stream=True)
    assert streamed.functions is None
    for name in ("mean", "variance", "function_variance", "log_density"):
        torch.testing.assert_close(getattr(streamed, name), getattr(whole, name))


@pytest.mark.parametrize("method", ["draws", "moments"])
def test_a_loader_gives_inputs_or_pairs(method):
    model, (x, y) = make_regressor(), regression_data()
    guide = wide_guide(model)
    predict = ps.predict if method == "draws" else ps.predict_moments
    options = {"num_samples": 20} if method == "draws" else {}
    whole = seeded(1, model, guide, x, y=y, predict=predict, **options)
    for data in (torch.utils.data.TensorDataset(x, y), x):
        loader = torch.utils.data.DataLoader(data, batch_size=5)
        found = seeded(1, model, guide, loader, predict=predict, **options)
        torch.testing.assert_close(found.mean, whole.mean)
        torch.testing.assert_close(found.variance, whole.variance)
        assert (found.log_density is None) == (data is x)
    pairs = seeded(
        1, model, guide, iter([(x[:7], y[:7]), [x[7:], y[7:]]]), predict=predict, **options
    )
    torch.testing.assert_close(pairs.log_density, whole.log_density)
    with pytest.raises(
        ValueError, match=r"`y` and `batch_size` must be left out where `x` is a loader"
    ):
        predict(model, guide, loader, y=y, **options)
    with pytest.raises(ValueError, match=r"`x` must give at least one mini-batch"):
        predict(model, guide, iter([]), **options)


def test_the_predictive_of_a_linear_model_is_the_closed_form():
    """A draw is a function of all inputs: outputs at different inputs have the weight's correlation."""
    guide = ps.MeanFieldGuide(linear_function, init_scale=0.5)
    x = torch.randn(4, 3)
    guide.initialize(x, torch.zeros(4, 2))
    q = guide["weight"]()
    operator = torch.cat([torch.kron(torch.eye(2), row.unsqueeze(0)) for row in x])
    assert_draws(
        lambda: ps.predict(linear_function, guide, x, num_samples=1).functions.flatten(),
        operator @ q.mean.detach().flatten(),
        operator @ q.variance.detach().flatten().diag() @ operator.mT,
    )


def test_draws_by_site():
    model, x = make_regressor(), torch.randn(5, 3)
    draws = draws_of(wide_guide(model), 7)
    functions = ps.predict(model, draws, x).functions
    for index, (w0, b0, w2, b2) in enumerate(zip(*draws.values(), strict=True)):
        expected = F.linear(torch.tanh(F.linear(x, w0, b0)), w2, b2)
        torch.testing.assert_close(functions[index], expected)
    some = ps.predict(model, draws, x, num_samples=3)
    torch.testing.assert_close(some.functions, functions[[0, 3, 6]])


class Two(pyro.nn.PyroModule):
    def __init__(self):
        super().__init__()
        self.layer = ps.bayesianize(nn.Linear(3, 1))

    def forward(self, a, b, y=None):
        mean = self.layer(a + b).squeeze(-1)
        with pyro.plate("data", len(a)):
            pyro.sample("obs", dist.Normal(mean, 0.1), obs=y)
        return mean


def test_several_inputs_and_pyros_own_guides():
    model, inputs = Two(), (torch.randn(5, 3), torch.randn(5, 3))
    guide = ps.MeanFieldGuide(model)
    assert ps.predict(model, guide, inputs, num_samples=4, batch_size=2).mean.shape == (5,)
    guide = AutoNormal(model)
    guide(*inputs, torch.randn(5))
    functions = ps.predict(model, guide, inputs, num_samples=6).functions
    assert functions.shape == (6, 5)
    assert functions.std(0).min() > 0


def test_the_observed_site_must_be_unique():
    def model(x):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(1, 3), 1.0).to_event(2))
        mean = F.linear(x, weight).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("a", dist.Normal(mean, 1.0))
            pyro.sample("b", dist.Normal(mean, 2.0))

    draws, x = {"weight": torch.zeros(4, 1, 3)}, torch.zeros(5, 3)
    for options, rest in (
        ({}, ": pass its name as `site=`"),
        ({"site": "c"}, ", but got `site='c'`"),
    ):
        with pytest.raises(ValueError, match=rf"must be one of \['a', 'b'\]{rest}"):
            ps.predict(model, draws, x, **options)
    torch.testing.assert_close(ps.predict(model, draws, x, site="b").variance, 4 * torch.ones(5))
    model = make_regressor()
    for predict, inputs in ((ps.predict, (x, 100)), (ps.predict_moments, ())):
        with pytest.raises(TypeError, match=r"`inputs` must be tensors .* num_samples=100\)"):
            predict(model, ps.MeanFieldGuide(model), *inputs)


@pytest.mark.parametrize(
    "make",
    [
        lambda scale: dist.Weibull(scale, 2.0),
        lambda scale: dist.Gumbel(0.0, scale),
        dist.HalfNormal,
        dist.HalfCauchy,
        lambda scale: dist.Kumaraswamy(scale, 2.0),
        lambda scale: dist.InverseGamma(3.0, scale),
    ],
    ids=["Weibull", "Gumbel", "HalfNormal", "HalfCauchy", "Kumaraswamy", "InverseGamma"],
)
def test_the_density_where_pyro_transforms_a_distribution_of_torch(make):
    def model(x, y=None):
        scale = (x * pyro.sample("w", dist.Normal(0.0, 1.0))).exp()
        with pyro.plate("data", len(x)):
            pyro.sample("obs", make(scale), obs=y)

    x, y, draws = torch.randn(6), torch.rand(6), {"w": torch.randn(5)}
    densities = make((x * draws["w"][:, None]).exp()).log_prob(y)
    found = ps.predict(model, draws, x, y=y).log_density
    torch.testing.assert_close(found, densities.logsumexp(0) - math.log(5))


def test_masks_of_a_model_are_those_of_its_prediction():
    """Around a site, in its distribution, and of single elements; over draws and mini-batches."""
    x, y = torch.randn(6, 1), torch.randn(6, 2)
    draws, of_examples = {"w": torch.randn(5)}, x[:, 0] > 0
    of_elements = torch.stack([of_examples, ~of_examples], -1)

    def model(x, y=None, kind=None):
        w, rows = pyro.sample("w", dist.Normal(0.0, 1.0)), x[:, 0] > 0
        law, elements = dist.Normal(x * w, torch.ones(len(x), 2)), torch.stack([rows, ~rows], -1)
        law = law.mask(elements).to_event(1) if kind == "elements" else law.to_event(1)
        law = law.mask(rows) if kind == "law" else law
        with pyro.plate("data", len(x)), poutine.mask(mask=rows if kind == "site" else True):
            return pyro.sample("obs", law, obs=y)

    each = of_examples[:, None].expand(6, 2)
    for kind, expected in (("site", each), ("law", each), ("elements", of_elements)):
        found = ps.predict(partial(model, kind=kind), draws, x, y=y, batch_size=4)
        assert torch.equal(found.observed, expected)
        density = dist.Normal(x * draws["w"][:, None, None], 1.0).log_prob(y)
        known = (density * expected).sum(-1).logsumexp(0) - math.log(5)
        torch.testing.assert_close(found.log_density, known, rtol=1e-12, atol=1e-12)
        known = known if kind == "elements" else known[of_examples]
        assert mean_log_density(found, y) == pytest.approx(known.mean().item(), rel=1e-12)


@pytest.mark.parametrize("is_marked", [True, False])
def test_observations_in_plates_of_their_own_are_no_latent_sites(is_marked):
    mark = {"infer": {"is_observation": True}} if is_marked else {}

    def model(x, y=None, counts=None):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(1, 3), 1.0).to_event(2))
        mean = F.linear(x, weight).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(mean, 1.0), obs=y, **mark)
        with pyro.plate("others", 4):
            pyro.sample("counts", dist.Poisson(mean.exp().sum()), obs=counts, **mark)

    guide, x = ps.MeanFieldGuide(model), torch.randn(5, 3)
    guide.initialize(x, torch.zeros(5), torch.ones(4))
    draws = draws_of(guide, 3)
    if not is_marked:
        with pytest.raises(ValueError, match=r"missing in it: \['counts'\].* Mark observations by"):
            ps.predict(model, draws, x, site="obs")
        return
    means = F.linear(x, draws["weight"].squeeze(1)).mT
    for site, expected in (("obs", means), ("counts", means.exp().sum(-1, True).expand(3, 4))):
        prediction = ps.predict(model, draws, x, site=site)
        torch.testing.assert_close(prediction.mean, expected.mean(0))
    assert ps.predict(model, guide, x, num_samples=3, site="obs").mean.shape == (5,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 9}, "`num_samples` must be at most the 4 draws given, but got 9"),
        ({"y": torch.zeros(4, 1)}, r"must have one length, but got \[5, 4\]"),
        (
            {"x": torch.zeros(5, 3).float()},
            r"`x` must have the dtype of `net.0.weight`, torch.float64, but got torch.float32",
        ),
        (
            {"x": torch.zeros(5, 3).long()},
            r"site 'net.0.weight' must have dtype torch.float64, but",
        ),
        ({"x": {"x": [0.0, 1.0]}}, r"`x\['x'\]` must be a tensor"),
        (
            {"posterior": {"a": torch.zeros(2), "b": torch.zeros(3)}},
            r"same number of draws, but got \{'a': 2, 'b': 3\}",
        ),
        *(
            ({"y": torch.zeros(5, *rest)}, r"`y` must have shape that of the predictions = \(5, 1")
            for rest in ((), (2,))
        ),
    ],
)
def test_options_out_of_range(options, message):
    model = make_regressor()
    draws = draws_of(ps.MeanFieldGuide(model), 4)
    given = {"posterior": draws, "x": torch.zeros(5, 3).double()} | options
    with pytest.raises((TypeError, ValueError), match=message):
        ps.predict(model, given.pop("posterior"), given.pop("x"), **given)
    if "`y` must" in message:
        with pytest.raises(ValueError, match=message):
            ps.to_inference_data(model, draws, torch.zeros(5, 3), options["y"])


def method_under_a_handler(model):
    class Program:
        @pyro.poutine.scale(scale=0.5)
        def run(self, x, y=None):
            return model(x, y)

    return Program().run


class WithAttribute:
    def __init__(self, model):
        self.net = model

    def __call__(self, x, y=None):
        return self.net(x, y)

    def run(self, x, y=None):
        return self.net(x, y)

    def first(self, x, y=None):
        return self.net[0](x, y)


def with_argument(net, x, y=None):
    return net(x, y)


def with_option(x, y=None, *, net):
    return net(x, y)


def with_container(model):
    nets = {"all": [model]}
    return lambda x, y=None: nets["all"][0](x, y)


def called_by_another_function(model):
    def run(x, y):
        return model(x, y)

    return lambda x, y=None: run(x, y)


@pytest.mark.parametrize(
    "wrap",
    [
        partial(pyro.poutine.scale, scale=0.5),
        partial(pyro.poutine.reparam, config={}),
        lambda model: pyro.poutine.reparam(pyro.poutine.scale(model, 0.5), config={}),
        pyro.poutine.trace,
        lambda model: lambda x, y=None: model(x, y),
        called_by_another_function,
        method_under_a_handler,
        WithAttribute,
        lambda model: WithAttribute(model).run,
        lambda model: partial(model, weights=None),
        lambda model: partial(with_argument, model),
        lambda model: pyro.poutine.scale(partial(with_option, net=model), scale=1.0),
        with_container,
        lambda model: WithAttribute([model]).first,
    ],
)
def test_a_wrapped_model_is_evaluated_like_a_bare_one(wrap):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    model = ps.Regressor(ps.bayesianize(net, normalization=False), num_data=12, noise_scale=0.3)
    wrapped, before = wrap(model), model.net[1].running_mean.clone()
    guide = ps.MeanFieldGuide(wrapped, init_scale=1e-8)
    guide.initialize(*regression_data())
    assert torch.equal(model.net[1].running_mean, before)
    ps.fit(wrapped, guide, regression_data(), num_steps=2, progress=False)
    assert not torch.equal(model.net[1].weight, torch.ones(4))
    before = model.net[1].running_mean.clone()
    prediction = ps.predict(wrapped, guide, torch.randn(6, 3), num_samples=5)
    assert prediction.function_variance.max() < 1e-10
    assert torch.equal(model.net[1].running_mean, before)
    assert all(module.training for module in model.modules())


DROPOUT = nn.Dropout(0.5)


def test_a_net_that_only_an_inner_function_names_is_evaluated():
    """As a comprehension of Python 3.11 is one."""

    def model(x, y=None):
        def run():
            return DROPOUT(x)

        weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(run() @ weight, 1.0), obs=y)
        return run()

    x = regression_data()[0]
    trained = {"weight": torch.zeros(2, 3)}
    functions = ps.predict(model, trained, x).functions
    torch.testing.assert_close(functions, x.expand(2, *x.shape))
    assert DROPOUT.training


@pytest.mark.parametrize("stream", [False, True])
def test_mini_batches_with_the_examples_in_another_dimension_are_refused(stream):
    def model(x, y=None):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
        with pyro.plate("tasks", 3, dim=-2), pyro.plate("data", len(x), dim=-1):
            pyro.sample("obs", dist.Normal(weight @ x.T, 0.1), obs=y)

    guide = ps.MeanFieldGuide(model)
    x = torch.ones(6, 2)
    guide.initialize(x, torch.zeros(3, 6))
    assert ps.predict(model, guide, x, num_samples=2, stream=stream).mean.shape == (3, 6)
    with pytest.raises(ValueError, match=r"2 in a mini-batch, but have the shapes .*\(3, 2\)"):
        ps.predict(model, guide, x, num_samples=2, batch_size=2, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_one_density_of_all_examples_together(stream):
    def model(x, y=None):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(1, 3), 1.0).to_event(2))
        noise = torch.eye(len(x)) + 0.5
        mean = F.linear(x, weight).squeeze(-1)
        pyro.sample("obs", dist.MultivariateNormal(mean, noise), obs=y)

    x, y, draws = torch.randn(4, 3), torch.randn(4), {"weight": torch.randn(6, 1, 3)}
    prediction = ps.predict(model, draws, x, y=y, stream=stream)
    means, noise = (draws["weight"] @ x.mT).squeeze(1), torch.eye(4) + 0.5
    expected = dist.MultivariateNormal(means, noise).log_prob(y).logsumexp(0) - math.log(6)
    torch.testing.assert_close(prediction.log_density, expected, rtol=1e-12, atol=0)
    with pytest.raises(
        ValueError, match=r"`y` must have a density for each example, but the model"
    ):
        ps.predict(model, draws, x, y=y, batch_size=2, stream=stream)


def test_a_covariance_of_all_examples_is_not_one_for_each():
    """Two examples of two outputs: the shape of the covariance is that of an entry for each example."""

    def model(x, y=None, shared=True):
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        factor = scale * torch.eye(2) if shared else scale * torch.eye(2).expand(len(x), 2, 2)
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.MultivariateNormal(x, scale_tril=factor), obs=y)

    draws = {"scale": torch.tensor([0.1, 10.0])}
    with pytest.raises(ValueError, match="no likelihood at each draw"):
        ps.predict(model, draws, torch.zeros(2, 2)).interval(0.5)
    prediction = ps.predict(lambda x: model(x, shared=False), draws, torch.zeros(2, 2))
    drawn = prediction.sample_observations(20_000)
    torch.testing.assert_close(drawn.var(0), prediction.variance, rtol=0.1, atol=0)


@pytest.mark.parametrize("max_memory", [1 / 32, 1e-7])
def test_a_seed_determines_the_draws_for_any_inputs(max_memory):
    """Also of a model that returns its observations, in several passes, and by mini-batches."""

    def model(x, y=None):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Normal(x @ weight, 1.0), obs=y)

    guide, x = ps.MeanFieldGuide(model, init_scale=1.0), torch.randn(9, 3)
    guide.initialize(x, torch.zeros(9))
    found = []
    for inputs, batch_size in ((x, None), (x[:4], None), (x, 3)):
        torch.manual_seed(0)
        options = {"num_samples": 30, "max_memory": max_memory, "batch_size": batch_size}
        prediction = ps.predict(model, guide, inputs, **options)
        found.append(prediction.likelihood.mean[:, :4])
        noise = prediction.functions - prediction.likelihood.mean
        assert len(noise.unique()) == noise.numel()  # of each draw and input
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])
