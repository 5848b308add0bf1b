"""Many draws in one pass: the same numbers as one by one, within the memory that is allowed."""

import copy
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import pyro_structvi as ps
from pyro_structvi.families import FullCovariance, InducingWeights
from pyro_structvi.posterior import prediction
from pyro_structvi.posterior.passes import Passes
from pyro_structvi.posterior.runs import evaluation_mode
from pyro_structvi.testing.noise import assert_mean
from tests.guide_cases import GUIDES, POINTS
from tests.models import (
    hierarchical_function,
    linear_function,
    make_classifier,
    make_image_classifier,
    make_regressor,
    regression_data,
)
from tests.particle_noise import draws_in_a_loop, draws_together
from tests.posterior.passed_models import (
    ONE_BY_ONE,
    assert_same,
    counted,
    draws_of,
    normalized,
    regressor_of,
)
from tests.real_nets.sequence_nets import Transformer

CASES = {
    "regressor": (make_regressor, regression_data),
    "images": (make_image_classifier, None),
    "normalization": (normalized, regression_data),
    "attention": (
        lambda: regressor_of(Transformer(decodes=True)),
        lambda: (torch.randn(12, 5, 3), torch.randn(12, 2)),
    ),
    "embedding": (
        lambda: regressor_of(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(6, 1)),
        lambda: (torch.randint(7, (12, 2)), torch.randn(12, 1)),
    ),
    "latent noise": (
        lambda: regressor_of(nn.Linear(3, 1), noise_scale=dist.HalfNormal(1.0)),
        regression_data,
    ),
    "Student's t": (
        lambda: ps.Regressor(ps.bayesianize(nn.Linear(3, 1)), 12, noise_scale=0.5, df=5.0),
        regression_data,
    ),
    "rank one": (
        lambda: regressor_of(
            nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), layers={"*": ps.RankOne()}
        ),
        regression_data,
    ),
    "function": (lambda: linear_function, lambda: (torch.randn(12, 3), torch.randn(12, 2))),
    "hierarchy": (lambda: hierarchical_function, regression_data),
}


def make(case):
    make_model, make_data = CASES[case]
    made = make_model()
    model, (x, y) = made if make_data is None else (made, make_data())
    guide = ps.MeanFieldGuide(model, init_scale=0.3)
    guide.initialize(x, y)
    return model, guide, x, y


@pytest.mark.parametrize("case", CASES)
def test_given_draws_give_what_they_give_one_by_one(case):
    model, guide, x, y = make(case)
    draws = draws_of(guide, 9)
    counting, runs = counted(model)
    with evaluation_mode(model):
        together = ps.predict(counting, draws, x, y=y, batch_size=5)
        batches = -(-len(x) // 5)
        assert len(runs) == 2 * batches  # the first draw, and all others
        runs.clear()
        alone = ps.predict(counting, draws, x, y=y, batch_size=5, max_memory=ONE_BY_ONE)
    assert len(runs) == 9 * batches
    assert_same(together, alone)


def test_draws_of_a_guide_are_those_of_a_loop():
    model, data = make_image_classifier()
    for guide_name, make_guide in (GUIDES | POINTS).items():
        guide = make_guide(model, init_scale=0.2)
        guide.initialize(*data)
        with torch.no_grad():
            joint = guide.joint_posterior()
            found, expected = draws_together(joint, 6), draws_in_a_loop(joint, 6)
            assert not joint._draws_in_turn, guide_name
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("max_memory", [ONE_BY_ONE, 1e-5])
def test_a_seed_gives_the_same_functions_for_any_mini_batches(max_memory):
    model, x = make_regressor(), torch.randn(11, 3)
    guide = ps.MatrixNormalGuide(model, init_scale=0.3)

    def functions(batch_size):
        torch.manual_seed(3)
        return ps.predict(
            model, guide, x, num_samples=20, batch_size=batch_size, max_memory=max_memory
        ).functions

    whole = functions(None)
    for batch_size in (1, 4, 100):
        torch.testing.assert_close(functions(batch_size), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("draws_in_a_pass", [1, 7])
def test_passes_keep_within_the_memory_that_is_allowed(draws_in_a_pass):
    net = ps.bayesianize(nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 2)))
    model, x = ps.Regressor(net, 10, 0.1), torch.randn(10, 3)
    weights, outputs = 302, 10 * (50 + 50 + 2)
    least = 8 * (weights + outputs) * draws_in_a_pass / 2**30
    batches = [((x,), None)]
    read = prediction._Reader(range(40), True, 1)
    passes = Passes(model, ps.KTiedGuide(model), batches, None, read, least)
    sizes = [len(one.outputs["mean"]) for one in passes.run(40)]
    assert sum(sizes) == 40
    assert max(sizes) <= draws_in_a_pass
    generous = Passes(model, ps.KTiedGuide(model), batches, None, read, 4 * least)
    assert max(len(one.outputs["mean"]) for one in generous.run(200)) > draws_in_a_pass


