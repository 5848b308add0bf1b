"""Models with a subnetwork, by hand and by the guide."""

import torch

import pyro_structvi as ps
from tests.models import make_regressor

NOISE, PRIOR, NUM_DATA = 0.3, 0.7, 30
CHOSEN = {
    "net.0.weight": torch.arange(15).reshape(5, 3) % 4 == 0,
    "net.2.weight": torch.tensor([[True, False, False, True, False]]),
}
SIZE = 6


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def make_guide(**options):
    model = make_regressor(NUM_DATA, PRIOR, NOISE)
    guide = ps.SubnetworkGuide(model, CHOSEN, init_scale=0.2, **options)
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return guide


def joint(guide):
    """Return the law of the chosen elements, and where they are in all elements side by side."""
    masks, first = [], 0
    for name in guide.site_names:
        size = guide[name].site.shape.numel()
        masks.append(first + CHOSEN.get(name, torch.zeros(size)).flatten().nonzero().flatten())
        first += size
    return guide.couplings["net/0/weight"].posterior(), torch.cat(masks)
