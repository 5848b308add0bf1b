"""fit: what it accepts, what it trains, what it returns, and how it stops."""

import pyro
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_structvi as ps
from pyro_structvi.infer import CosineDecay, History
from pyro_structvi.infer.data_warnings import PRIOR_DRAWS
from pyro_structvi.infer.steps.eager import EagerStep
from tests.models import make_regressor, regression_data


def make(size=12):
    model = make_regressor(size)
    return model, ps.KTiedGuide(model), regression_data(size)


def snapshot(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def unchanged(module, before):
    return all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize(
    ("compiled", "block"),
    [
        *((False, torch.inference_mode), ("traced", torch.inference_mode)),
        *(("traced", torch.no_grad), (None, torch.inference_mode)),
        *(pytest.param(how, torch.no_grad, marks=pytest.mark.slow) for how in (False, None)),
    ],
)
def test_steps_train_also_where_gradients_are_disabled(block, compiled):
    """As within a loop of Bayesian optimization. None is a loop over `CompiledSVI`."""
    found = []
    for own in (torch.enable_grad, block):
        pyro.set_rng_seed(0)
        model, guide, data = make()
        with own():
            if compiled is None:
                optim, elbo = pyro.optim.Adam({"lr": 0.1}), ps.StructuredELBO()
                svi = ps.CompiledSVI(model, guide, optim, elbo, backend=None)
                found.append([svi.step(*data) for _ in range(8)])
            else:
                found.append(
                    ps.fit(model, guide, data, num_steps=8, compiled=compiled, progress=False).elbo
                )
    assert found[1] == found[0]


class Pairs(TensorDataset):
    """A data set of the user's own."""


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x, y: [x, y],
        lambda x, y: Pairs(x, y),
        lambda x, y: DataLoader(Pairs(x, y), batch_size=12),
        lambda x, y: [(x, y), (x, y)],
        lambda x, y: [{"x": x, "y": y}],
    ],
    ids=["list", "dataset", "loader", "batches", "dicts"],
)
def test_it_takes_data_in_every_form(wrap):
    """Of points the steps are the same, in whatever order examples come."""
    model, _, data = make()
    elbos = [
        ps.fit(model, ps.MAPGuide(model), each, num_steps=4, lr=0.1, progress=False).elbo
        for each in (data, wrap(*data))
    ]
    assert elbos[1] == pytest.approx(elbos[0])


def test_mini_batches_visit_each_example_once_an_epoch(monkeypatch):
    seen = []
    model = make_regressor(25)
    x, y = torch.arange(75.0).reshape(25, 3), torch.zeros(25, 1)
    forward = type(model).forward
    monkeypatch.setattr(
        type(model), "forward", lambda self, x, y: (seen.append(x), forward(self, x, y))[1]
    )
    guide = ps.MeanFieldGuide(model)
    guide.initialize(x, y)
    seen.clear()
    ps.fit(model, guide, (x, y), num_epochs=1, batch_size=10, progress=False)
    del seen[: 1 + PRIOR_DRAWS]  # which runs of the prior have seen
    assert [len(batch) for batch in seen] == [10, 10, 5]
    assert torch.equal(torch.cat(seen).sort(0).values, x)
    assert not torch.equal(torch.cat(seen), x)


def test_the_history_adds_up():
    model, guide, data = make()
    history = ps.fit(
        model,
        guide,
        data,
        num_steps=10,
        lr=CosineDecay(10, start=0.1),
        kl_weight=ps.LinearAnnealing(5),
        progress=False,
    )
    assert isinstance(history, History)
    assert history.kl_weight == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1])
    assert history.lr == pytest.approx([CosineDecay(10, 0.1)(step) for step in range(10)])
    parts = zip(history.log_likelihood, history.kl, strict=True)
    assert history.elbo == pytest.approx([likelihood - kl for likelihood, kl in parts])
    assert not history.interrupted


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"num_steps": 1}, [1]),
        ({"num_steps": 4}, [0.5, 0.75, 1, 1]),
        ({"num_steps": 8}, [0.25, 7 / 16, 5 / 8, 13 / 16] + 4 * [1]),
        ({"num_steps": 4, "kl_weight": 1.0}, 4 * [1]),
    ],
)
def test_the_weight_of_the_kl_rises_over_half_of_the_steps_unless_given(options, weights):
    model, guide, data = make()
    history = ps.fit(model, guide, data, **options, progress=False)
    assert history.kl_weight == pytest.approx(weights)


