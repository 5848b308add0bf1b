"""Steps captured as CUDA graphs."""

import gc
import math
import weakref

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

import pyro_structvi as ps
from pyro_structvi.infer import CompileFallbackWarning
from pyro_structvi.infer.steps import replayed
from pyro_structvi.infer.steps.recording import Record
from tests.guide_cases import GUIDES
from tests.infer.compiled_steps import (
    GUIDE_CASES,
    adam,
    assert_same,
    image_model,
    make_k_tied,
    steps_of,
    still,
    subsampled,
    train,
)
from tests.models import make_linear_regressor, make_regressor, regression_data

RATE_RTOL = 1e-6  # a graph has learning rates in single precision


class ReplayedOperations:
    """Does on a CPU what a CUDA graph does on a GPU: the same operations on the same memory."""

    def __init__(self, function, inputs):
        self._inputs = [value.detach().clone() for value in inputs]
        self._unused = [torch.zeros(())]
        self._record = Record(lambda _: function(self._inputs), self._unused)
        self._first = self._record.outputs  # a record is a real step, and a capture is none

    def __call__(self, inputs):
        for own, value in zip(self._inputs, inputs, strict=True):
            own.copy_(value)
        first, self._first = self._first, None
        return self._record(self._unused) if first is None else first


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Let steps on the CPU go the way of those on a GPU, with recorded operations for a graph."""
    monkeypatch.setattr(replayed, "GRAPH_DEVICE", "cpu")
    monkeypatch.setattr(replayed, "CUDAGraph", ReplayedOperations)
    monkeypatch.setattr(
        replayed.ReplayedStep, "_warm_up", lambda step, inputs: step._replay(inputs)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["low rank", "inducing weights", "inducing weights, ensemble"])
def test_a_captured_step_is_that_of_svi(name, as_on_a_gpu):
    def make():
        model = make_regressor()
        return model, GUIDE_CASES[name](model)

    assert_same(make, regression_data(), steps=12, rtol=RATE_RTOL)


@pytest.mark.slow
def test_a_captured_step_reads_buffers_weights_and_subsamples(as_on_a_gpu):
    data = torch.randn(6, 1, 4, 4), torch.randint(3, (6,))
    annealed = {"loss": lambda: ps.StructuredELBO(kl_weight=ps.LinearAnnealing(10))}
    assert_same(lambda: make_k_tied(image_model), data, steps=12, rtol=RATE_RTOL, **annealed)
    losses = assert_same(subsampled, (), optim=still, steps=30)
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
        options = {"lr": 0.01, "progress": False}
        options |= {"optimizer": make_optimizer, "compiled": compiled}
        history = ps.fit(model, guide, data, num_steps=9, **options)
        return history.elbo, history.lr, dict(guide.state_dict())

    expected, rates, state = fit(compiled=False)
    losses, own_rates, own = fit(compiled=True)
    torch.testing.assert_close(losses, expected, rtol=RATE_RTOL, atol=0)
    torch.testing.assert_close(own_rates, rates, rtol=1e-6, atol=0)
    torch.testing.assert_close(own, state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make_guide", [pytest.param(ps.KTiedGuide, marks=pytest.mark.slow), ps.RowwiseGuide]
)
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
        optimizer = ps.StructuredAdam(guide.parameters(), guide)
        svi = ps.CompiledSVI(model, guide, optimizer, ps.StructuredELBO(), backend=None)
        for number in range(10):
            if number == bad_at:
                (step,) = steps_of(svi)
                assert step.updates
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
@pytest.mark.parametrize("name", GUIDES)
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


@torch.library.custom_op("tests::wait", mutates_args=())
def wait(x: Tensor) -> Tensor:
    """Return a copy once the device has done its work, which no CUDA graph can."""
    torch.cuda.current_stream().synchronize()
    return x.clone()


wait.register_fake(torch.clone)
wait.register_autograd(lambda context, gradient: gradient)


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_goes_on_as_svi():
    def make():
        model = make_regressor().cuda()
        model.net.register_forward_hook(lambda module, given, output: wait(output))
        return model, ps.MeanFieldGuide(model)

    data, stream = [value.cuda() for value in regression_data()], torch.cuda.current_stream()
    expected, state, _ = train(make, data, compiled=False)
    number = torch.randn(3, device="cuda")
    with pytest.warns(CompileFallbackWarning, match="captur"):
        losses, own, _ = train(make, data, compiled=True, fallback=True)
    torch.testing.assert_close(torch.randn(3, device="cuda"), number, rtol=0, atol=0)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(own, state, rtol=1e-4, atol=1e-5)
    assert torch.cuda.current_stream() == stream
    with pytest.raises(torch.OutOfMemoryError):  # and no error of an allocator that still captures
        torch.empty(1 << 45, device="cuda")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_a_captured_step_reads_learning_rates(kind, as_on_a_gpu):
    """Both as numbers that were written into a group, and by a scheduler of torch's."""

    def feed():
        pyro.set_rng_seed(0)
        model, guide = make_k_tied()
        data = regression_data()
        optimizer = kind(guide.parameters(), lr=1e-3, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        svi = ps.CompiledSVI(model, guide, optimizer, ps.StructuredELBO(), backend=None)
        losses = []
        for number in range(14):
            if number == 12:
                optimizer.param_groups[0]["lr"] = 1e-5
            losses.append(svi.step(*data))
            schedule.step() if number < 11 else None
        assert isinstance(optimizer.param_groups[0]["lr"], float)
        return losses

    losses = feed()
    replayed.GRAPH_DEVICE = "cuda"
    expected = feed()
    torch.testing.assert_close(losses, expected, rtol=RATE_RTOL, atol=0)


@pytest.mark.slow
def test_captured_steps_of_several_shapes_share_learning_rates(as_on_a_gpu):
    x, y = regression_data()
    pyro.set_rng_seed(0)
    model, guide = make_k_tied()
    svi = ps.CompiledSVI(model, guide, adam(), ps.StructuredELBO(), backend=None)
    for number in range(20):
        size = 12 if number % 2 else 5
        if number == 16:
            svi.optimizer.param_groups[0]["lr"] = 0.0
            before = {name: value.clone() for name, value in guide.state_dict().items()}
        svi.step(x[:size], y[:size])
    assert all(not step.to_come for step in steps_of(svi))
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

    options = {"steps": 16, "change": change}
    losses, state, _ = train(make_k_tied, data, compiled=False, **options)
    own_losses, own_state, svi = train(make_k_tied, data, compiled=True, **options)
    torch.testing.assert_close(own_losses, losses, rtol=RATE_RTOL, atol=0)
    torch.testing.assert_close(own_state, state, rtol=1e-5, atol=1e-6)
    assert len(steps_of(svi)) == 2


@pytest.mark.slow
def test_other_options_of_a_captured_optimizer_are_captured_anew(as_on_a_gpu):
    def change(svi, number):
        if number == 9:
            optimizers = svi.optim.optim_objs.values() if isinstance(svi, SVI) else [svi.optimizer]
            for optimizer in optimizers:
                optimizer.param_groups[0]["betas"] = (0.5, 0.9)

    options = {"steps": 14, "change": change}
    assert_same(make_k_tied, regression_data(), rtol=RATE_RTOL, **options)


@pytest.mark.slow
def test_an_optimizer_that_cannot_skip_updates_in_python(as_on_a_gpu):
    losses = assert_same(
        make_k_tied, regression_data(), steps=9, optim=lambda: pyro.optim.RMSprop({"lr": 0.01})
    )
    assert len(set(losses)) == 9


def test_draws_on_the_host_are_refused_for_parameters_on_a_device():
    with pytest.raises(RuntimeError, match="draws on the CPU, and a CUDA graph would repeat"):
        Record(lambda x: (x + torch.randn(3).to("meta"),), [torch.zeros(3, device="meta")])


def test_writes_on_the_host_are_refused_for_parameters_on_a_device():
    counts = torch.zeros(3)
    with pytest.raises(RuntimeError, match="changes a tensor of the host"):
        Record(lambda x: (x + counts.add_(1).to("meta"),), [torch.zeros(3, device="meta")])


def test_constants_of_the_host_are_copied_to_a_device_once():
    """With torch's meta device for a GPU: a graph that is captured there may not wait for the host."""
    host, parameter = torch.arange(3.0), torch.zeros(3, device="meta")

    def function(x):
        shifted = x * torch.tensor(2.0).to("meta") + parameter
        return (shifted + (host * host + torch.ones(3)).to("meta"),)

    inputs = [torch.zeros(3, device="meta")]
    record = Record(function, inputs)
    assert all(value.device.type == "meta" for value in record.found)
    names = {str(operation) for operation in record.operations}
    assert names == {"aten.mul.Tensor", "aten.add.Tensor"}
    assert any(value is parameter for value in record.found)
    assert record(inputs)[0].shape == (3,)


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
    (step,) = steps_of(svi)
    assert all(parameter.grad is None for parameter in guide.parameters())
    assert all(record.outputs == () for record in step._records)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["mean field", "k-tied", "low rank", "inducing weights", "inducing weights, ensemble"]
)
def test_a_cuda_graph_gives_what_svi_gives(name):
    def make():
        model = make_regressor().cuda()
        return model, GUIDE_CASES[name](model)

    assert_same(make, [value.cuda() for value in regression_data()], steps=12, rtol=RATE_RTOL)
