"""A model and its guide under Lightning's ``Trainer``."""

import copy
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

import pyro_structvi as ps
from pyro_structvi.infer import CosineDecay
from pyro_structvi.infer.data_warnings import NumDataWarning
from tests.models import linear_function, make_regressor, regression_data

pytest.importorskip("lightning")
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from pyro_structvi.lightning import StructuredModule

SIZE = 24
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
}


def make(guide=ps.KTiedGuide, dtype=torch.float64, **options):
    pyro.set_rng_seed(0)
    model = make_regressor().to(dtype)
    model.is_num_data_given = False
    own = guide(model)
    own.initialize(*(value.to(dtype) for value in regression_data(SIZE)))
    return StructuredModule(model, own, **options)


def loader(batch_size=8, dtype=torch.float64):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        data = TensorDataset(*(value.to(dtype) for value in regression_data(SIZE)))
    return DataLoader(data, batch_size=batch_size)


def train(module, data=None, **options):
    trainer = Trainer(**QUIET | {"max_epochs": 2} | options)
    trainer.fit(module, data or loader())
    return trainer


def state_of(module):
    return copy.deepcopy(module.state_dict())


class Stream(IterableDataset):
    """Has no length."""

    def __iter__(self):
        return iter(loader().dataset)


# ---- training ------------------------------------------------------------------------------------


def test_steps_have_the_optimizer_the_rate_and_the_weights_of_fit():
    own, other = make(ps.MAPGuide), make(ps.MAPGuide)
    train(own)
    pairs, step = [*loader()], iter(range(99))
    elbo = ps.StructuredELBO(kl_weight=ps.LinearAnnealing(3, start=1 / 3))
    other.model.num_data = SIZE
    optimizer = ps.StructuredAdam([*other.parameters()], other.guide, warm_up=0.15 * 6)
    for _ in range(2):
        for x, y in pairs:
            rate = CosineDecay(6, 0.1)(next(step))
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            elbo.differentiable_loss(other.model, other.guide, x, y).backward()
            optimizer.step()
    assert own.model.num_data == SIZE
    torch.testing.assert_close(state_of(own), state_of(other))


def test_accumulated_gradients_are_those_of_the_whole_batch():
    options = {"optimizer": torch.optim.SGD, "lr": lambda step: 1e-4, "kl_weight": 1.0}
    whole, parts = make(ps.MAPGuide, **options), make(ps.MAPGuide, **options)
    assert train(whole, loader(SIZE), max_epochs=3).global_step == 3
    assert train(parts, loader(8), max_epochs=3, accumulate_grad_batches=3).global_step == 3
    torch.testing.assert_close(state_of(parts), state_of(whole))


@pytest.mark.parametrize("has_length", [True, False])
def test_an_incomplete_accumulation_is_the_mean_of_its_batches(has_length):
    options = {"optimizer": torch.optim.SGD, "lr": lambda step: 1e-4, "kl_weight": 1.0}
    own, other = make(ps.MAPGuide, **options), make(ps.MAPGuide, **options)
    own.model.num_data, own.model.is_num_data_given = SIZE, True
    data = loader(5) if has_length else DataLoader(Stream(), batch_size=5)
    Trainer(**QUIET, max_steps=4, accumulate_grad_batches=3).fit(own, data)
    other.model.num_data = SIZE
    pairs, elbo = [*loader(5)], ps.StructuredELBO()
    optimizer = torch.optim.SGD(other.parameters(), lr=1e-4)
    for part in (pairs[:3], pairs[3:], pairs[:3], pairs[3:]):
        optimizer.zero_grad()
        losses = [elbo.differentiable_loss(other.model, other.guide, x, y) for x, y in part]
        torch.stack(losses).mean().backward()
        optimizer.step()
    torch.testing.assert_close(state_of(own), state_of(other))


def test_a_schedule_counts_steps_of_the_optimizer(tmp_path):
    module = make(kl_weight=lambda step: step / 10, lr=lambda step: 1e-3 * (step + 1))
    logger = CSVLogger(tmp_path)
    trainer = train(module, accumulate_grad_batches=3, logger=logger, log_every_n_steps=1)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(3e-3)
    logger.save()
    [file] = tmp_path.rglob("metrics.csv")
    header, *rows = [line.split(",") for line in file.read_text().splitlines()]
    weights = [float(row[header.index("kl_weight")]) for row in rows]
    assert weights == pytest.approx([0.0, 0.1])
    assert {"elbo", "kl", "log_likelihood", "kl_weight"} <= {*header}


