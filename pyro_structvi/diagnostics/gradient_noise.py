"""How noisy the gradients of a guide's parameters are."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyro_structvi._checks import Count, Program, checked
from pyro_structvi._pyro import ONE_THREAD
from pyro_structvi.infer import StructuredELBO
from pyro_structvi.posterior.runs import tensors_in
from pyro_structvi.sites.finding import separate_randomness


@dataclass(frozen=True)
class GradientNoise:
    """The noise of one parameter's gradient, over independent draws at the same data.

    Elements whose gradient is zero in every draw are left out of all three numbers, which are NaN where
    no other elements are there. An element whose gradient does not vary has an infinite ratio.

    Attributes:
        snr: The signal-to-noise ratio ``E[g]^2 / Var[g]``, averaged over elements.
        median_snr: The median of that ratio over elements, which a few large ones do not move.
        second_moment_ratio: ``E[g^2] / Var[g]``, averaged over elements; one more than ``snr``, but for
            the finite number of draws.
    """

    snr: float
    median_snr: float
    second_moment_ratio: float


@checked
def gradient_snr(
    model: Program,
    guide: nn.Module,
    *args: Any,
    num_samples: Count = 100,
    objective: StructuredELBO | None = None,
    **kwargs: Any,
) -> dict[str, GradientNoise]:
    r"""Return the signal-to-noise ratio of the gradient of each parameter of a guide.

    .. math:: \mathrm{SNR} = \mathrm{E}[g]^2 / \mathrm{Var}[g]

    for each element g of the gradient of the negative ELBO, estimated from independent gradients at the
    present parameters and on the same batch, with the unbiased estimate of the variance. Parameters,
    their ``.grad``, buffers of the model and the global state of random numbers stay as they are.

    How to read it: a step of plain gradient descent knows the sign of an element's gradient well if the
    ratio is well above 1, and must average many steps if it is far below. The estimate for pure noise is
    about ``1 / num_samples``, so numbers of that size say zero. Ratios fall on the way to the optimum,
    where ``E[g]`` is zero: compare guides at the same stage of training. The noise of choosing
    mini-batches is not in it.

    Args:
        model: The model.
        guide: The guide.
        *args: Their arguments, a batch as in training.
        num_samples: The number of gradients, at least 2.
        objective: The objective, with its present weight of the KL and number of particles; a
            ``StructuredELBO()`` when None.
        **kwargs: Keyword arguments of model and guide.

    Returns:
        By the name of the guide's parameter, as ``guide.named_parameters()`` has it.

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
        Swiatkowski et al. (2020), "The k-tied Normal distribution", section 3.2 and Figure 4. Their
        footnote 2 prints ``E[g^2] / Var[g^2]``, which depends on the unit of the gradient, and takes the
        moments over 10 successive batches; here the ratio has no unit and the batch is fixed.
    """
    if num_samples < 2:
        raise ValueError(
            f"`num_samples` must be at least 2, for a variance, but got {num_samples}."
        )
    objective = StructuredELBO() if objective is None else objective

    def gradients() -> dict[str, Tensor]:
        terms = objective.terms(model, guide, *args, **kwargs)
        return _gradients(guide, -terms.weighted(objective.current_kl_weight))

    with ONE_THREAD, separate_randomness(), torch.enable_grad(), _kept_buffers(model):
        mean, variance = _moments(gradients, num_samples)
    share = (num_samples - 1) / num_samples
    return {name: _summary(mean[name].square(), variance[name], share) for name in mean}


def _gradients(guide: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a loss by parameter, zeros where it does not depend on one."""
    trained = {name: value for name, value in guide.named_parameters() if value.requires_grad}
    if not trained or not loss.requires_grad:
        raise ValueError("`guide` must have parameters to train, but has none that the ELBO needs.")
    found = torch.autograd.grad(
        loss, [*trained.values()], allow_unused=True, materialize_grads=True
    )
    return {name: each.double() for name, each in zip(trained, found, strict=True)}


def _moments(
    draw: Callable[[], Mapping[str, Tensor]], count: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return mean and unbiased variance of each element, of which no draw has to be kept.

    References:
        Welford (1962), "Note on a method for calculating corrected sums of squares and products".
    """
    mean = {**draw()}
    squares = {name: torch.zeros_like(value) for name, value in mean.items()}
    for number in range(2, count + 1):
        for name, value in draw().items():
            change = value - mean[name]
            mean[name] = mean[name] + change / number
            squares[name] += change * (value - mean[name])
    return mean, {name: each / (count - 1) for name, each in squares.items()}


def _summary(signal: Tensor, variance: Tensor, share: float) -> GradientNoise:
    """Average the ratios of the elements that have a gradient.

    Args:
        signal: The squared mean.
        variance: The unbiased variance.
        share: By how much ``E[g^2]`` is above the squared mean, as a share of that variance.
    """
    has_gradient = (signal > 0) | (variance > 0)
    signal, variance = signal[has_gradient], variance[has_gradient]
    ratio = signal / variance
    second = (signal + share * variance) / variance
    median = ratio.median() if len(ratio) else ratio.mean()
    return GradientNoise(float(ratio.mean()), float(median), float(second.mean()))


@contextmanager
def _kept_buffers(model: Any) -> Iterator[None]:
    """Put back the buffers of a model, such as running statistics, after this block."""
    buffers = [each for each in tensors_in(model) if not isinstance(each, nn.Parameter)]
    before = [each.clone() for each in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for each, value in zip(buffers, before, strict=True):
                each.copy_(value)
