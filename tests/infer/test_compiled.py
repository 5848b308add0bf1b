"""A compiled step is SVI's step: same losses, parameters and buffers for the same noise."""

import gc
import math
import weakref

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import pyro_structvi as ps
from pyro_structvi.infer import CompileFallbackWarning
from pyro_structvi.infer.steps import replayed
from pyro_structvi.infer.steps.call import Call
from pyro_structvi.infer.steps.traced import Traced
from tests.guide_cases import GUIDES, POINTS
from tests.models import (
    HandWritten,
    make_classifier,
    make_linear_regressor,
    make_regressor,
    regression_data,
)

STEPS = 7
RATE_RTOL = 1e-6  # a graph has learning rates in single precision
GUIDE_CASES = GUIDES | POINTS
# Those whose steps differ most: joined biases, factors, masks.
FAST = {"k-tied, joined", "dropout"}
EACH_WAY = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in GUIDE_CASES
]


def adam(**options):
    return pyro.optim.Adam({"lr": 0.01, **options})


def still():
    return pyro.optim.SGD({"lr": 1e-300})


def train(
    make, data, compiled, steps=STEPS, loss=ps.StructuredELBO, optim=adam, change=None, **options
):
    """Train with SVI or a compiled step from the same seeds; return losses, parameters, the object."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model, guide = make()
    if compiled:
        svi = ps.CompiledSVI(model, guide, optim(), loss(), backend=None, **options)
    else:
        svi = SVI(model, guide, optim(), loss())
    losses = []
    for number in range(steps):
        if change is not None:
            change(svi, number)
        losses.append(svi.step(*data))
    parts = [part for part in (model, guide) if isinstance(part, nn.Module)]
    state = {
        f"{i}.{name}": v.clone() for i, p in enumerate(parts) for name, v in p.state_dict().items()
    }
    state |= {name: value.detach().clone() for name, value in pyro.get_param_store().items()}
    return losses, state, svi


def assert_same(make, data, rtol=1e-10, **options):
    """Compare losses to rounding; parameters less tightly, since Adam enlarges tiny gradients."""
    losses, state, _ = train(make, data, compiled=False, **options)
    own_losses, own_state, svi = train(make, data, compiled=True, **options)
    torch.testing.assert_close(own_losses, losses, rtol=rtol, atol=0)
    assert own_state.keys() == state.keys()
    torch.testing.assert_close(own_state, state, rtol=1e-6, atol=1e-7)
    assert all(step.is_ready for step in svi._step.kinds.values())
    return losses


@pytest.mark.parametrize("name", EACH_WAY)
def test_losses_and_parameters_are_those_of_svi(name):
    def make():
        model = make_regressor()
        return model, GUIDE_CASES[name](model)

    losses = assert_same(make, regression_data())
    assert len(set(losses)) == STEPS


def make_k_tied(model_of=make_linear_regressor, **options):
    model = model_of()
    return model, ps.KTiedGuide(model, **options)


def image_model():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )
    with pytest.warns(ps.nn.PointEstimateWarning):
        return ps.Classifier(ps.bayesianize(net, prior=1.0), 6)


def recurrent_model():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    return ps.Classifier(ps.bayesianize(Net(), prior=1.0), 6)


@pytest.mark.parametrize("local_reparam", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_buffers_and_point_estimates_are_updated(local_reparam):
    data = torch.randn(6, 1, 4, 4), torch.randint(3, (6,))
    assert_same(lambda: make_k_tied(image_model, local_reparam=local_reparam), data)


@pytest.mark.slow
def test_recurrent_nets_compile():
    assert_same(
        lambda: make_k_tied(recurrent_model), (torch.randn(6, 5, 3), torch.randint(2, (6,)))
    )


@pytest.mark.filterwarnings("ignore::pyro_structvi.infer.SampledKLWarning")
def test_modules_of_the_users_own_compile():
    assert_same(lambda: make_k_tied(HandWritten), (torch.randn(6, 3), torch.randn(6, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("vectorize", [False, True])
def test_particles_compile(vectorize):
    def loss():
        return ps.StructuredELBO(num_particles=3, vectorize_particles=vectorize)

    assert_same(make_k_tied, regression_data(), loss=loss)


def test_noise_is_fresh_at_each_step():
    losses = assert_same(make_k_tied, regression_data(), optim=still, steps=20)
    assert len(set(losses)) == 20


@pytest.mark.slow
def test_the_weight_of_the_kl_follows_its_schedule():
    def loss():
        return ps.StructuredELBO(kl_weight=ps.LinearAnnealing(5))

    data = regression_data()
    annealed = assert_same(make_k_tied, data, loss=loss)
    full, *_ = train(make_k_tied, data, compiled=True)
    assert annealed[0] < full[0]
    assert annealed[-1] != full[-1]


def function_pair():
    """A model and a guide that are plain functions, with a constrained parameter and a subsample."""
    y = torch.linspace(0, 3, 10)

    def model():
        mean = pyro.sample("mean", dist.Normal(torch.zeros(()), 2.0))
        with pyro.plate("data", 10, subsample_size=4) as index:
            pyro.sample("obs", dist.Normal(mean, 1.0), obs=y[index])

    def guide():
        loc = pyro.param("loc", torch.tensor(0.1))
        scale = pyro.param("scale", torch.tensor(0.5), constraint=dist.constraints.positive)
        pyro.sample("mean", dist.Normal(loc, scale))

    return model, guide


def test_functions_with_constrained_parameters_and_subsamples_compile():
    assert_same(function_pair, ())


def subsampled():
    """Return a model whose loss, at a point, depends on the subsample only."""
    y = 2.0 ** torch.arange(10)

    def model():
        mean = pyro.sample("mean", dist.Normal(torch.zeros(()), 2.0))
        with pyro.plate("data", 10, subsample_size=4) as index:
            pyro.sample("obs", dist.Normal(mean, 1.0), obs=y[index])

    return model, ps.MAPGuide(model)


def test_every_step_has_a_subsample_of_its_own():
    """Of 210 subsamples, 30 draws would hardly be fewer than 10."""
    losses = assert_same(subsampled, (), optim=still, steps=30)
    assert len(set(losses)) > 10


def test_other_shapes_arguments_and_modes_are_compiled_apart():
    x, y = regression_data()

    def feed(sizes, compiled):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model, guide = make_k_tied()
        kind = (lambda *a: ps.CompiledSVI(*a, backend=None)) if compiled else SVI
        svi = kind(model, guide, adam(), ps.StructuredELBO())
        return [svi.step(x[:size], y=y[:size]) for size in sizes], svi

    sizes = [12, 5, 12, 5, 12, 5, 12]
    losses, svi = feed(sizes, compiled=True)
    torch.testing.assert_close(losses, feed(sizes, compiled=False)[0], rtol=1e-10, atol=0)
    assert len(svi._step.kinds) == 2
    svi.model.eval()
    svi.step(x, y=y)
    assert len(svi._step.kinds) == 3
    next(svi.guide.parameters()).requires_grad_(False)
    svi.step(x, y=y)
    assert len(svi._step.kinds) == 4


@pytest.mark.slow
def test_a_frozen_parameter_stays():
    frozen = []

    def change(svi, number):
        parameter = next(svi.guide.parameters())
        parameter.requires_grad_(number < 3)
        frozen.extend([parameter.detach().clone()] if number >= 3 else [])

    assert_same(make_k_tied, regression_data(), change=change)
    assert len(frozen) == 2 * (STEPS - 3)
    for values in (frozen[: STEPS - 3], frozen[STEPS - 3 :]):
        assert all(torch.equal(value, values[0]) for value in values)


@pytest.mark.slow
def test_autocast_is_traced_and_not_applied_twice():
    def both(compiled):
        torch.set_default_dtype(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            losses, *_ = train(
                lambda: make_k_tied(make_classifier), (x.float(), y), compiled, optim=still
            )
        return losses

    x, y = torch.randn(12, 3), torch.randint(4, (12,))

    pyro.set_rng_seed(0)
    expected = both(compiled=False)
    pyro.set_rng_seed(0)
    assert both(compiled=True) == expected


def test_evaluate_loss_takes_no_step():
    x, y = regression_data()
    _, state, svi = train(make_k_tied, (x, y), compiled=True)
    step = svi.loss.step
    assert svi.evaluate_loss(x, y) > 0
    assert svi.loss.step == step
    torch.testing.assert_close(
        dict(svi.guide.state_dict()),
        {k[2:]: v for k, v in state.items() if k[2:] in svi.guide.state_dict()},
    )


# ---- what changes between steps -----------------------------------------------------------------------


class Shifted(nn.Module):
    """A net with a buffer and a shift that is an attribute."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(3, 1), nn.Dropout(0.5)
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, x):
        return self.dropout(self.linear(x)) + self.shift