@pytest.mark.parametrize("stream", [False, True])
def test_passes_leave_no_tensors_behind(stream, monkeypatch):
    """Small tensors between large temporary ones would fragment the memory, to many times the result."""
    model, x, alive = make_classifier(), torch.randn(9, 3), []
    run = Passes.run

    def watched(self, total):
        for one in run(self, total):
            alive.extend(weakref.ref(value) for value in one.outputs.values())
            most = 2 * len(one.outputs)
            yield one
            del one
            assert sum(reference() is not None for reference in alive) <= most

    monkeypatch.setattr(Passes, "run", watched)
    options = {"num_samples": 8, "batch_size": 3, "stream": stream, "max_memory": ONE_BY_ONE}
    prediction = ps.predict(model, ps.MeanFieldGuide(model), x, **options)
    assert len(alive) >= 8 * 3
    assert (prediction.functions is None) == stream


def test_predictions_of_one_net_in_several_threads():
    model, (x, y) = make_regressor(), regression_data()
    guide = ps.MeanFieldGuide(model, init_scale=0.3)
    posteriors = [draws_of(guide, 30) for _ in range(4)]
    expected = [ps.predict(model, draws, x, y=y) for draws in posteriors]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda draws: ps.predict(model, draws, x, y=y), posteriors)]
    for ours, alone in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.functions, alone.functions, rtol=0, atol=0)
        torch.testing.assert_close(ours.log_density, alone.log_density, rtol=0, atol=0)
    assert model.training


@pytest.mark.slow
def test_fits_and_predictions_in_several_threads():
    torch.set_default_dtype(torch.float64)  # a thread has the process's default dtype
    x, y = regression_data()

    def fit(kind):
        model = make_regressor() if kind == "regressor" else make_classifier()
        guide = ps.KTiedGuide(model)
        target = y if kind == "regressor" else torch.zeros(12, dtype=torch.long)
        history = ps.fit(model, guide, (x, target), num_steps=40, lr=0.05, progress=False)
        ps.predict(model, guide, x, num_samples=20)
        return history.elbo

    with ThreadPoolExecutor(3) as pool:
        histories = [*pool.map(fit, ["regressor", "classifier", "regressor"])]
    assert all(len(elbo) == 40 and elbo[-1] > elbo[0] for elbo in histories)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        output = self.layer(x)
        return output if self.layer.bias.sum() > 0 else -output


class InNumpy(Branching):
    def forward(self, x):
        return x @ torch.from_numpy(self.layer.weight.numpy()).mT


class InPlace(Branching):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        self.last.copy_(self.layer.bias)
        return self.layer(x) + self.last


class Recurrent(Branching):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(3, 1, batch_first=True)

    def forward(self, x):
        return self.layer(x.unsqueeze(1))[0][:, -1]