@pytest.mark.parametrize(
    ("options", "shuffles", "expected"),
    [
        ({"limit_train_batches": 2}, False, 16),
        ({"limit_train_batches": 0.4}, False, 8),
        ({"overfit_batches": 2}, False, 16),
        ({}, False, SIZE),
        ({"limit_train_batches": 2}, True, SIZE),
    ],
)
def test_the_examples_are_those_that_the_trainer_visits(options, shuffles, expected):
    """Several epochs visit all examples where each shuffles them."""
    module, data = make(ps.MAPGuide), loader().dataset
    train(module, DataLoader(data, batch_size=8, shuffle=shuffles), **options)
    assert module.model.num_data == expected


class Growing(LightningDataModule):
    """Has more examples in each epoch."""

    size = 8

    def train_dataloader(self):
        self.size += 4
        return DataLoader(Subset(loader().dataset, range(self.size)), batch_size=4)


def test_a_data_module_may_have_other_examples_in_each_epoch():
    module, seen = make(ps.MAPGuide), []
    module.model.register_forward_hook(lambda model, *_: seen.append(model.num_data))
    trainer = Trainer(**QUIET, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(module, datamodule=Growing())
    assert seen[-7:] == 3 * [12] + 4 * [16]


def test_mixed_precision():
    module = make(dtype=torch.float32)
    before = state_of(module)
    train(module, loader(dtype=torch.float32), precision="bf16-mixed")
    after = state_of(module)
    assert {value.dtype for value in module.parameters()} == {torch.float32}
    assert all(bool(torch.isfinite(value).all()) for value in after.values())
    assert any(not torch.equal(value, before[name]) for name, value in after.items())


# ---- validation, prediction, checkpoints ------------------------------------------------------------


def test_validation_and_prediction():
    module, trainer = make(ps.MAPGuide, num_samples=7), Trainer(**QUIET, max_epochs=2)
    trainer.fit(module, loader(), loader(SIZE))
    found = float(trainer.callback_metrics["val_log_density"])
    x, y = loader().dataset.tensors
    expected = (
        ps.predict(module.model, module.guide, x, num_samples=1, y=y).log_density.mean().item()
    )
    assert found == pytest.approx(expected)
    predictions = trainer.predict(module, loader())
    assert [prediction["functions"].shape for prediction in predictions] == [(7, 8, 1)] * 3
    only_inputs = trainer.predict(module, DataLoader(x, batch_size=8))
    assert [prediction["mean"].shape for prediction in only_inputs] == [(8, 1)] * 3


class Sum(nn.Module):
    """A net with two arguments, one of which has the name of an argument of a likelihood."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x, shift=0.0):
        return self.linear(x) + shift


def test_a_dict_has_the_inputs_of_the_net_or_of_the_model():
    """Training takes keyword arguments of the model, such as x and y."""
    x, y = torch.randn(SIZE, 3), torch.randn(SIZE, 1)
    of_model = [{"x": own, "y": label} for own, label in zip(x, y, strict=True)]
    only_inputs = [{"x": own} for own in x]
    of_net = [{"x": own, "shift": label} for own, label in zip(x, y, strict=True)]
    for net in (nn.Linear(3, 1), Sum()):
        model = ps.Regressor(ps.bayesianize(net, prior=1.0), SIZE, noise_scale=0.5)
        guide = ps.MeanFieldGuide(model)
        guide.initialize(x, y)
        module = StructuredModule(model, guide)
        trainer = train(module, DataLoader(of_model, batch_size=SIZE))

        def mean(data, module=module, trainer=trainer):
            return trainer.predict(module, DataLoader(data, batch_size=SIZE))[0]["mean"]

        assert torch.equal(mean(only_inputs), mean(x))
        if isinstance(net, Sum):
            torch.testing.assert_close(mean(of_net), mean(x) + y)
        with pytest.raises(
            TypeError, match=r"inputs or a tuple .* the model's arguments \['x', 'y'\]"
        ):
            mean(of_model)


def test_an_ensemble_is_measured_and_predicts_by_each_of_its_members():
    module, (x, y) = make(partial(ps.EnsembleGuide, size=7)), loader().dataset.tensors
    expected = ps.predict(module.model, module.guide, x, y=y)
    (found,) = Trainer(**QUIET).validate(module, loader(SIZE), verbose=False)
    assert found["val_log_density"] == pytest.approx(expected.log_density.mean().item())
    (prediction,) = Trainer(**QUIET).predict(module, loader(SIZE))
    torch.testing.assert_close(prediction["functions"], expected.functions)


def test_masked_examples_are_not_measured():
    """Nor a mini-batch of them alone."""
    x, y = loader().dataset.tensors
    x, y = x[x[:, 0].argsort()], y[:, 0]
    least = x[10, 0]

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[1]), 1.0).to_event(1))
        with pyro.plate("data", len(x)), pyro.poutine.mask(mask=x[:, 0] > least):
            return pyro.sample("obs", dist.Normal(x @ w, 1.0), obs=y)

    guide = ps.MAPGuide(model)
    guide.initialize(x, y)
    data = DataLoader(TensorDataset(x, y), batch_size=8)
    (found,) = Trainer(**QUIET).validate(StructuredModule(model, guide), data, verbose=False)
    expected = dist.Normal(x @ guide.median()["w"], 1.0).log_prob(y)[11:].mean()
    assert found["val_log_density"] == pytest.approx(expected.item(), rel=1e-6)


def test_predictions_of_mini_batches_have_the_same_functions():
    module, trainer = make(num_samples=3), Trainer(**QUIET)
    whole, parts = (
        torch.cat([each["functions"] for each in trainer.predict(module, loader(size))], 1)
        for size in (SIZE, 5)
    )
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    assert not torch.equal(whole[0], whole[1])


def test_several_loaders_are_measured_and_predicted_apart():
    module, own, other = make(ps.MAPGuide), loader(), loader(6)
    other.dataset.tensors[1].add_(1.0)
    train(module)
    trainer = Trainer(**QUIET)
    (found, second) = trainer.validate(module, [own, other], verbose=False)
    for number, each in enumerate((own, other)):
        x, y = each.dataset.tensors
        expected = ps.predict(module.model, module.guide, x, y=y, num_samples=1).log_density.mean()
        value = (found | second)[f"val_log_density/dataloader_idx_{number}"]
        assert value == pytest.approx(float(expected), rel=1e-6)
    assert [len(each) for each in trainer.predict(module, [own, other])] == [3, 4]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_run_goes_on_from_a_checkpoint(tmp_path):
    """Of points, which draw nothing: Lightning keeps no random states."""
    whole, part, other = (make(ps.MAPGuide) for _ in range(3))
    train(whole, max_epochs=4)

    class Stop(ModelCheckpoint):
        def on_train_epoch_end(self, trainer, module):
            super().on_train_epoch_end(trainer, module)
            trainer.should_stop = True

    stops = {"callbacks": [Stop(tmp_path, "run", save_last=False)], "enable_checkpointing": True}
    assert train(part, max_epochs=4, **stops).global_step == 3
    trainer = Trainer(**QUIET, max_epochs=4)
    trainer.fit(other, loader(), ckpt_path=tmp_path / "run.ckpt")
    assert trainer.global_step == 12
    torch.testing.assert_close(state_of(other), state_of(whole), rtol=1e-12, atol=0)
    other.load_state_dict(torch.load(tmp_path / "run.ckpt", weights_only=False)["state_dict"])
    torch.testing.assert_close(state_of(other), state_of(part), rtol=0, atol=0)


def with_noise(batch):
    """Return a mini-batch with noise of NumPy's and of Python's generator."""
    x, y = default_collate(batch)
    return x + np.random.rand() + random.random(), y  # noqa: NPY002


def test_validation_leaves_the_training_as_it_is():
    """Loaders draw seeds of torch's generator, also where they do not shuffle; data may draw more."""
    states, measured = [], []
    noisy = DataLoader(loader().dataset, batch_size=8, collate_fn=with_noise)
    for others in (None, [noisy, loader(6)]):
        module, data = make(), loader().dataset
        pyro.set_rng_seed(1)
        trainer = Trainer(**QUIET, max_epochs=2, val_check_interval=1)
        trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True), others)
        numbers = np.random.rand(), random.random()  # noqa: NPY002
        states.append((state_of(module), torch.get_rng_state(), *numbers))
    torch.testing.assert_close(*states, rtol=0, atol=0)
    for _ in range(2):
        measured += Trainer(**QUIET).validate(module, loader(), verbose=False)
    assert measured[0] == measured[1]