def prune(svi):
    ps.pruning.prune_mean_field(svi.guide, 0.5)


def replace_buffer(svi):
    svi.model.net.shift = torch.ones(1)


def evaluate(svi):
    svi.model.eval()


def tell_num_data(svi):
    svi.model.num_data = 1000


def use_twice(svi):
    svi.model.net.linear.register_forward_pre_hook(
        lambda module, args: (module.weight.sum(), None)[1]
    )
    svi.guide.initialize(*regression_data())


@pytest.mark.parametrize(
    "change",
    [
        *(prune, use_twice),
        *(pytest.param(each, marks=pytest.mark.slow) for each in (replace_buffer, evaluate)),
        pytest.param(tell_num_data, marks=pytest.mark.slow),
    ],
)
def test_changes_of_model_and_guide_are_seen(change):
    def make():
        model = ps.Regressor(ps.bayesianize(Shifted(), prior=1.0), 12, 0.3)
        return model, ps.MeanFieldGuide(model)

    def at_four(svi, number):
        if number == 4:
            change(svi)

    data = regression_data()
    losses, *_ = train(make, data, compiled=False, steps=9, change=at_four)
    own, *_ = train(make, data, compiled=True, steps=9, change=at_four)
    torch.testing.assert_close(own, losses, rtol=1e-10, atol=0)
    unchanged, *_ = train(make, data, compiled=True, steps=9)
    assert own[4] != unchanged[4]