@pytest.mark.parametrize("net", [Branching, InNumpy, InPlace, Recurrent])
def test_what_cannot_be_vectorized_runs_one_by_one_in_silence(net):
    model, (x, y) = regressor_of(net()), regression_data()
    draws = draws_of(ps.MeanFieldGuide(model, init_scale=0.5), 8)
    found = ps.predict(model, draws, x, y=y, batch_size=5)
    assert_same(found, ps.predict(model, draws, x, y=y, batch_size=5, max_memory=ONE_BY_ONE))
    for index, values in enumerate(zip(*draws.values(), strict=True)):
        own = pyro.poutine.condition(model, dict(zip(draws, values, strict=True)))
        with torch.no_grad():
            torch.testing.assert_close(found.functions[index], own(x))


def test_a_guide_that_cannot_be_vectorized_draws_one_by_one(monkeypatch):
    model, x = make_regressor(), torch.randn(5, 3)
    shared = InducingWeights((3, 2), FullCovariance(), shared=True)
    guide = ps.StructuredGuide(model, {"*": shared}, init_scale=0.3)
    guide.initialize(x)
    joint = guide.joint_posterior()
    draw = joint.draw

    def choosy(local, number):
        values = draw(local, number)
        return values if values["net.0.bias"].sum() > -1e9 else {}

    monkeypatch.setattr(joint, "draw", choosy)
    monkeypatch.setattr(guide, "joint_posterior", lambda: joint)
    functions = ps.predict(model, guide, x, num_samples=6).functions
    assert joint._draws_in_turn
    assert len(functions.flatten().unique()) == functions.numel() == 30


def uniform_function(x, y=None):
    width = pyro.sample("width", dist.Normal(torch.ones(()), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Uniform(torch.zeros(len(x)), width), obs=y)


def test_what_is_wrong_with_a_draw_is_an_error_wherever_it_comes():
    model, (x, y) = make_regressor(), regression_data()
    draws = draws_of(ps.MeanFieldGuide(model), 6)
    draws["net.0.bias"][4, 1] = torch.nan
    with pytest.raises(ValueError, match="The net's output for `x` must be finite"):
        ps.predict(model, draws, x, y=y)
    with pyro.validation_enabled(False):  # as before: who switches it off gets what there is
        assert ps.predict(model, draws, x).mean.isnan().any()
    x, y = torch.zeros(3), torch.full((3,), 0.5)
    assert ps.predict(uniform_function, {"width": torch.tensor([2.0, 1.0, 3.0])}, x, y=y)
    with pytest.raises(ValueError, match="`y` must be in"):
        ps.predict(uniform_function, {"width": torch.tensor([2.0, 0.3, 3.0])}, x, y=y)
    with pytest.raises(ValueError, match="parameter low"):
        ps.predict(uniform_function, {"width": torch.tensor([2.0, 1.0, -1.0])}, x)


def test_a_model_that_cannot_run_without_observations_says_so():
    def model(x, y):
        pyro.sample("y", dist.Normal(net(x), 0.1).to_event(2), obs=y)

    net, x = ps.bayesianize(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))), torch.randn(4, 3)
    guide = ps.GlobalInducingGuide(model, x)
    message = (
        "`model` must run on inputs alone, but .* missing a required argument: 'y'. Give its obs"
    )
    with pytest.raises(TypeError, match=message):
        guide.initialize(x, torch.zeros(4, 1))
    with pytest.raises(TypeError, match=message):
        ps.predict(model, {"0.weight": torch.zeros(2, 3, 3)}, x)


@pytest.mark.parametrize("takes_part", [True, False])
def test_a_random_part_of_the_examples_is_refused_and_a_mini_batch_is_none(takes_part):
    """A plate scales a mini-batch by its ``subsample_size``; its indices choose examples if used."""

    def model(x, y=None):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", 100, subsample_size=4) as index:
            own = x[index] if takes_part else x
            pyro.sample("y", dist.Normal(own @ weight, 0.1), obs=y)

    draws, x = {"weight": torch.randn(5, 3)}, torch.randn(100 if takes_part else 4, 3)
    if takes_part:
        with pytest.raises(ValueError, match="'data' of the observations takes 4 of 100 examples"):
            ps.predict(model, draws, x)
        return
    torch.testing.assert_close(ps.predict(model, draws, x).mean, (x @ draws["weight"].mT).mean(1))


