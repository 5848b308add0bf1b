"""Function values of draws of microcanonical Langevin sampling."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.ops.stats import split_gelman_rubin
from torch import nn

import pyro_structvi as ps
from pyro_structvi.reference import NotMixedWarning
from pyro_structvi.reference import mclmc as sample
from pyro_structvi.reference.log_joint import LogJoint


class LastStep(nn.Module):
    """Has no rule of vmap without a gradient."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.RNN(3, 2, batch_first=True), nn.Linear(2, 1)

    def forward(self, x):
        return self.out(self.cell(x)[0][:, -1])


@pytest.mark.filterwarnings("ignore::pyro_structvi.reference.NotMixedWarning")
def test_functions_of_recurrent_nets_are_evaluated():
    model = ps.Regressor(ps.bayesianize(LastStep(), prior=1.0), 6, noise_scale=1.0)
    data, guide = (torch.randn(6, 4, 3), torch.randn(6, 1)), ps.MeanFieldGuide(model)
    guide.initialize(*data)
    draws = sample(model, guide, data, num_warmup=2, num_draws=4, num_chains=2, progress=False)
    functions = ps.predict(model, draws, data[0]).functions.reshape(2, 4, -1)
    assert draws.r_hat == pytest.approx(split_gelman_rubin(functions).max())


@pytest.mark.parametrize("kind", ["observations", "nothing", "factor", "no observations"])
def test_densities_stand_in_for_functions_that_a_model_does_not_return(kind):
    """Observations are constants, classes have no mean, and a factor has no distribution."""
    labels = torch.randint(3, (20,))

    def model(y):
        logits = pyro.sample("logits", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        if kind == "factor":
            pyro.factor("factor", logits[labels])
        if kind in ("factor", "no observations"):
            return None
        with pyro.plate("examples", 20):
            observed = pyro.sample("y", dist.Categorical(logits=logits), obs=labels.to(y))
        return observed if kind == "observations" else None

    data = (torch.zeros(20),)
    guide = ps.MeanFieldGuide(model)
    guide.initialize(*data)
    target, at = LogJoint(model, guide, data), torch.randn(2, 3)
    found = torch.func.vmap(target.functions_at)(at)
    logits = torch.func.vmap(target.values_at)(at)[0]["logits"]
    of_factor = logits[:, labels]
    expected = {"factor": of_factor, "no observations": logits}
    log_probs = of_factor - logits.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(found, expected.get(kind, log_probs), rtol=1e-12, atol=0.0)


def test_constants_judge_no_convergence():
    def model(x):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(weight, 1.0).to_event(1), obs=x)
        return 2 * x

    guide, data = ps.MeanFieldGuide(model), (torch.ones(2),)
    guide.initialize(*data)
    options = {"num_warmup": 5, "num_draws": 4, "num_chains": 2, "progress": False}
    with pytest.warns(NotMixedWarning, match="R-hat of function values is NaN: no number"):
        draws = sample(model, guide, data, **options)
    assert np.isnan(draws.r_hat)
    assert draws.weight_r_hat > 0