def test_another_number_of_particles_is_compiled_apart():
    _, _, svi = train(make_k_tied, regression_data(), compiled=True)
    for expected in (1, 2):
        svi.step(*regression_data())
        assert len(svi._step.kinds) == expected
        svi.loss.num_particles = 3


@pytest.mark.slow
def test_modes_are_seen_behind_methods_and_closures():
    def train_with(model_of, compiled):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model = ps.Regressor(ps.bayesianize(Shifted(), prior=1.0), 12, 0.3)
        guide = ps.MeanFieldGuide(model)
        kind = (lambda *a: ps.CompiledSVI(*a, backend=None)) if compiled else SVI
        svi = kind(model_of(model), guide.forward, adam(), ps.StructuredELBO())
        losses = []
        for number in range(8):
            model.train(number < 4)
            losses.append(svi.step(x, y))
        return losses

    x, y = regression_data()
    for model_of in (lambda model: model.forward, lambda model: lambda *args: model(*args)):
        expected = train_with(model_of, compiled=False)
        torch.testing.assert_close(train_with(model_of, compiled=True), expected)


def test_entries_of_the_param_store_that_are_replaced_are_seen():
    def at_four(svi, number):
        if number == 4:
            pyro.clear_param_store()

    assert_same(function_pair, (), steps=9, change=at_four)


def test_one_tensor_in_two_roles_is_two_inputs():
    def model(x, z, y):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("obs", dist.Normal(x @ weight + z.sum(-1), 1.0).to_event(1), obs=y)

    def feed(compiled):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        kind = (lambda *a: ps.CompiledSVI(*a, backend=None)) if compiled else SVI
        svi = kind(model, ps.MeanFieldGuide(model), adam(), ps.StructuredELBO())
        return [svi.step(x, x if number < 3 else 2 * x, y[:, 0]) for number in range(6)]

    x, y = regression_data()
    torch.testing.assert_close(feed(compiled=True), feed(compiled=False), rtol=1e-10, atol=0)


def test_equal_numbers_of_other_types_are_other_arguments():
    assert Call((1,), {}).key != Call((True,), {}).key
    assert Call((1,), {}).key == Call((1,), {}).key
    x = torch.zeros(2, 3, 4)
    assert Call((x,), {}).key != Call((x.mT.contiguous().mT,), {}).key