@pytest.mark.parametrize("factor", [None, 10])
def test_a_model_that_uses_or_returns_what_it_observes_draws_it(factor):
    def model(x, y=None):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            drawn = pyro.sample("y", dist.Poisson((x @ weight).exp()), obs=y)
        return factor * drawn if factor else drawn

    functions = ps.predict(model, {"weight": torch.zeros(400, 3)}, torch.randn(5, 3)).functions
    assert_mean(functions, torch.full((5,), factor or 1.0))
    assert_mean(functions.square(), torch.full((5,), 2.0 * (factor or 1) ** 2))


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize("where", ["draws", "inputs", "parameters", "guide"])
def test_tensors_of_a_subclass_never_meet_vmap(where, monkeypatch):
    model, (x, _) = normalized(), regression_data()
    guide = ps.MeanFieldGuide(model, init_scale=0.3)
    posterior: object = draws_of(guide, 6)
    mark = lambda value: value.as_subclass(Marked)  # noqa: E731
    if where == "draws":
        posterior = {name: mark(value) for name, value in posterior.items()}
    elif where == "inputs":
        x = mark(x)
    elif where == "parameters":
        model.net[1].weight = nn.Parameter(mark(model.net[1].weight.detach()))
    else:
        posterior, own = guide, guide["net.0.weight"]
        own.loc = nn.Parameter(mark(own.loc.detach()))
    monkeypatch.setattr(torch.func, "vmap", lambda *args, **options: pytest.fail("vmap was called"))
    assert ps.predict(model, posterior, x, num_samples=6).functions.shape == (6, 12, 1)


