"""Weights of the members of a mixture of guides."""

from typing import Any

import torch
from torch import Tensor

from pyro_structvi._checks import Count, Program, checked
from pyro_structvi.infer.elbo import StructuredELBO
from pyro_structvi.posterior.prediction import predict
from pyro_structvi.posterior.runs import evaluation_mode
from pyro_structvi.structures.mixture import MixtureGuide

TOLERANCE = 1e-10  # of the mean log density, in nats, which ten to twenty steps reach
MOST_STEPS = 100


@checked
def weigh_by_bound(
    model: Program, guide: MixtureGuide, *args: Any, num_particles: Count = 32, **kwargs: Any
) -> None:
    r"""Weigh the members of a mixture by their bounds, :math:`w_k \propto \exp(\mathrm{ELBO}(q_k))`.

    These weights maximize the bound of the mixture if members do not overlap. A member whose bound is
    several nats higher than all others has nearly all the weight; it is :attr:`MixtureGuide.best`. The
    model runs in evaluation mode.

    Args:
        model: The model.
        guide: The mixture, changed in place.
        *args: The model's arguments, with all the data.
        num_particles: The number of draws for the estimate of each bound.
        **kwargs: The model's keyword arguments.

    Raises:
        ValueError: If members are points, which have no bound, or if no bound is finite.

    Example:
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize
        >>> x = torch.linspace(-1, 1, 32).unsqueeze(-1)
        >>> model = Regressor(bayesianize(torch.nn.Linear(1, 1), prior=1.0), 32, noise_scale=0.1)
        >>> guide = MixtureGuide(model, MeanFieldGuide, size=3)
        >>> weigh_by_bound(model, guide, x, 2 * x)
        >>> round(float(guide.weights.sum()), 4)
        1.0
    """
    if guide.is_of_points:
        raise ValueError(
            "`guide` must have members with densities, but they are points, which have no bound. Call "
            "`weigh_by_stacking(model, guide, x, y)` with data that were held out."
        )
    elbo = StructuredELBO(num_particles=num_particles)
    with evaluation_mode(model):
        bounds = [elbo.terms(model, each, *args, **kwargs).elbo for each in guide.members]
    weights = torch.stack(bounds).softmax(0)
    _check_finite(weights)
    guide.weights.copy_(weights)


@checked
def weigh_by_stacking(
    model: Program,
    guide: MixtureGuide,
    x: Any,
    y: Tensor,
    *,
    num_samples: Count = 100,
    batch_size: Count | None = None,
) -> None:
    r"""Weigh the members of a mixture by the predictive density of held-out data.

    The weights maximize :math:`\sum_n \log \sum_k w_k p_k(y_n \mid x_n)`, up to 1e-10 nats for each
    example, by an interior-point method.

    Args:
        model: The model.
        guide: The mixture, changed in place.
        x: Inputs that were not trained on, as for :func:`~pyro_structvi.predict`.
        y: Their observations.
        num_samples: The number of draws of each member; points have one.
        batch_size: Inputs in a mini-batch; None for all.

    Raises:
        ValueError: If observations have no finite density.

    Example:
        >>> from pyro_structvi import EnsembleGuide, Regressor, bayesianize
        >>> x = torch.linspace(-1, 1, 32).unsqueeze(-1)
        >>> model = Regressor(bayesianize(torch.nn.Linear(1, 1), prior=1.0), 32, noise_scale=0.1)
        >>> guide = EnsembleGuide(model, size=3)
        >>> weigh_by_stacking(model, guide, x, 2 * x)
        >>> round(float(guide.weights.sum()), 4)
        1.0

    References:
        Yao, Vehtari, Simpson and Gelman (2018), "Using stacking to average Bayesian predictive
        distributions", Bayesian Analysis.
    """
    count = 1 if guide.is_of_points else num_samples
    options: dict[str, Any] = {"num_samples": count, "batch_size": batch_size, "stream": True}
    densities = [predict(model, each, x, y=y, **options).log_density for each in guide.members]
    each = torch.stack([value.double().flatten() for value in densities if value is not None], -1)
    _check_finite(each.amax(-1))
    guide.weights.copy_(_stacked(each))


def _stacked(log_densities: Tensor) -> Tensor:
    r"""Return the weights with the highest mean log density, by primal-dual Newton steps.

    The mean log density minus :math:`\sum_k w_k` has its maximum where the weights sum to one. Its
    gradient :math:`g - 1` is there at most 0, and 0 where a weight is positive.

    Args:
        log_densities: ``(N, K)``, of each example under each member.
    """
    densities = (log_densities - log_densities.amax(-1, keepdim=True)).exp()
    count, number = densities.shape
    weights = densities.new_full((number,), 1 / number)
    slack = torch.ones_like(weights)
    for _ in range(MOST_STEPS):
        shares = densities / (densities @ weights).unsqueeze(-1)
        gradient = shares.mean(0)
        if not gradient.max() * weights.sum() - 1 > TOLERANCE:  # the duality gap
            break
        centre = 0.1 * (weights @ slack) / number
        hessian = shares.mT @ shares / count + (slack / weights).diag()
        step = torch.linalg.solve(hessian, gradient - 1 + centre / weights)
        own = (centre - slack * step) / weights - slack
        weights, slack = _moved(weights, step), _moved(slack, own)
    return weights / weights.sum()


def _moved(values: Tensor, step: Tensor) -> Tensor:
    """Return positive values after a step, or after the part that keeps them positive."""
    parts = torch.where(step < 0, -0.99 * values / step, 1.0)
    return values + parts.min().clamp_max(1.0) * step


def _check_finite(values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise ValueError(
            "The observations have no finite density under any member of `guide`. Check `y` for "
            "infinite values, or fit the guide first."
        )