def test_the_weight_of_the_objective_is_taken_where_fit_has_none_and_not_changed():
    model, guide, data = make()
    elbo = ps.StructuredELBO(kl_weight=0.5, num_particles=2)
    history = ps.fit(model, guide, data, num_steps=2, elbo=elbo, progress=False)
    assert history.kl_weight == [0.5, 0.5]
    assert (elbo.kl_weight, elbo.step) == (0.5, 0)
    message = "Give one of `kl_weight` and a `kl_weight` of `elbo`, but got 0.1 and 0.5"
    with pytest.raises(ValueError, match=message):
        ps.fit(model, guide, data, num_steps=2, elbo=elbo, kl_weight=0.1, progress=False)
    plain = ps.StructuredELBO(num_particles=2)
    history = ps.fit(model, guide, data, num_steps=2, elbo=plain, kl_weight=0.1, progress=False)
    assert history.kl_weight == [0.1, 0.1]


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD])
@pytest.mark.parametrize(
    ("lr", "rates"), [(0.2, [0.2, 0.15, 0.05]), (lambda step: 0.2 * step, [0.0, 0.2, 0.4])]
)
def test_a_rate_is_a_number_that_falls_to_zero_or_a_function_of_the_step(optimizer, lr, rates):
    model, guide, data = make()
    options = {"num_steps": 3, "lr": lr, "optimizer": optimizer, "progress": False}
    assert ps.fit(model, guide, data, **options).lr == pytest.approx(rates)


def test_groups_of_an_optimizer_keep_their_ratio_under_a_function():
    model, guide, data = make()

    def grouped(parameters, lr):
        first, *others = parameters
        made = torch.optim.SGD([{"params": [first], "lr": 0.5 * lr}, {"params": others, "lr": lr}])
        made.register_step_post_hook(lambda *_: rates.append([g["lr"] for g in made.param_groups]))
        return made

    rates = []
    ps.fit(model, guide, data, num_steps=1, lr=lambda step: 1e-4, optimizer=grouped, progress=False)
    assert rates == [[0.5e-4, 1e-4]]


@pytest.mark.slow
def test_deep_posteriors_do_not_collapse():
    """With the whole KL from the first step this one ends at a constant function."""
    torch.manual_seed(0)
    x = 3.4 * torch.rand(400, 2) - 1.7
    y = x.square().sum(-1, keepdim=True) + 0.1 * torch.randn(400, 1)
    layers = [layer for size in (2, 20, 20) for layer in (nn.Linear(size, 20), nn.Tanh())]
    net = nn.Sequential(*layers, nn.Linear(20, 1))
    error = {}
    for kl_weight in ("annealed", 1.0):
        model = ps.Regressor(ps.bayesianize(net, ps.FanIn(1.5, 1.0)), noise="learned")
        guide = ps.MeanFieldGuide(model)
        torch.manual_seed(0)
        options = {"num_steps": 400, "kl_weight": kl_weight, "progress": False}
        ps.fit(model, guide, (x, y), **options)
        error[kl_weight] = float(
            (ps.predict(model, guide, x, num_samples=50).mean - y).std() / y.std()
        )
    assert error["annealed"] < 0.3
    assert error[1.0] > 0.9


def test_point_estimated_parameters_and_running_statistics_are_trained():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    bayes_net = ps.bayesianize(net, normalization=False)
    model = ps.Regressor(bayes_net, num_data=12, noise_scale=0.3)
    guide = ps.MeanFieldGuide(model)
    model.eval()
    ps.fit(model, guide, regression_data(), num_steps=3, progress=False)
    layer = model.net[1]
    assert not torch.equal(layer.weight, torch.ones(4))
    assert not torch.equal(layer.running_mean, torch.zeros(4))
    assert not any(module.training for module in model.modules())


def test_an_interrupt_returns_what_there_is(monkeypatch):
    model, guide, data = make()
    original = EagerStep.take

    def interrupted(self, *batch):
        if self.loss.elbo.step == 5:
            raise KeyboardInterrupt
        return original(self, *batch)

    monkeypatch.setattr(EagerStep, "take", interrupted)
    history = ps.fit(model, guide, data, num_steps=100, progress=False)
    assert history.interrupted
    assert len(history.elbo) == 5
    assert guide.draw()


