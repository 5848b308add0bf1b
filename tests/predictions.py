"""Predictions whose distribution is known in closed form."""

import torch
from torch.distributions import Independent, Normal

from pyro_structvi.posterior.prediction import Prediction


def normal_prediction(mean, scale, y=None, draws=1):
    """Return a prediction N(mean, scale^2), the same at each draw, with the density of ``y``."""
    mean = torch.as_tensor(mean)
    scale = torch.as_tensor(scale, dtype=mean.dtype).expand(mean.shape)
    likelihood = Independent(Normal(mean, scale), mean.dim() - 1)
    return Prediction(
        mean=mean,
        variance=scale.square(),
        function_variance=torch.zeros_like(mean),
        entropy=None,
        mutual_information=None,
        log_density=None if y is None else likelihood.log_prob(y),
        functions=mean.expand(draws, *mean.shape),
        likelihood=likelihood.expand((draws, len(mean))),
        num_samples=draws,
    )
