"""Likelihoods of real targets and counts."""

import math
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_structvi._checks import (
    Count,
    Positive,
    Rule,
    check_broadcastable,
    check_positive,
    check_same_kind,
    check_shape,
    checked,
    shape_text,
)
from pyro_structvi._pyro import declared_samples
from pyro_structvi.linalg.matrices import at_least_single, log_gamma_ratio, shrink
from pyro_structvi.nn.likelihood import Likelihood, Output, Terms
from pyro_structvi.nn.priors import (
    PositiveDistribution,
    check_constant,
    resolve_prior,
    sample_from,
)
from pyro_structvi.nn.random_module import prior_of

NoiseScale = float | Tensor | PositiveDistribution
DegreesOfFreedom = Annotated[
    float,
    Rule("a finite number above 1", lambda value: 1 < value < math.inf),  # which has a mean
]

SMALLEST_FLOOR = 1e-6  # heteroscedastic noise must not round to zero
LARGEST_RATE = 1e18  # of a draw of counts by torch


class Regressor(Likelihood):
    r"""A net as a model of real targets: ``y_n ~ N(net(x_n), noise_scale^2)``.

    With ``noise="heteroscedastic"`` the net returns means followed by as many values r, and
    :math:`\sigma_n^2 = \log(1 + e^{r_n})^2 + \sigma_0^2` are the variances, with the floor
    :math:`\sigma_0`. With ``df`` the noise has Student's t-distribution, which is robust to outliers,
    with these values as its scales.

    Args:
        net: A module with sample sites, from ``(batch, ...)`` to means ``(batch, *target)``; to
            ``(batch, ..., 2 * size)`` for targets ``(batch, ..., size)`` with heteroscedastic noise.
        num_data: As for :class:`~pyro_structvi.Classifier`.
        noise_scale: Standard deviation of the noise, in the targets' units: a number, a tensor that
            broadcasts to a target, or a distribution over positive numbers, which becomes the
            latent site ``noise_scale``.
        output: From the return value of the net to the means, as for ``Classifier``.
        noise: In place of ``noise_scale``: the same; ``"learned"`` for the prior ``HalfNormal(1)``, for
            targets of standard deviation 1; or ``"heteroscedastic"``.
        df: Degrees of freedom of Student's t-distribution, above 1; ``"learned"`` for 1 plus the latent
            site ``df_minus_one``, whose prior is Gamma(2, 0.1); a distribution over positive numbers as
            the prior of that site; or None for normal noise.
        noise_floor: The floor of heteroscedastic noise, in the units of ``noise_scale``. Counts and
            ratings need one, since the likelihood of repeated values grows without bound as the noise
            vanishes: the standard deviation of rounding is the spacing of values over the root of 12.
        standardize: Training inputs and targets ``(x, y)``. The net has standardized inputs, and its
            outputs and the noise scale are in units of the targets' standard deviations; ``y`` and
            predictions are in the targets' own units.

    Raises:
        TypeError: If a prior is not over positive numbers.
        ValueError: If ``noise_scale`` is not positive, ``df`` is not above 1, or not exactly one of
            ``noise_scale`` and ``noise`` is given, or ``noise_floor`` is given for other noise.

    Example:
        >>> from pyro.infer import Predictive
        >>> from pyro_structvi import bayesianize
        >>> net = bayesianize(nn.Linear(4, 1), prior=1.0)
        >>> model = Regressor(net, num_data=100, noise="learned")
        >>> Predictive(model, num_samples=3)(torch.zeros(5, 4))["obs"].shape
        torch.Size([3, 5, 1])
        >>> net = bayesianize(nn.Linear(4, 2), prior=1.0)
        >>> model = Regressor(net, num_data=100, noise="heteroscedastic", df=4)
        >>> Predictive(model, num_samples=3)(torch.zeros(5, 4))["obs"].shape
        torch.Size([3, 5, 1])

    References:
        Nix and Weigend (1994), "Estimating the mean and variance of the target probability
        distribution", for heteroscedastic noise; Lange, Little and Taylor (1989), "Robust statistical
        modeling using the t distribution"; Juárez and Steel (2010), "Model-based clustering of
        non-Gaussian panel data based on skew-t distributions", for the prior of degrees of freedom.
    """

    __constants__: ClassVar = ["df", "is_heteroscedastic", "noise_floor"]

    @checked
    def __init__(
        self,
        net: nn.Module,
        num_data: Count | None = None,
        noise_scale: NoiseScale | None = None,
        output: Output | None = None,
        *,
        noise: NoiseScale | Literal["learned", "heteroscedastic"] | None = None,
        df: DegreesOfFreedom | PositiveDistribution | Literal["learned"] | None = None,
        noise_floor: Positive = SMALLEST_FLOOR,
        standardize: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        x, y = (None, None) if standardize is None else standardize
        if x is not None and y is not None and x.shape[:1] != y.shape[:1]:
            raise ValueError(
                "`standardize` must hold inputs and targets of one length, but got shapes "
                f"{shape_text(x.shape)} and {shape_text(y.shape)}."
            )
        super().__init__(net, num_data, output, x)
        self._register_standard("target", y)
        name = "noise_scale" if noise is None else "noise"
        given = noise_scale if noise is None else noise
        if (noise_scale is None) == (noise is None):
            raise ValueError(
                "`noise_scale` must be given, a positive number, a tensor, or a distribution over "
                "positive numbers; or in its place `noise`, which takes these too, "
                '"learned" for the prior HalfNormal(1), or "heteroscedastic" for a scale by the net.'
            )
        self.df: float | Literal["learned"] | None = None
        if isinstance(df, str | torch.distributions.Distribution):
            self.df = "learned"
            prior = dist.Gamma(2.0, 0.1) if isinstance(df, str) else df
            like = self._example.new_zeros(())
            sample_from(self, "df_minus_one", resolve_prior(prior, "df", like), like.shape)
        elif df is not None:
            self.df = float(df)  # torch takes no number of NumPy
        self.is_heteroscedastic = isinstance(given, str) and given == "heteroscedastic"
        if noise_floor != SMALLEST_FLOOR and not self.is_heteroscedastic:
            raise ValueError(
                f'`noise_floor` is of `noise="heteroscedastic"`, but got {noise_floor!r} for `{name}`. '
                "Leave it out."
            )
        self.noise_floor = float(noise_floor)
        self.terms = "pairs" if self.is_heteroscedastic else "elements"
        if not self.is_heteroscedastic:
            self._set_scale(name, dist.HalfNormal(1.0) if isinstance(given, str) else given)

    @property
    def _example(self) -> Tensor:
        """A number with the net's dtype, at least in single precision, and device."""
        tensors = [*self.net.parameters(), *self.net.buffers()]
        example = next((t for t in tensors if t.is_floating_point()), torch.zeros(()))
        return at_least_single(example.detach().new_zeros(()))

    def _set_scale(self, name: str, noise_scale: Any) -> None:
        """Make the noise scale a site or a buffer with the net's dtype and device."""
        example = self._example
        if isinstance(noise_scale, torch.distributions.Distribution):
            like = example.new_zeros(noise_scale.batch_shape + noise_scale.event_shape)
            prior = resolve_prior(noise_scale, name, like)
            sample_from(self, "noise_scale", prior, like.shape)
        else:
            if isinstance(noise_scale, Tensor):
                check_constant(name, noise_scale)
            scale = torch.as_tensor(noise_scale, dtype=example.dtype, device=example.device)
            check_positive(name, scale)
            self.register_buffer("noise_scale", scale)

    def observe(self, output: Tensor, plates: int, y: Tensor | None) -> Tensor:
        """Sample or observe targets of the shape, device and dtype of the means; return the means."""
        mean, scale = self._mean_and_scale(output, plates)
        if y is not None:
            meaning = "that of the means" if self.is_heteroscedastic else "that of the net's output"
            check_shape("y", y, mean.shape[plates:], meaning)
            y = at_least_single(y)
            check_same_kind("y", y, "net(x)", mean)
        event, noise = mean.dim() - plates - 1, dist.Normal
        if self.df is not None:
            is_learned = self.df == "learned"
            df = 1 + _of_draws(self.df_minus_one, 0, mean) if is_learned else self.df
            noise = partial(StudentTNoise, df)
        self._observe(lambda: noise(mean, scale).to_event(event), y)
        return mean

    def _mean_and_scale(self, found: Tensor, plates: int) -> tuple[Tensor, Tensor]:
        """Return means ``(*plates, batch, *target)`` and noise scales, in the targets' units."""
        if self.is_heteroscedastic:
            if found.dim() < plates + 2 or found.shape[-1] % 2:
                raise ValueError(
                    "The net must return means and then as many values for the noise scale, (batch, "
                    f"..., 2 * size), under heteroscedastic noise, but got {tuple(found.shape)}. Let "
                    "its last layer have two outputs for each target."
                )
            mean, raw = found.chunk(2, -1)
            scale = torch.hypot(F.softplus(raw), raw.new_full((), self.noise_floor))
        else:
            mean, scale = found, self.noise_scale
            is_site = "noise_scale" in declared_samples(self)
            own = prior_of(self, "noise_scale").event_shape if is_site else scale.shape
            if scale.dim() > len(own):
                scale = _of_draws(scale, len(own), mean)
            else:
                target = mean.shape[plates + 1 :]
                check_broadcastable("noise_scale", scale, target, "the shape of a target")
        if self.target_mean is None:
            return mean, scale
        if self.target_mean.numel() > 1:
            target, meaning = mean.shape[plates + 1 :], "the shape of a target by the net's output"
            check_broadcastable("standardize[1].mean(0)", self.target_mean, target, meaning)
        return mean * self.target_scale + self.target_mean, scale * self.target_scale


def _of_draws(site: Tensor, event_dim: int, mean: Tensor) -> Tensor:
    """Return a site ``(*plates, *shape)`` as ``(*plates, 1, *shape)``, to broadcast to the means."""
    plates, shape = site.shape[: site.dim() - event_dim], site.shape[site.dim() - event_dim :]
    ones = (1,) * (mean.dim() - site.dim() if plates else 0)
    return site.reshape((*plates, *ones, *shape))


class StudentTNoise(dist.StudentT):
    """Student's t-distribution with the right density also for many degrees of freedom."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log densities of the values' shape, in nats."""
        if self._validate_args:
            self._validate_sample(value)
        df, square = shrink(self.df, self.df.dim()), ((value - self.loc) / self.scale).square()
        constant = log_gamma_ratio(df, 1) - 0.5 * (math.pi * df).log() - self.scale.log()
        return constant - 0.5 * (df + 1) * (square / df).log1p()


class PoissonRegressor(Likelihood):
    """A net as a model of counts: ``y_n ~ Poisson(exp(net(x_n)))``.

    Args:
        net: A module with sample sites, from ``(batch, ...)`` to log rates ``(batch, *target)``.
        num_data: As for :class:`~pyro_structvi.Classifier`.
        output: From the return value of the net to the log rates, as for ``Classifier``.
        standardize: As for ``Classifier``.

    Example:
        >>> import torch
        >>> from pyro.infer import Predictive
        >>> from pyro_structvi import bayesianize
        >>> model = PoissonRegressor(bayesianize(torch.nn.Linear(4, 1), prior=1.0), num_data=100)
        >>> Predictive(model, num_samples=3)(torch.zeros(5, 4))["obs"].shape
        torch.Size([3, 5, 1])

    References:
        McCullagh and Nelder (1989), "Generalized linear models", chapter 6.
    """

    terms: Terms = "elements"

    def observe(self, output: Tensor, plates: int, y: Tensor | None) -> Tensor:
        """Sample or observe counts in any dtype, and return the log rates."""
        return self._observe_numbers(LogRatePoisson, output, plates, y)


class LogRatePoisson(dist.Poisson):
    """A Poisson distribution by log rates, exact where a rate rounds to zero or infinity.

    Args:
        log_rate: The logarithms, ``(*batch,)``.
        validate_args: Whether to check arguments and values; the setting of Pyro when None.

    Example:
        >>> import torch
        >>> LogRatePoisson(torch.tensor(-200.0)).log_prob(torch.tensor(1.0))
        tensor(-200.)
    """

    arg_constraints: ClassVar = {"log_rate": constraints.real}

    def __init__(self, log_rate: Tensor, validate_args: bool | None = None) -> None:
        self.log_rate, self.is_sparse = log_rate, False
        torch.distributions.Distribution.__init__(self, log_rate.shape, validate_args=validate_args)

    @property
    def rate(self) -> Tensor:
        """The expected counts, ``(*batch,)``."""
        return self.log_rate.exp()

    def expand(self, batch_shape: Any, _instance: Any = None) -> "LogRatePoisson":
        """Return this distribution with a larger batch shape, sharing memory."""
        new: LogRatePoisson = self._get_checked_instance(LogRatePoisson, _instance)
        LogRatePoisson.__init__(new, self.log_rate.expand(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw counts ``(*sample_shape, *batch)``; a rate above 1e18 is its own draw."""
        shape = self._extended_shape(torch.Size(sample_shape))
        rate = self.rate.detach().expand(shape)
        # Torch draws in int64, and negative counts beyond it.
        drawn = torch.poisson(rate.clamp_max(LARGEST_RATE))
        return torch.where(rate < LARGEST_RATE, drawn, rate)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log probabilities; sums are in double, because large terms of large counts cancel."""
        if self._validate_args:
            self._validate_sample(value)
        log_rate, value = self.log_rate.double(), value.double()
        powers = torch.where(value == 0, 0, value * log_rate)  # no count has a rate of zero
        log_prob: Tensor = powers - log_rate.exp() - torch.lgamma(value + 1)
        return log_prob.to(self.log_rate.dtype)
