"""The memory of a guide, before anything is allocated."""

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import FullCovariance, KTied
from tests.guide_cases import GUIDES, POINTS
from tests.models import linear_function
from tests.recorded_sizes import RecordsSizes


def make_model():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 3))
    return ps.Classifier(ps.bayesianize(net, prior=1.0), 12)


def test_the_estimate_is_that_of_the_guide():
    model = make_model()
    for name, make_guide in (GUIDES | POINTS).items():
        estimate, guide = ps.estimate_memory(make_guide, model), make_guide(model)
        assert estimate.total == sum(value.numel() for value in guide.parameters()), name
        for site in guide.site_names:
            own = sum(value.numel() for value in guide[site].parameters())
            assert estimate.parameters.get(site, own) == own, name
        stored = [*guide.parameters(), *guide.buffers()]
        assert estimate.parameter_bytes == sum(v.numel() * v.element_size() for v in stored), name


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


def test_nothing_is_allocated_and_limits_hold():
    large = ps.Classifier(ps.bayesianize(nn.Linear(1000, 1000), prior=1.0), 12)
    with RecordsSizes() as recorded:
        estimate = ps.estimate_memory(ps.StructuredGuide, large, {"*": KTied(2)}, init_scale=0.1)
    assert estimate.total == 1000 * 1001 + 2 * (1000 + 1001)  # with the bias
    assert max(recorded.stored) <= 1000
    assert not ps.MeanFieldGuide(large)["net.weight"].loc.is_meta
    with pytest.raises(MemoryError, match="A full covariance of the 1,001,000 elements"):
        ps.estimate_memory(ps.StructuredGuide, large, {"*": FullCovariance()})
    with pytest.raises(ValueError, match="must declare its sample sites"):
        ps.estimate_memory(ps.MeanFieldGuide, linear_function)
