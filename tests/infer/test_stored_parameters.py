"""Parameters that programs read by ``pyro.param`` are trained as those of modules are."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from pyro.infer.autoguide import AutoNormal, init_to_mean
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import nn

import pyro_structvi as ps
from pyro_structvi.infer import SharedParametersWarning

POSITIVE = constraints.positive


def data():
    torch.manual_seed(0)
    x = torch.randn(20, 3)
    return x, x.sum(-1) + 3.0 + 0.3 * torch.randn(20)


def observe(x, weight, shift, scale, y):
    with pyro.plate("data", len(x)):
        mean = nn.functional.linear(x, weight).squeeze(-1) + shift
        pyro.sample("obs", dist.Normal(mean, scale), obs=y)


def prior():
    return dist.Normal(torch.zeros(1, 3), 1.0).to_event(2)


def program(x, y=None):
    weight = pyro.sample("weight", prior())
    shift = pyro.param("shift", torch.zeros(()))
    observe(x, weight, shift, pyro.param("scale", torch.ones(()), constraint=POSITIVE), y)


class Module(PyroModule):
    def __init__(self):
        super().__init__()
        self.weight = PyroSample(prior())
        self.shift = PyroParam(torch.zeros(()))
        self.scale = PyroParam(torch.ones(()), constraint=POSITIVE)

    def forward(self, x, y=None):
        observe(x, self.weight, self.shift, self.scale, y)


class Reading(PyroModule):
    def __init__(self):
        super().__init__()
        self.weight = PyroSample(prior())

    def forward(self, x, y=None):
        shift = pyro.param("shift", torch.zeros(()))
        observe(x, self.weight, shift, pyro.param("scale", torch.ones(()), constraint=POSITIVE), y)


def trained(model, compiled=False, **options):
    torch.manual_seed(1)
    guide = ps.MeanFieldGuide(model, init_loc_fn=lambda site: torch.zeros(1, 3))
    return ps.fit(model, guide, data(), num_steps=30, progress=False, compiled=compiled, **options)


@pytest.mark.parametrize(
    ("make", "compiled"),
    [
        pytest.param(lambda: program, "traced", id="function-traced"),
        pytest.param(Reading, False, id="module-False"),
        pytest.param(lambda: program, False, id="function-False", marks=pytest.mark.slow),
        pytest.param(Reading, "traced", id="module-traced", marks=pytest.mark.slow),
    ],
)
def test_they_move_as_parameters_of_a_module(make, compiled):
    module = Module()
    expected = trained(module).elbo
    pyro.clear_param_store()
    assert trained(make(), compiled).elbo == expected
    assert pyro.param("shift") == module.shift > 0.1
    assert pyro.param("scale").item() == module.scale.item()


def test_those_of_a_registered_module_and_of_a_guide_are_trained():
    net = nn.Linear(3, 1)
    start = net.bias.item()

    def model(x, y):
        pyro.module("net", net)
        observe(x, pyro.sample("weight", prior()), net(x).squeeze(-1), 1.0, y)

    class Guide(nn.Module):
        def forward(self, x, y):
            loc = pyro.param("loc", torch.zeros(1, 3))
            pyro.sample("weight", dist.Normal(loc, 0.1).to_event(2))

    ps.fit(model, Guide(), data(), num_steps=30, progress=False)
    assert net.bias.item() != start
    assert (pyro.param("loc") != 0).all()


def test_they_belong_to_checkpoints(tmp_path):
    def values(steps, checkpoint=None):
        pyro.clear_param_store()
        torch.manual_seed(1)
        guide = ps.MeanFieldGuide(program, init_loc_fn=lambda site: torch.zeros(1, 3))
        options = {"lr": lambda step: 0.1, "kl_weight": 1.0, "checkpoint": checkpoint}
        ps.fit(program, guide, data(), num_steps=steps, progress=False, **options)
        return pyro.param("shift").item(), pyro.param("scale").item()

    checkpoint = ps.Checkpoint(tmp_path / "run.pt", resume=True)
    stopped = values(5, checkpoint)
    assert values(12, checkpoint) == values(12) != stopped


def test_the_best_state_has_them():
    worse = iter(range(10, 0, -1))
    shifts = []

    def metric(*arguments):
        shifts.append(pyro.param("shift").item())
        return float(next(worse))

    validation = ps.Validation(data(), metric, every=2, patience=2)
    trained(program, kl_weight=1.0, validation=validation)
    assert pyro.param("shift").item() == shifts[0] != shifts[-1]


# ---- parameters of a former module, which the store has under the same names ---------------------


def outcome(module, seed=1):
    values, guide = data(), ps.MeanFieldGuide(module)
    torch.manual_seed(seed)
    history = ps.fit(module, guide, values, num_steps=5, progress=False, compiled=False)
    return history.elbo, module.shift.item(), module.scale.item()


def test_a_second_module_that_takes_constrained_parameters_is_named():
    first, second = Module(), Module()
    expected = outcome(first)
    with pytest.warns(
        SharedParametersWarning, match=r"the parameters \['shift', 'scale'\] of another"
    ):
        outcome(second)
    assert second.scale_unconstrained is first.scale_unconstrained
    pyro.clear_param_store()
    assert outcome(Module()) == expected


def elbo_of_pyros_guide():
    torch.manual_seed(1)
    x, y = data()
    model = ps.Regressor(ps.bayesianize(nn.Linear(3, 1)), noise_scale=0.3)
    guide = AutoNormal(model, init_loc_fn=init_to_mean)
    return ps.fit(model, guide, (x, y.unsqueeze(-1)), num_steps=5, progress=False).elbo


@pytest.mark.filterwarnings("ignore::pyro_structvi.infer.SampledKLWarning")
def test_a_second_guide_of_pyros_that_takes_parameters_is_named():
    expected = elbo_of_pyros_guide()
    with pytest.warns(SharedParametersWarning, match=r"\['AutoNormal\.locs\.net\.weight', "):
        elbo_of_pyros_guide()
    with pyro.settings.context(module_local_params=True):
        for _ in range(2):
            assert elbo_of_pyros_guide() == expected


def test_modules_with_parameters_of_their_own_share_none():
    """Warnings are errors."""
    expected = outcome(Module(), seed=2)
    with pyro.settings.context(module_local_params=True):
        first = Module()
        outcome(first)
        kept = first.shift.item(), first.scale.item()
        assert outcome(Module(), seed=2) == expected
    assert (first.shift.item(), first.scale.item()) == kept


def test_a_module_goes_on_with_its_own_parameters():
    """Warnings are errors."""
    model = Module()
    guide = ps.MeanFieldGuide(model)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), ps.StructuredELBO())
    svi.step(*data())
    for own in (guide, ps.MeanFieldGuide(model)):
        ps.fit(model, own, data(), num_steps=1, progress=False)
    for other in (program, program, Reading()):  # which ask for the parameters that the store has
        trained(other)
