"""What the tests of compiled steps share."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import nn

import pyro_structvi as ps
from tests.guide_cases import GUIDES, POINTS
from tests.models import make_linear_regressor

STEPS = 7
GUIDE_CASES = GUIDES | POINTS


def compiles(test):
    """Mark a test in which inductor compiles, which is slow, and where torch warns of itself."""
    ignored = "ignore::FutureWarning:torch._inductor", "ignore::DeprecationWarning"
    return pytest.mark.slow(pytest.mark.filterwarnings(*ignored)(test))


def adam(**options):
    return pyro.optim.Adam({"lr": 0.01, **options})


def still():
    return pyro.optim.SGD({"lr": 1e-300})


def train(
    make,
    data,
    compiled,
    steps=STEPS,
    loss=ps.StructuredELBO,
    optim=adam,
    change=None,
    backend=None,
    **options,
):
    """Train with SVI or a compiled step from the same seeds; return losses, parameters, the object.

    ``data`` are the arguments of every step, or a function of its number that returns them.
    """
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model, guide = make()
    if compiled:
        svi = ps.CompiledSVI(model, guide, optim(), loss(), backend=backend, **options)
    else:
        svi = SVI(model, guide, optim(), loss())
    losses = []
    for number in range(steps):
        if change is not None:
            change(svi, number)
        losses.append(svi.step(*(data(number) if callable(data) else data)))
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
    assert all(not step.to_come for step in steps_of(svi))
    return losses


def steps_of(svi):
    """Return the recorded steps."""
    return [step for steps in svi._step.kinds.values() for step in steps]


def make_k_tied(model_of=make_linear_regressor, **options):
    model = model_of()
    return model, ps.KTiedGuide(model, **options)


def image_model():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )
    with pytest.warns(ps.nn.PointEstimateWarning):
        return ps.Classifier(ps.bayesianize(net, prior=1.0), 6)


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


def subsampled():
    """Return a model whose loss, at a point, depends on the subsample only."""
    y = 2.0 ** torch.arange(10)

    def model():
        mean = pyro.sample("mean", dist.Normal(torch.zeros(()), 2.0))
        with pyro.plate("data", 10, subsample_size=4) as index:
            pyro.sample("obs", dist.Normal(mean, 1.0), obs=y[index])

    return model, ps.MAPGuide(model)
