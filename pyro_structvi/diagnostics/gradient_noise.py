"""Signal-to-noise ratios of the gradients of a guide's parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from pyro_structvi._checks import Program, Rule, checked
from pyro_structvi._pyro import ONE_THREAD
from pyro_structvi.infer import StructuredELBO
from pyro_structvi.sites.finding import buffers_kept, separate_randomness

NumSamples = Annotated[int, Rule("at least 2, for a variance", lambda value: value >= 2)]


@dataclass(frozen=True)
class GradientNoise:
    """The noise of one parameter's gradient, over independent draws at the same data.

    Elements without a gradient in any draw are excluded; without other elements all numbers are NaN. An
    element with a constant gradient has an infinite ratio.

    Attributes:
        snr: The signal-to-noise ratio ``E[g]^2 / Var[g]``, averaged over elements.
        median_snr: The median of that ratio over elements.
        second_moment_ratio: ``E[g^2] / Var[g]``, averaged over elements.
    """

    snr: float
    median_snr: float
    second_moment_ratio: float


@checked
def gradient_snr(
    model: Program,
    guide: nn.Module,
    *args: Any,
    num_samples: NumSamples = 100,
    objective: StructuredELBO | None = None,
    **kwargs: Any,
) -> dict[str, GradientNoise]:
    r"""Return the signal-to-noise ratio of the gradient of each parameter of a guide.

    .. math:: \mathrm{SNR} = \mathrm{E}[g]^2 / \mathrm{Var}[g]

    for each element g of the gradient of the negative ELBO, from independent gradients at the current
    parameters on the same batch. Parameters, their ``.grad``, buffers of the model and the global random
    state do not change.

    How to read it: well above 1 one step of gradient descent has the right sign; far below 1 many steps
    must be averaged. Pure noise gives about ``1 / num_samples``. Ratios fall towards the optimum, since
    ``E[g]`` vanishes there: compare guides at the same stage of training.

    Args:
        model: The model.
        guide: The guide.
        *args: Their arguments, a batch as in training.
        num_samples: The number of gradients, at least 2.
        objective: The objective, at its current weight of the KL; a ``StructuredELBO()`` when None.
        **kwargs: Keyword arguments of model and guide.

    Returns:
        The noise by the name in ``guide.named_parameters()``.

    Raises:
        ValueError: If ``num_samples`` is below 2, or the guide has no parameter to train.

    Example:
        >>> from pyro_structvi import KTiedGuide, Regressor, bayesianize
        >>> model = Regressor(bayesianize(nn.Linear(3, 1), prior=1.0), num_data=8, noise_scale=0.1)
        >>> guide = KTiedGuide(model, rank=1)
        >>> noise = gradient_snr(model, guide, torch.randn(8, 3), torch.randn(8, 1), num_samples=20)
        >>> noise["posteriors.net/weight.loc"].snr > 1  # at the start, far from the optimum
        True

    References:
        Swiatkowski et al. (2020), "The k-tied Normal distribution", section 3.2 and Figure 4
        of the submission to ICLR 2020.
    """
    objective = StructuredELBO() if objective is None else objective

    def gradients() -> dict[str, Tensor]:
        terms = objective.terms(model, guide, *args, **kwargs)
        # After the first terms, which make the parameters of a new guide of a function.
        trained = {name: value for name, value in guide.named_parameters() if value.requires_grad}
        loss = -terms.weighted(objective.current_kl_weight)
        if not trained or not loss.requires_grad:
            raise ValueError(
                "`guide` must have parameters to train, but has none that the ELBO needs."
            )
        values = [*trained.values()]
        found = torch.autograd.grad(loss, values, allow_unused=True, materialize_grads=True)
        return {name: each.double() for name, each in zip(trained, found, strict=True)}

    with ONE_THREAD, separate_randomness(), torch.enable_grad(), buffers_kept(model):
        mean, variance = _moments(gradients, num_samples)
    return {name: _summary(mean[name].square(), variance[name], num_samples) for name in mean}


def _moments(
    draw: Callable[[], Mapping[str, Tensor]], count: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return mean and unbiased variance of each element, one draw at a time (Welford, 1962)."""
    mean = {**draw()}
    squares = {name: torch.zeros_like(value) for name, value in mean.items()}
    for number in range(2, count + 1):
        for name, value in draw().items():
            change = value - mean[name]
            mean[name] = mean[name] + change / number
            squares[name] += change * (value - mean[name])
    return mean, {name: each / (count - 1) for name, each in squares.items()}


def _summary(signal: Tensor, variance: Tensor, count: int) -> GradientNoise:
    """Average ratios, with the squared mean as signal."""
    has_gradient = (signal > 0) | (variance > 0)
    signal, variance = signal[has_gradient], variance[has_gradient]
    ratio = signal / variance
    second = (signal + (count - 1) / count * variance) / variance
    # The mean of the lower and the upper of two middle values; `quantile` takes no 2^24 elements.
    median = (ratio.median() - (-ratio).median()) / 2 if len(ratio) else ratio.mean()
    return GradientNoise(float(ratio.mean()), float(median), float(second.mean()))