class Rates(Callback):
    """Writes down the learning rate of each step."""

    def __init__(self):
        self.found = []

    def on_train_batch_start(self, trainer, *_):
        self.found.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_longer_run_goes_on_by_its_own_schedule(tmp_path):
    module, rates = make(ps.MAPGuide), Rates()
    train(module).save_checkpoint(tmp_path / "run.ckpt")
    other = make(ps.MAPGuide)
    Trainer(**QUIET, max_epochs=4, callbacks=[rates]).fit(
        other, loader(), ckpt_path=tmp_path / "run.ckpt"
    )
    assert rates.found == pytest.approx([CosineDecay(12, 0.1)(step) for step in range(6, 12)])
    assert other._elbo.kl_weight == ps.LinearAnnealing(6, start=1 / 6)


def test_a_trainer_that_goes_on_has_the_rates_of_its_steps():
    rates = Rates()
    module = make(ps.MAPGuide)
    trainer = train(module, callbacks=[rates])
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, loader())
    expected = [CosineDecay(6, 0.1)(step) for step in range(6)]
    expected += [CosineDecay(12, 0.1)(step) for step in range(6, 12)]
    assert rates.found == pytest.approx(expected)


# ---- two processes ----------------------------------------------------------------------------------


def train_on_a_rank(name, folder):
    """Train on two devices, as the script that Lightning starts again for the second one."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    options = {"optimizer": torch.optim.SGD, "lr": lambda step: 1e-4, "kl_weight": 1.0}
    module, noise = make(getattr(ps, name), **options), []
    module.model.register_forward_hook(lambda *_: noise.append(torch.get_rng_state()))
    trainer = train(module, loader(12), devices=2, strategy="ddp")
    found = trainer.global_step, state_of(module), module.model.num_data, noise[-1]
    torch.save(found, f"{folder}/{trainer.global_rank}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("guide", [ps.MAPGuide, ps.KTiedGuide])
def test_two_processes_take_the_steps_of_one_with_the_whole_batch(guide, tmp_path):
    code = "import sys; from tests.test_lightning import train_on_a_rank; train_on_a_rank(*sys.argv[1:])"
    script = tmp_path / "script.py"
    script.write_text(code)
    subprocess.run(
        [sys.executable, script, guide.__name__, tmp_path],
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        timeout=200,
    )
    (steps, state, size, noise), (_, other, other_size, other_noise) = (
        torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)
    )
    assert steps == 2
    assert size == other_size == SIZE
    torch.testing.assert_close(state, other, rtol=0, atol=0)
    assert not torch.equal(noise, other_noise), "noise of its own"
    if guide is ps.MAPGuide:
        alone = make(guide, optimizer=torch.optim.SGD, lr=lambda step: 1e-4, kl_weight=1.0)
        train(alone, loader(SIZE))
        torch.testing.assert_close(state, state_of(alone))


# ---- bad input --------------------------------------------------------------------------------------


def test_what_cannot_be_trained():
    """A plain function can, with a guide that is initialized."""
    guide = ps.MeanFieldGuide(linear_function)
    with pytest.raises(ValueError, match=r"is not initialized. Call `guide.initialize\(\*batch\)`"):
        StructuredModule(linear_function, guide)
    x, y = torch.randn(8, 3), torch.randn(8, 2)
    guide.initialize(x, y)
    module = StructuredModule(linear_function, guide)
    assert train(module, DataLoader(TensorDataset(x, y), batch_size=8)).global_step == 2
    with pytest.raises(TypeError, match=r"must be a tuple `\(\*inputs, y\)`, but got a Tensor"):
        Trainer(**QUIET).validate(make(), DataLoader(x, batch_size=8))
    with pytest.raises(ValueError, match=r"infinitely many. Write `Trainer\(max_steps=...\)`"):
        train(make(), max_epochs=-1)
    stream, steps = (
        DataLoader(Stream(), batch_size=8),
        r"without a length. Write .*max_steps=...\)`",
    )
    with pytest.raises(ValueError, match=steps):
        Trainer(**QUIET, max_epochs=2).fit(make(kl_weight=1.0), stream)
    with pytest.raises(ValueError, match=r"GradientAccumulationScheduler has \[1, 3\]"):
        train(make(), callbacks=[GradientAccumulationScheduler({1: 3})])
    with pytest.raises(ValueError, match="Give one of `kl_weight` and a `kl_weight` of `elbo`"):
        make(elbo=ps.StructuredELBO(kl_weight=0.5), kl_weight=0.1)
    assert make(elbo=ps.StructuredELBO(kl_weight=0.5))._elbo.kl_weight == 0.5
    with pytest.raises(TypeError, match="LBFGS computes the loss several times in a step"):
        train(make(optimizer=torch.optim.LBFGS))


def test_parameters_of_the_param_store_are_refused():
    def model(x, y):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(1, 3), 1.0).to_event(2))
        with pyro.plate("data", SIZE, subsample=x):
            mean = x @ weight.T + pyro.param("shift", torch.zeros(()))
            pyro.sample("obs", dist.Normal(mean, 1.0).to_event(1), obs=y)

    guide = ps.MeanFieldGuide(model)
    guide.initialize(*regression_data(SIZE))
    with pytest.raises(ValueError, match=r"reads \['shift'\] by `pyro.param`"):
        Trainer(max_epochs=1, **QUIET).fit(StructuredModule(model, guide), loader())


@pytest.mark.parametrize("is_local", [False, True])
def test_mini_batches_are_checked_as_by_fit(is_local):
    """A model that counts a mini-batch for all the data, and one with sites of single examples."""

    def model(x, y):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            shift = pyro.sample("shift", dist.Normal(0.0, 1.0)) if is_local else 0.0
            pyro.sample("obs", dist.Normal(x @ weight + shift, 1.0), obs=y[:, 0])

    guide = ps.MeanFieldGuide(model)
    guide.initialize(*next(iter(loader())))
    with (
        pytest.raises(ValueError, match=r"The sites \['shift'\] belong to single examples")
        if is_local
        else pytest.warns(NumDataWarning, match=r"\['obs'\] count a mini-batch for all the data")
    ):
        train(StructuredModule(model, guide))


def with_running_statistics(guide):
    """Return a module whose net has buffers that a pass changes, and its state."""
    with pytest.warns(ps.nn.PointEstimateWarning):
        net = ps.bayesianize(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), prior=1.0)
    model = ps.Regressor(net, SIZE, 0.3)
    own = guide(model)
    own.initialize(*regression_data(SIZE))
    return StructuredModule(model, own)


def test_a_loss_that_is_not_finite_stops_before_the_step():
    module = with_running_statistics(ps.KTiedGuide)
    with torch.no_grad():
        module.guide["net.1.weight"].log_row_scale[0, 0] = 800.0  # exp overflows
    before = state_of(module)
    with pytest.raises((FloatingPointError, ValueError), match=r"not finite|must be"):
        train(module)
    torch.testing.assert_close(state_of(module), before, rtol=0, atol=0)


@pytest.mark.parametrize("number", [1, 3])
def test_a_gradient_that_is_not_finite_stops_before_the_step(number):
    """Where the loss is finite; also that of several mini-batches, which buffers have seen."""
    module = with_running_statistics(ps.MAPGuide)
    before = state_of(module)
    module.guide["net.1.bias"].loc.register_hook(lambda gradient: gradient * torch.inf)
    message = r"At step 0, the gradient of .'guide.posteriors.net/1/bias.loc'. is not finite"
    with pytest.raises(FloatingPointError, match=message):
        train(module, accumulate_grad_batches=number)
    torch.testing.assert_close(state_of(module), before, rtol=0, atol=0)