class Shift(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.shift = shift

    def forward(self, weight):
        return weight + self.shift


class Adapted(nn.Module):
    """Changes a frozen weight for the duration of a call, as peft does for ``target_parameters``."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1).requires_grad_(False)
        self.shift = nn.Parameter(torch.zeros(1, 3))

    def forward(self, x):
        parametrize.register_parametrization(self.linear, "weight", Shift(self.shift))
        self.linear.parametrizations.weight.original.requires_grad_(False)
        output = self.linear(x)
        parametrize.remove_parametrizations(self.linear, "weight", leave_parametrized=False)
        return output


def test_a_traced_net_takes_several_draws():
    """Its parameters are not those of a module of Python."""
    net = torch.jit.trace(nn.Linear(3, 3), torch.zeros(5, 3))

    def model(x, y):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(net(x) @ weight, 1.0), obs=y)

    guide, data = ps.MeanFieldGuide(model), (torch.randn(5, 3), torch.randn(5))
    elbo = ps.StructuredELBO(num_particles=2, vectorize_particles=True)
    assert torch.isfinite(torch.tensor(elbo.loss(model, guide, *data)))


def test_a_net_that_vmap_leaves_halfway_is_put_back():
    model, (x, y) = ps.Regressor(ps.bayesianize(Adapted()), 12, 0.3), regression_data()
    guide = ps.MeanFieldGuide(model, init_scale=0.5)
    draws = guide.joint_posterior().draw_many(range(3))
    linear = model.net.linear
    expected = torch.stack([
        F.linear(x, linear.weight + shift, linear.bias) for shift in draws["net.shift"]
    ])
    message = "cannot run several draws|under `torch.func.vmap`"
    for use in (
        lambda: ps.StructuredELBO(num_particles=2, vectorize_particles=True).loss(
            model, guide, x, y
        ),
        lambda: ps.reference.mclmc(model, guide, (x, y), progress=False),
        lambda: guide.sample_functions(2)(x),
    ):
        with pytest.raises(RuntimeError, match=message):
            use()
        torch.testing.assert_close(ps.predict(model, draws, x).functions, expected)
    assert ps.diagnostics.pareto_k(model, guide, x, y, num_samples=100).elbo < 0


class RandomFeatures(nn.Linear):
    """Has random features, by a generator with the same seed in each call."""

    def forward(self, x):
        frequencies = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
        return super().forward((x @ frequencies).cos())


def test_a_net_with_a_generator_has_its_numbers_in_every_draw():
    model, (x, y) = regressor_of(RandomFeatures(3, 1)), regression_data()
    guide = ps.MeanFieldGuide(model, init_scale=0.5)
    draws = draws_of(guide, 4)
    each = [{name: value[i] for name, value in draws.items()} for i in range(4)]
    expected = torch.stack([guide.to_net(draw)(x) for draw in each])
    for max_memory in (1.0, ONE_BY_ONE):
        found = ps.predict(model, draws, x, max_memory=max_memory).functions
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    several = {"num_particles": 2, "vectorize_particles": True}
    for use in (
        lambda: guide.sample_functions(2)(x),
        lambda: ps.StructuredELBO(**several).loss(model, guide, x, y),
        lambda: ps.StructuredELBO().loss(model, ps.EnsembleGuide(model, 2), x, y),
        lambda: pyro.infer.Trace_ELBO(**several).loss(model, guide, x, y),
        lambda: ps.element_scores.laplace_variances(model, guide, x),
    ):
        with pytest.raises(RuntimeError, match=r"`randn` has a `generator`.*keep them in a buffer"):
            use()
    alone = ps.EnsembleGuide(model, 2, vectorize=False)
    losses = [ps.StructuredELBO().loss(model, own, x, y) for own in (alone, *alone.members)]
    assert losses[0] == pytest.approx(sum(losses[1:]) / 2, rel=1e-12)


class Binding(nn.Linear):
    """Sets an attribute, or a buffer, to its outputs, and puts them into a list or a dictionary."""

    def __init__(self, attribute):
        super().__init__(3, 1)
        self.attribute, self.kept, self.history, self.cache = attribute, None, [], {}
        self.register_buffer("running", torch.zeros(12, 1))

    def forward(self, x):
        outputs = super().forward(x)
        setattr(self, self.attribute, outputs.detach())
        self.history.append(outputs.detach())
        self.cache["outputs"] = outputs.detach()
        return outputs


@pytest.mark.parametrize("attribute", ["running", "kept"])
def test_a_pass_of_several_draws_leaves_none_of_its_tensors_in_a_model(attribute):
    model = ps.Regressor(ps.bayesianize(Binding(attribute)), 12, 0.3)
    (x, y), guide = regression_data(), ps.MeanFieldGuide(model, init_scale=0.5)
    draws = guide.joint_posterior().draw_many(range(3))
    expected = torch.stack([
        guide.to_net({name: value[i] for name, value in draws.items()})(x) for i in range(3)
    ])
    several = {"num_particles": 2, "vectorize_particles": True}
    elbo, pyros = ps.StructuredELBO(**several), pyro.infer.Trace_ELBO(**several)
    message = r"A Binding sets \['running'\] to values of this pass alone."
    for is_training, use in (
        (True, lambda: elbo.loss(model, guide, x, y)),
        (True, lambda: pyros.loss(model, guide, x, y)),
        (False, lambda: elbo.loss(model, guide, x, y)),
        (False, lambda: ps.predict_moments(model, guide, x)),
        (False, lambda: ps.element_scores.laplace_variances(model, guide, x)),
        (False, lambda: ps.predict(model, guide, x, num_samples=3)),
    ):
        is_refused = is_training and attribute == "running"
        model.train(is_training)
        with pytest.raises(RuntimeError, match=message) if is_refused else nullcontext():
            use()
        kept = [getattr(model.net, attribute), *model.net.history, *model.net.cache.values()]
        for value in (value for value in kept if value is not None):
            assert type(value) is torch.Tensor
            assert torch.isfinite(value).all()
    torch.testing.assert_close(ps.predict(model, draws, x).functions, expected)
    assert torch.isfinite(copy.deepcopy(model).state_dict()["net.running"]).all()
    functions = guide.sample_functions(2)
    outputs = functions(x)
    assert torch.equal(copy.deepcopy(functions)(x), outputs)