def test_many_kinds_of_steps_are_said():
    model, guide = make_k_tied()

    def scaled(x, y, factor):
        return model(x * factor, y)

    svi = ps.CompiledSVI(
        scaled, lambda x, y, factor: guide(x, y), adam(), ps.StructuredELBO(), backend=None
    )
    x, y = regression_data()
    guide.initialize(x, y)
    for number in range(15):
        svi.step(x, y, 1.0 + number)
    with pytest.warns(UserWarning, match="16 kinds of steps have been compiled"):
        svi.step(x, y, 0.5)


# ---- optimizers ---------------------------------------------------------------------------------------


def slow(case):
    return pytest.param(case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "optim",
    [
        slow(lambda: pyro.optim.SGD({"lr": 1e-4, "momentum": 0.9})),
        slow(lambda: pyro.optim.ClippedAdam({"lr": 0.01, "clip_norm": 0.1})),
        slow(lambda: pyro.optim.AdamW({"lr": 0.01, "weight_decay": 0.1}, {"clip_norm": 0.5})),
        lambda: pyro.optim.Adam(lambda name: {"lr": 0.1 if name.endswith("loc") else 0.01}),
        slow(lambda: pyro.optim.RMSprop({"lr": 0.01})),
    ],
    ids=["SGD", "ClippedAdam", "clipped AdamW", "rates by name", "RMSprop"],
)
def test_pyro_optimizers_become_one(optim):
    assert_same(make_k_tied, regression_data(), optim=optim)


def test_one_fused_optimizer_has_all_parameters():
    _, _, svi = train(make_k_tied, regression_data(), compiled=True)
    (group,) = svi.optimizer.param_groups
    assert group["fused"]
    assert len(group["params"]) == len(list(svi.guide.parameters()))


def test_a_torch_optimizer_trains_what_it_was_made_of():
    pyro.set_rng_seed(0)
    model, guide = make_k_tied()
    data = regression_data()
    trained = [value for name, value in guide.named_parameters() if name.endswith("loc")]
    before = {name: value.clone() for name, value in guide.state_dict().items()}
    optimizer = torch.optim.Adam(trained, lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    svi = ps.CompiledSVI(model, guide, optimizer, ps.StructuredELBO(), backend=None)
    for _ in range(STEPS):
        svi.step(*data)
        schedule.step()
    assert svi.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**STEPS)
    for name, value in guide.state_dict().items():
        assert torch.equal(value, before[name]) == (not name.endswith("loc"))
    assert all(parameter.grad is None for parameter in guide.parameters())


def test_optimizers_that_cannot_be_one_are_refused():
    model, guide = make_k_tied()
    scheduled = pyro.optim.ExponentialLR({
        "optimizer": torch.optim.Adam,
        "optim_args": {"lr": 0.01},
        "gamma": 0.9,
    })
    for wrong in (scheduled, torch.optim.Adam, None):
        with pytest.raises(TypeError, match="`optim` must be a"):
            ps.CompiledSVI(model, guide, wrong, ps.StructuredELBO())
    used = adam()
    SVI(model, guide, used, ps.StructuredELBO()).step(*regression_data())
    with pytest.raises(ValueError, match="has the state of single parameters"):
        ps.CompiledSVI(model, guide, used, ps.StructuredELBO())


# ---- what cannot be compiled --------------------------------------------------------------------------