def test_the_progress_bar_shows_the_elbo(capsys):
    model, guide, data = make()
    ps.fit(model, guide, data, num_steps=5)
    assert "elbo=" in capsys.readouterr().err


# ---- bad input -----------------------------------------------------------------------------------


def test_nan_in_tensors_is_found_before_the_first_step():
    model, guide, (x, y) = make()
    x[3, 1] = float("nan")
    before = snapshot(guide)
    with pytest.raises(ValueError, match=r"`data\[0\]` holds 1 NaN of 36 values"):
        ps.fit(model, guide, (x, y), num_steps=5, progress=False)
    assert unchanged(guide, before)


def test_a_loss_that_is_not_finite_names_site_and_step_and_keeps_the_parameters():
    model, guide, data = make()
    ps.fit(model, guide, data, num_steps=2, progress=False)
    with torch.no_grad():
        guide["net.2.weight"].log_row_scale[0, 0] = 800.0  # exp overflows
    before = snapshot(guide)
    message = (
        r"At step 0, .*(net.2.weight|obs).* is not finite. Parameters and buffers are those before"
    )
    with pytest.raises(FloatingPointError, match=message):
        ps.fit(model, guide, data, num_steps=5, progress=False)
    assert unchanged(guide, before)


def test_parameters_that_no_step_can_change_are_refused():
    with torch.inference_mode():
        model, guide, _ = make()
        net = nn.Linear(3, 1)
    for parts in ((model, guide), (ps.Regressor(net, 12, noise=0.3), make()[1])):
        with pytest.raises(ValueError, match=r"must be made outside of `torch\.inference_mode"):
            ps.fit(*parts, regression_data(), num_steps=5, progress=False)


X, Y = regression_data()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": None}, "Give one of `num_epochs` and `num_steps`"),
        ({"num_epochs": 1}, "Give one of `num_epochs` and `num_steps`"),
        ({"num_steps": 0}, "`num_steps` must be a whole number of at least 1"),
        ({"num_steps": None, "num_epochs": -1}, "`num_epochs` must be a whole number of at least"),
        ({"lr": 0.0}, "`lr` must be a positive number"),
        ({"batch_size": 0}, "`batch_size` must be a whole number of at least 1"),
        ({"kl_weight": -1.0}, "`kl_weight` must be a finite number"),
        ({"data": (X, Y[:-1])}, r"one positive length, but got \[12, 11\]"),
        ({"data": [(X, Y)], "batch_size": 3}, "mini-batches that are given have their own"),
        ({"data": iter([])}, "`data` must be a tuple of tensors, a Dataset, or"),
        ({"data": (X.half(), Y.half())}, "dtype"),
        ({"data": (X, Y.numpy())}, r"of tensors, but got \['Tensor', 'ndarray'\]"),
        ({"guide": lambda x, y: None}, r"`guide` must be a torch.nn.Module.*pyro.infer.SVI"),
    ],
)
def test_wrong_arguments(options, message):
    model, guide, data = make()
    options = {"guide": guide, "data": data, "num_steps": 1, "progress": False} | options
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        ps.fit(model, **options)


def test_model_and_guide_in_the_wrong_order():
    model, guide, data = make()
    with pytest.raises(TypeError, match=r"but got a guide: write `fit\(model, guide, data\)`"):
        ps.fit(guide, model, data, num_steps=1, progress=False)


def test_data_that_run_out():
    model, guide, data = make()

    class Once:
        def __init__(self, batch):
            self.batches = iter([batch])

        def __iter__(self):
            return self.batches

        def __len__(self):
            return 1

    with pytest.raises(ValueError, match="A pass through `data` gave no mini-batch"):
        ps.fit(model, guide, Once(data), num_steps=3, progress=False)


def test_a_gradient_norm_that_overflows_is_explained():
    model = make_regressor(noise_scale=1e-14).float()
    guide = ps.KTiedGuide(model)
    x, y = (value.float() for value in regression_data())
    before = snapshot(guide)
    with pytest.raises(FloatingPointError, match="At step 0, the norm of all gradients overflows"):
        ps.fit(model, guide, (x, y), num_steps=1, progress=False)
    assert unchanged(guide, before)
