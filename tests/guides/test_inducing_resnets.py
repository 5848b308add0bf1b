"""Inducing weights on torchvision's ResNets, in single precision from the default start."""

import pytest
import torch
from torchvision import models

import pyro_structvi as ps

NAMES = ["resnet18", "resnext50_32x4d"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pyro_structvi.nn.PointEstimateWarning")
@pytest.mark.parametrize("name", NAMES)
def test_training_starts_without_jitter_and_goes_down(name):
    torch.set_default_dtype(torch.float32)
    net = getattr(models, name)(num_classes=10)
    model = ps.Classifier(ps.bayesianize(net, prior=ps.FanIn(1.4)), num_data=50_000)
    guide = ps.InducingWeightGuide(model)
    x, y = torch.randn(4, 3, 64, 64), torch.randint(10, (4,))
    loss = ps.StructuredELBO()(model, guide)
    loss(x, y)
    optimizer = torch.optim.Adam([*guide.parameters(), *model.parameters()], lr=1e-3)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        value = loss(x, y)
        value.backward()
        for parameter in guide.parameters():
            assert torch.isfinite(parameter.grad).all()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0]
    joints = [guide[name]().joint for name in guide.site_names if name.endswith("conv1.weight")]
    assert all(
        float(jitter) == 0
        for joint in joints
        for jitter in (joint.rows.jitter, joint.columns.jitter)
    )