class Deciding(nn.Module):
    """Decides by a value, behind noise and a running mean."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3, affine=False), nn.Linear(3, 1)

    def forward(self, x):
        x = self.norm(x) + 0 * torch.randn(3)
        return self.linear(x if x.sum() > 100 else -x)  # the line at fault


def deciding():
    return ps.Regressor(ps.bayesianize(Deciding(), prior=1.0), 12, 0.3)


def test_reading_a_value_is_an_error_that_names_the_line_and_changes_nothing():
    x, y = regression_data()
    model, guide = make_k_tied(deciding)
    svi = ps.CompiledSVI(model, guide, adam(), ps.StructuredELBO(), backend=None)
    svi.step(x, y)
    before = [value.clone() for part in (model, guide) for value in part.state_dict().values()]
    random_state = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"test_compiled\.py:\d+, `.*the line at fault`.*fallback"
        ):
            svi.step(x, y)
    after = [value for part in (model, guide) for value in part.state_dict().values()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert svi.loss.step == 1


@pytest.mark.parametrize(
    ("read", "cause"),
    [
        (lambda x: x.detach().numpy().mean(), "reads a tensor's value by `numpy`"),
        (lambda x: sum(x[:, 0].tolist()), "reads a tensor's value by `tolist`"),
        (lambda x: len(x[x[:, 0] > 0]), "the size of a result depends on values in `aten.index"),
        (lambda x: len(torch.unique(x)), "the size of a result depends on values in `aten._unique"),
    ],
    ids=["numpy", "tolist", "mask", "unique"],
)
def test_values_that_python_reads_on_other_ways_are_refused(read, cause):
    class Reading(nn.Linear):
        def forward(self, x):
            return super().forward(x) + float(read(x))  # here

    model = ps.Regressor(ps.bayesianize(Reading(3, 1), prior=1.0), 12, 0.3)
    svi = ps.CompiledSVI(model, ps.KTiedGuide(model), adam(), ps.StructuredELBO(), backend=None)
    svi.step(*regression_data())
    with pytest.raises(RuntimeError, match=rf"{cause}.*, at .*test_compiled\.py:"):
        svi.step(*regression_data())


class Averaging(nn.Linear):
    """Has a new tensor for its buffer in each pass."""

    def __init__(self):
        super().__init__(3, 1)
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x):
        self.average = 0.5 * self.average + 0.5 * x.detach().mean()
        return super().forward(x - self.average)


def averaging():
    return ps.Regressor(ps.bayesianize(Averaging(), prior=1.0), 12, 0.3)


def test_a_buffer_that_forward_replaces_is_refused_before_anything_changes():
    model, guide = make_k_tied(averaging)
    svi = ps.CompiledSVI(model, guide, adam(), ps.StructuredELBO(), backend=None)
    svi.step(*regression_data())
    buffer, before = model.net.average, [value.clone() for value in guide.parameters()]
    with pytest.raises(RuntimeError, match="replaces its buffer `average`; change it in place"):
        svi.step(*regression_data())
    assert model.net.average is buffer
    torch.testing.assert_close([*guide.parameters()], before, rtol=0, atol=0)
    assert svi.loss.step == 1


@pytest.mark.parametrize(
    ("model_of", "cause"), [(deciding, "the line at fault"), (averaging, "replaces its buffer")]
)
def test_fallback_warns_once_and_goes_on_as_svi(model_of, cause):
    data = regression_data()
    expected, state, _ = train(lambda: make_k_tied(model_of), data, compiled=False)
    with pytest.warns(CompileFallbackWarning, match=cause) as said:
        losses, own, _ = train(lambda: make_k_tied(model_of), data, compiled=True, fallback=True)
    assert len(said) == 1
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(own, state, rtol=1e-6, atol=1e-7)


def test_other_objectives_need_fallback():
    data = regression_data()
    with pytest.raises(TypeError, match=r"`loss` must be a StructuredELBO, but got Trace_ELBO"):
        train(make_k_tied, data, compiled=True, loss=Trace_ELBO)
    expected, *_ = train(make_k_tied, data, compiled=False, loss=Trace_ELBO)
    with pytest.warns(CompileFallbackWarning, match="Trace_ELBO") as said:
        losses, *_ = train(make_k_tied, data, compiled=True, loss=Trace_ELBO, fallback=True)
    assert len(said) == 1
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)


def test_arguments_must_be_tensors_or_hashable():
    model, guide = make_k_tied()
    svi = ps.CompiledSVI(model, guide, adam(), ps.StructuredELBO(), backend=None)
    with pytest.raises(TypeError, match="tensors or hashable, but got a ndarray"):
        svi.step(torch.randn(3, 3).numpy(), torch.randn(3, 1))


def test_there_must_be_something_to_train():
    model, guide = make_k_tied()
    guide.requires_grad_(False)
    svi = ps.CompiledSVI(model, guide, adam(), ps.StructuredELBO(), backend=None)
    with pytest.raises(ValueError, match="must have a parameter to train"):
        svi.step(*regression_data())


def test_what_is_wrong_in_any_case_the_model_says_itself():
    x, y = regression_data()
    model, guide = make_k_tied()
    svi = ps.CompiledSVI(model, guide, adam(), ps.StructuredELBO(), backend=None)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        svi.step(x[:, :2], y)


# ---- backends and graphs ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning:torch._inductor")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "name", ["mean field", "k-tied", "low rank", "inducing weights", "ensemble"]
)
def test_inductor_gives_the_same(name):
    def make():
        model = make_classifier()
        return model, GUIDE_CASES[name](model)

    data = torch.randn(12, 3), torch.randint(4, (12,))
    losses, state, _ = train(make, data, compiled=False)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model, guide = make()
    svi = ps.CompiledSVI(model, guide, adam(), ps.StructuredELBO(), backend=None)
    torch.testing.assert_close([svi.step(*data) for _ in range(STEPS)], losses, rtol=1e-10, atol=0)
    own = {f"1.{name}": value for name, value in guide.state_dict().items()}
    torch.testing.assert_close(own, {name: state[name] for name in own}, rtol=1e-6, atol=1e-7)


class ReplayedOperations:
    """Does on a CPU what a CUDA graph does on a GPU: the same operations on the same memory."""

    def __init__(self, function, inputs):
        self._inputs = [value.detach().clone() for value in inputs]
        self._record, self._unused = None, [torch.zeros(())]
        self._function = function

    def __call__(self, inputs):
        for own, value in zip(self._inputs, inputs, strict=True):
            own.copy_(value)
        if self._record is None:
            self._record = Traced(lambda _: self._function(self._inputs), self._unused)
            return self._record.outputs
        return self._record(self._unused)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Let steps on the CPU go the way of those on a GPU, with recorded operations for a graph."""
    monkeypatch.setattr(replayed, "GRAPH_DEVICE", "cpu")
    monkeypatch.setattr(replayed, "CUDAGraph", ReplayedOperations)
    monkeypatch.setattr(
        replayed.ReplayedStep, "_warm_up", lambda step, inputs: step._traced(inputs)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "low rank",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("inducing weights", "ensemble")),
    ],
)
def test_a_captured_step_is_that_of_svi(name, as_on_a_gpu):
    def make():
        model = make_regressor()
        return model, GUIDE_CASES[name](model)

    assert_same(make, regression_data(), steps=12, rtol=RATE_RTOL, check_finite=False)


