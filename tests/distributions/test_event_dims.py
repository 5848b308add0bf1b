"""Arguments that several distributions share are checked by each of them."""

import pytest
import torch

from pyro_structvi.distributions import (
    LogScaleNormal,
    LowRankNormal,
    MeanFieldNormal,
    PointMass,
    PointMixture,
    PrunedNormal,
)

EVENT_DIMS = {
    "mean field": lambda n: MeanFieldNormal(torch.zeros(2, 3), 1.0, event_dim=n),
    "log scale": lambda n: LogScaleNormal(torch.zeros(2, 3), torch.zeros(2, 3), event_dim=n),
    "pruned": lambda n: PrunedNormal(torch.zeros(2, 3), 1.0, torch.ones(3).bool(), event_dim=n),
    "low rank": lambda n: LowRankNormal(torch.zeros(2, 3), torch.ones(1, 2, 3), 1.0, event_dim=n),
    "point": lambda n: PointMass(torch.zeros(2, 3), event_dim=n),
    "points": lambda n: PointMixture(torch.zeros(2, 3), event_dim=n),
}


@pytest.mark.parametrize("make", EVENT_DIMS.values(), ids=EVENT_DIMS)
@pytest.mark.parametrize("event_dim", [-1, -2, True, 1.0])
def test_an_event_has_no_negative_number_of_dimensions(make, event_dim):
    with pytest.raises(ValueError, match="`event_dim` must be a whole number from 0 to the 2 dim"):
        make(event_dim)
    assert make(2 if make is not EVENT_DIMS["points"] else 1).event_shape[-1] == 3
