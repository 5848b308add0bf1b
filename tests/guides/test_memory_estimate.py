"""The memory of a guide, before anything is allocated."""

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import FullCovariance, KTied, MeanField
from tests.guide_cases import GUIDES, POINTS
from tests.models import linear_function
from tests.recorded_sizes import RecordsSizes


def make_model():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 3))
    return ps.Classifier(ps.bayesianize(net, prior=1.0), 12)


@pytest.mark.parametrize("guide_name", [*GUIDES, *POINTS])
def test_the_estimate_is_that_of_the_guide(guide_name):
    model, make_guide = make_model(), (GUIDES | POINTS)[guide_name]
    estimate, guide = ps.estimate_memory(make_guide, model), make_guide(model)
    assert estimate.total == sum(value.numel() for value in guide.parameters())
    for name in guide.site_names:
        own = sum(value.numel() for value in guide[name].parameters())
        assert estimate.parameters.get(name, own) == own
    stored = [*guide.parameters(), *guide.buffers()]
    assert estimate.parameter_bytes == sum(v.numel() * v.element_size() for v in stored)


def test_training_takes_the_parameters_four_times():
    dtype = torch.float32
    net = nn.Linear(40, 30, dtype=dtype)
    model = ps.Classifier(ps.bayesianize(net, prior=1.0), 12)
    guide = ps.MeanFieldGuide(model)
    optimizer = torch.optim.Adam(guide.parameters())
    loss = ps.StructuredELBO()(model, guide)(
        torch.randn(12, 40, dtype=dtype), torch.randint(3, (12,))
    )
    loss.backward()
    optimizer.step()
    held = [*guide.parameters(), *(value.grad for value in guide.parameters())]
    held += [v for state in optimizer.state.values() for v in state.values() if v.dim()]
    assert ps.estimate_memory(ps.MeanFieldGuide, model).training_bytes == sum(
        value.numel() * value.element_size() for value in held
    )


def test_nothing_is_allocated():
    model = ps.Classifier(ps.bayesianize(nn.Linear(1000, 1000), prior=1.0), 12)
    with RecordsSizes() as recorded:
        estimate = ps.estimate_memory(ps.StructuredGuide, model, {"*": KTied(2)})
    assert estimate.total == 1000 * 1001 + 2 * (1000 + 1001)
    assert max(recorded.stored) <= 1000


def test_options_are_passed_on_and_limits_hold():
    model = make_model()
    families = {"*.weight": KTied(1), "*": MeanField()}
    estimate = ps.estimate_memory(ps.StructuredGuide, model, families, init_scale=0.1)
    assert estimate.parameters["net.2.weight"] == 3 * 5 + 3 + 5  # with the bias
    large = ps.Classifier(ps.bayesianize(nn.Linear(1000, 1000), prior=1.0), 12)
    with pytest.raises(MemoryError, match="A full covariance of the 1,001,000 elements"):
        ps.estimate_memory(ps.StructuredGuide, large, {"*": FullCovariance()})


def test_guides_made_afterwards_have_values():
    model = make_model()
    ps.estimate_memory(ps.MeanFieldGuide, model)
    assert not ps.MeanFieldGuide(model)["net.2.weight"].loc.is_meta


def test_a_function_must_run_first():
    with pytest.raises(ValueError, match="must declare its sample sites"):
        ps.estimate_memory(ps.MeanFieldGuide, linear_function)