@pytest.mark.slow
def test_a_captured_step_reads_buffers_weights_and_subsamples(as_on_a_gpu):
    data = torch.randn(6, 1, 4, 4), torch.randint(3, (6,))
    annealed = {"loss": lambda: ps.StructuredELBO(kl_weight=ps.LinearAnnealing(10))}
    annealed |= {"check_finite": False}
    assert_same(lambda: make_k_tied(image_model), data, steps=12, rtol=RATE_RTOL, **annealed)
    losses = assert_same(subsampled, (), optim=still, steps=30, check_finite=False)
    assert len(set(losses)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("can_skip", [True, False])
def test_a_captured_step_of_fit_is_the_eager_one(can_skip, as_on_a_gpu):
    """Its graph holds the update where the optimizer can leave it out on the device."""

    def make_optimizer(parameters, lr):
        return torch.optim.Adam(parameters, lr=lr, fused=can_skip, foreach=not can_skip)

    def fit(compiled):
        pyro.set_rng_seed(0)
        model, guide = make_k_tied()
        data = regression_data()
        options = {"lr": 0.01, "lr_schedule": ps.infer.CosineDecay(9), "progress": False}
        options |= {"optimizer": make_optimizer, "compiled": compiled}
        history = ps.fit(model, guide, data, num_steps=9, **options)
        return history.elbo, history.lr, dict(guide.state_dict())

    expected, rates, state = fit(compiled=False)
    losses, own_rates, own = fit(compiled=True)
    torch.testing.assert_close(losses, expected, rtol=RATE_RTOL, atol=0)
    torch.testing.assert_close(own_rates, rates, rtol=1e-6, atol=0)
    torch.testing.assert_close(own, state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make_guide", [ps.KTiedGuide, ps.RowwiseGuide])
def test_a_captured_update_is_left_out_where_a_gradient_is_not_finite(make_guide, as_on_a_gpu):
    """With the name of what is not finite, and the next steps as if that one had not been."""
    x, y = regression_data()
    bad = y.clone()
    bad[0] = math.nan

    def steps(bad_at):
        pyro.set_rng_seed(0)
        model = make_linear_regressor()
        guide = make_guide(model)
        guide.initialize(x, y)
        optimizer = ps.StructuredAdam(guide, guide.parameters())
        svi = ps.CompiledSVI(model, guide, optimizer, ps.StructuredELBO(), backend=None)
        for number in range(10):
            if number == bad_at:
                (step,) = svi._step.kinds.values()
                assert step.has_updated
                before = {name: value.clone() for name, value in guide.state_dict().items()}
                draws = torch.get_rng_state()
                with pytest.raises(
                    FloatingPointError, match=r"data \['argument 1'\] is not finite"
                ):
                    svi.step(x, bad)
                torch.set_rng_state(draws)
                torch.testing.assert_close(dict(guide.state_dict()), before, rtol=0, atol=0)
                assert all(value.grad is None for value in guide.parameters())
            svi.step(x, y)
        return dict(guide.state_dict())

    torch.testing.assert_close(steps(bad_at=8), steps(bad_at=None), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mean field", "rowwise, joined", "low rank", "full covariance"])
def test_a_cuda_graph_of_the_default_optimizer_is_the_eager_step(name):
    x, y = (value.cuda() for value in regression_data())

    def fit(compiled):
        pyro.set_rng_seed(0)
        model = make_regressor().cuda()
        guide = GUIDES[name](model)
        history = ps.fit(model, guide, (x, y), num_steps=30, compiled=compiled, progress=False)
        return history.elbo, dict(guide.state_dict())

    elbo, state = fit(compiled=False)
    own_elbo, own = fit(compiled=True)
    torch.testing.assert_close(own_elbo, elbo, rtol=1e-5, atol=0)
    torch.testing.assert_close(own, state, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_a_captured_step_reads_learning_rates(kind, as_on_a_gpu):
    """Both as numbers that were written into a group, and by a scheduler of torch's."""

    def feed(graph):
        pyro.set_rng_seed(0)
        model, guide = make_k_tied()
        data = regression_data()
        optimizer = kind(guide.parameters(), lr=1e-3, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        options = {"backend": None, "check_finite": False}
        svi = ps.CompiledSVI(model, guide, optimizer, ps.StructuredELBO(), **options)
        losses = []
        for number in range(14):
            if number == 12:
                optimizer.param_groups[0]["lr"] = 1e-5
            losses.append(svi.step(*data))
            schedule.step() if number < 11 else None
        return losses, isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)

    losses, has_tensor = feed(graph=True)
    assert has_tensor
    replayed.GRAPH_DEVICE = "cuda"
    expected, has_tensor = feed(graph=False)
    assert not has_tensor
    torch.testing.assert_close(losses, expected, rtol=RATE_RTOL, atol=0)


@pytest.mark.slow
def test_captured_steps_of_several_shapes_share_learning_rates(as_on_a_gpu):
    x, y = regression_data()
    pyro.set_rng_seed(0)
    model, guide = make_k_tied()
    options = {"backend": None, "check_finite": False}
    svi = ps.CompiledSVI(model, guide, adam(), ps.StructuredELBO(), **options)
    for number in range(20):
        size = 12 if number % 2 else 5
        if number == 16:
            svi.optimizer.param_groups[0]["lr"] = 0.0
            before = {name: value.clone() for name, value in guide.state_dict().items()}
        svi.step(x[:size], y[:size])
    assert all(step.is_ready for step in svi._step.kinds.values())
    torch.testing.assert_close(dict(guide.state_dict()), before, rtol=0, atol=0)


def load_moments_of_zero(svi, times):
    optimizers = svi.optim.optim_objs.values() if isinstance(svi, SVI) else [svi.optimizer]
    for optimizer in optimizers:
        for _ in range(times):
            state = optimizer.state_dict()
            for moments in state["state"].values():
                moments["exp_avg"] = 0 * moments["exp_avg"]
            optimizer.load_state_dict(state)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2, 3])
def test_an_optimizer_that_was_loaded_is_captured_anew(times, as_on_a_gpu):
    """Also where the new groups take the place in memory of groups that were let go of."""
    data = regression_data()

    def change(svi, number):
        if number == 8:
            load_moments_of_zero(svi, times)

    options = {"steps": 16, "change": change, "check_finite": False}
    losses, state, _ = train(make_k_tied, data, compiled=False, **options)
    own_losses, own_state, svi = train(make_k_tied, data, compiled=True, **options)
    torch.testing.assert_close(own_losses, losses, rtol=RATE_RTOL, atol=0)
    torch.testing.assert_close(own_state, state, rtol=1e-5, atol=1e-6)
    assert len(svi._step.kinds) == 1


@pytest.mark.slow
def test_other_options_of_a_captured_optimizer_are_captured_anew(as_on_a_gpu):
    def change(svi, number):
        if number == 9:
            optimizers = svi.optim.optim_objs.values() if isinstance(svi, SVI) else [svi.optimizer]
            for optimizer in optimizers:
                optimizer.param_groups[0]["betas"] = (0.5, 0.9)

    options = {"steps": 14, "change": change, "check_finite": False}
    assert_same(make_k_tied, regression_data(), rtol=RATE_RTOL, **options)


def test_an_optimizer_that_cannot_be_captured_is_refused(as_on_a_gpu):
    options = {"optim": lambda: pyro.optim.RMSprop({"lr": 0.01}), "check_finite": False}
    with pytest.raises(RuntimeError, match="RMSprop cannot be captured in a CUDA graph"):
        train(make_k_tied, regression_data(), True, **options)


def test_one_mode_keeps_the_shapes_of_a_record(monkeypatch):
    """A mode for each value, torch's way where no trace is announced, takes as long as the rest."""
    made, original = [], FakeTensorMode.__init__

    def counted(self, **options):
        made.append(self)
        original(self, **options)

    monkeypatch.setattr(FakeTensorMode, "__init__", counted)
    Traced(lambda x: (x.exp() + x.sin(),), [torch.randn(3)])
    assert len(made) == 1


def test_draws_on_the_host_are_refused_in_a_graph():
    """Traced on a CPU, all random operations are on the host; arithmetic there is not counted."""
    traced = Traced(lambda x: (x + torch.randn(3) + torch.ones(3),), [torch.randn(3)])
    assert traced.random_on("cpu") == ["aten.randn.default"]
    assert traced.random_on("cuda") == []


def test_constants_of_the_host_are_copied_to_a_device_once():
    """With torch's meta device for a GPU: a graph that is captured there may not wait for the host."""
    host, parameter = torch.arange(3.0), torch.zeros(3, device="meta")

    def function(x):
        shifted = x * torch.tensor(2.0).to("meta") + parameter
        return (shifted + (host * host + torch.ones(3)).to("meta"),)

    inputs = [torch.zeros(3, device="meta")]
    traced = Traced(function, inputs)
    assert all(value.device.type == "meta" for value in traced.found)
    targets = {str(node.target) for node in traced.graph.graph.nodes if node.op == "call_function"}
    assert targets == {"aten.mul.Tensor", "aten.add.Tensor"}
    assert any(value is parameter for value in traced.found)
    assert traced(inputs)[0].shape == (3,)


@pytest.mark.slow
def test_nothing_of_a_step_is_kept():
    """Neither gradients nor the batch."""
    model, guide = make_k_tied()
    svi = ps.CompiledSVI(model, guide, adam(), ps.StructuredELBO(), backend=None)
    x, y = regression_data()
    for _ in range(4):
        svi.step(x, y)
    kept = weakref.ref(x)
    del x, y
    gc.collect()
    assert kept() is None
    (step,) = svi._step.kinds.values()
    assert all(parameter.grad is None for parameter in guide.parameters())
    assert step._traced.outputs == ()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["mean field", "k-tied", "low rank", "inducing weights", "ensemble"]
)
def test_a_cuda_graph_gives_what_svi_gives(name):
    def make():
        model = make_regressor().cuda()
        return model, GUIDE_CASES[name](model)

    assert_same(make, [value.cuda() for value in regression_data()], steps=12, rtol=RATE_RTOL)
