"""Microcanonical Langevin sampling that starts at the draws of a guide."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.func import grad_and_value, vmap
from tqdm.auto import tqdm

from pyro_structvi._checks import Count, Positive, Program, brief, checked, warn_user
from pyro_structvi.infer.batches import TensorBatches, as_batches
from pyro_structvi.infer.steps.recording import Record
from pyro_structvi.posterior.runs import evaluation_mode
from pyro_structvi.reference.draws import ChainDraws, split_r_hat
from pyro_structvi.sites.finding import separate_randomness
from pyro_structvi.sites.latent_site import LatentSite, bijection_onto
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.weights.weight_distribution import GaussianWeight

PILOT_DRAWS = 100  # of a guide, for the scales of sites without a Gaussian posterior
MEMORY = 150  # steps that the adaptation of the step size remembers
SPREAD = 1.5  # of the logarithm of the energy's change, within which the adaptation trusts it
REFLECTED = 0.1931833275037836  # of a step: the minimal-norm integrator's first kick


class NotMixedWarning(UserWarning):
    """The chains of a sampler disagree, so their draws are not the posterior."""


@checked
def mclmc(
    model: Program,
    guide: StructuredGuide,
    data: Any,
    *,
    num_warmup: Count = 2000,
    num_samples: Count = 500,
    num_chains: Count = 8,
    thinning: Count | None = None,
    energy_variance: Positive = 5e-4,
    adjusted: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> ChainDraws:
    r"""Sample the posterior by microcanonical Langevin dynamics, from draws of a guide.

    A chain moves with a velocity :math:`u` of unit length in the coordinates :math:`z` of the guide,

    .. math:: \dot z = u, \qquad \dot u = \frac{1}{D - 1} (I - u u^\top) \nabla \log p(z \mid y)
        + \text{noise},

    and its stationary distribution of z is the posterior. The coordinates are the noise of Gaussian
    posteriors, :math:`W = \mu + A z` with the factor A of their structure, so that the covariance of the
    guide is the preconditioner; other sites have unconstrained values in units of the guide's standard
    deviation. All chains run in one pass of :func:`torch.func.vmap`, without translation of the model.
    They start at separate draws of the guide, or at the members of an ensemble.

    The step size is tuned in the warm-up so that the variance of the energy's change per dimension is
    ``energy_variance``, and the decoherence length to the width of the posterior. Without a
    Metropolis-Hastings step draws are biased by the discretization, the less the smaller
    ``energy_variance`` is. ``adjusted=True`` removes the bias: a transition is a trajectory of about one
    decoherence length, many steps, and is accepted or rejected as a whole.

    Args:
        model: The model, in evaluation mode during sampling. Its point estimates stay fixed.
        guide: A guide that has been initialized and usually fitted.
        data: All data, a tuple ``(x, y)`` of tensors, the model's arguments.
        num_warmup: Number of tuning steps of each chain.
        num_samples: Number of draws of each chain, at least 4.
        num_chains: Number of chains.
        thinning: Number of steps for each draw, 10 when None; with ``adjusted`` number of transitions, 1
            when None.
        energy_variance: Target variance of the energy's change in a step, per dimension, in squared
            nats.
        adjusted: Whether each trajectory is accepted or rejected, so that the posterior is exact.
        seed: Seed of the chains.
        progress: Whether to show a progress bar.

    Returns:
        The draws by site, ``(num_chains * num_samples, *shape)``, for :func:`~pyro_structvi.predict` and
        :func:`~pyro_structvi.to_inference_data`. Their ``r_hat`` is that of the log joint, and their
        ``sample_stats`` have ``lp``, the log joint in unconstrained coordinates up to a constant,
        ``energy_change``, ``step_size`` and ``decoherence_length``; for ``adjusted=True``
        ``acceptance_rate``, too. After an interrupt from the keyboard they are the draws so far, if
        there are four of each chain.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If an argument is out of range, the guide is not initialized, sites of the model are
            missing in it, or the model has a single latent number.
        RuntimeError: If the model cannot run several draws in one pass, or no chain can move.

    Warns:
        NotMixedWarning: If the largest split R-hat of the log joint is above 1.1.

    Example:
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize, fit
        >>> x = torch.linspace(-1, 1, 16).unsqueeze(-1)
        >>> model = Regressor(bayesianize(torch.nn.Linear(1, 1), prior=1.0), 16, noise_scale=0.5)
        >>> guide = MeanFieldGuide(model)
        >>> _ = fit(model, guide, (x, 2 * x), num_steps=200, progress=False)
        >>> draws = mclmc(model, guide, (x, 2 * x), num_samples=100, progress=False)
        >>> draws["net.weight"].shape
        torch.Size([800, 1, 1])

    References:
        Robnik, De Luca, Silverstein and Seljak (2023), "Microcanonical Hamiltonian Monte Carlo", JMLR;
        Robnik and Seljak (2023), "Fluctuation without dissipation: microcanonical Langevin Monte Carlo";
        Robnik, Cohn-Gordon and Seljak (2025), "Metropolis adjusted microcanonical Hamiltonian Monte
        Carlo"; Sommer, Robnik, Nozadze, Seljak and Ruegamer (2025), "Microcanonical Langevin ensembles:
        advancing the sampling of Bayesian neural networks".
    """
    if num_samples < 4:
        raise ValueError(
            f"`num_samples` must be at least 4, so that R-hat can be computed, but got {num_samples}."
        )
    args = _arguments(data, guide)
    if not guide.is_initialized:
        raise ValueError(
            "`guide` must be initialized, but it has not found the sites of `model`. Fit it, or call "
            "`guide.initialize(*data)`."
        )
    with separate_randomness(), evaluation_mode(model), evaluation_mode(guide):
        pyro.set_rng_seed(seed)
        target = LogJoint(model, guide, args)
        starts = [target.start(guide.draw(number=number)) for number in range(num_chains)]
        chains = _Chains(target, torch.stack(starts))
        transition = chains.transition if adjusted else chains.step
        thinning = thinning or (1 if adjusted else 10)
        chains.warm_up(num_warmup, energy_variance, progress)
        stats: dict[str, list[Tensor]] = {"position": [], "lp": []}
        with (
            _interruptible(stats),
            tqdm(total=num_samples, desc="mclmc", disable=not progress) as bar,
        ):
            for _ in range(num_samples):
                for _ in range(thinning):
                    found = transition()
                found |= {"position": chains.position, "lp": chains.log_density}
                for name, value in found.items():
                    stats.setdefault(name, []).append(value)
                bar.update()
        return _as_draws(target, chains, stats)


def _arguments(data: Any, guide: StructuredGuide) -> tuple[Any, ...]:
    batches = as_batches(data, None, next((p.device for p in guide.parameters()), None))
    if not isinstance(batches, TensorBatches):
        raise TypeError(
            "`data` must be a tuple of tensors with all examples, since each step needs all the data, "
            f"but got {brief(data)}. Write `mclmc(model, guide, (x, y))`."
        )
    return batches.data


@contextmanager
def _interruptible(stats: Mapping[str, list[Tensor]]) -> Iterator[None]:
    """End a block at an interrupt from the keyboard, if there are enough draws for R-hat."""
    try:
        yield
    except KeyboardInterrupt:
        if _num_complete(stats) < 4:
            raise
        warn_user("Interrupted: the draws are those so far.", UserWarning)


def _num_complete(stats: Mapping[str, list[Tensor]]) -> int:
    """Return the number of draws with all statistics, since an interrupt comes between two of them."""
    return min((len(values) for values in stats.values()), default=0)


def _as_draws(
    target: "LogJoint", chains: "_Chains", stats: Mapping[str, list[Tensor]]
) -> ChainDraws:
    count = _num_complete(stats)
    by_name = {name: torch.stack(values[:count], 1) for name, values in stats.items()}
    each = by_name.pop("position")  # (chain, draw, D)
    values = vmap(vmap(lambda position: target.values_at(position)[0]))(each)
    size = torch.full(each.shape[:2], chains.step_size)
    length = torch.full(each.shape[:2], chains.length)
    by_name |= {"step_size": size, "decoherence_length": length}
    r_hat = float(split_r_hat(by_name["lp"]))
    if r_hat > 1.1:
        warn_user(
            f"The split R-hat of the log joint is {r_hat:.3g}, so the chains are in different places. "
            "Raise `num_samples` or `thinning`, or compare function values, which may agree although "
            "weights do not.",
            NotMixedWarning,
        )
    return ChainDraws(
        {name: value.flatten(0, 1) for name, value in values.items()},
        len(each),
        r_hat=r_hat,
        weight_r_hat=max(float(split_r_hat(value).max()) for value in values.values()),
        sample_stats={name: value.cpu().numpy() for name, value in by_name.items()},
    )


# ---- the target ----------------------------------------------------------------------------------


class _Site:
    """Coordinates of the sites of one posterior of a guide.

    Args:
        site: The site, which may hold a weight with its bias.
        gaussian: Its distribution if that is Gaussian.
        pilot: Unconstrained draws of the model's site otherwise.
    """

    def __init__(self, site: LatentSite, gaussian: Any, pilot: Tensor | None) -> None:
        self.site, self.gaussian = site, gaussian
        self.bijection = bijection_onto(site.support)
        if gaussian is not None:
            self.shape = gaussian.batch_shape + gaussian.noise_shape
        else:
            assert pilot is not None
            self.shape = pilot.shape[1:]
            self.loc, scale = pilot.mean(0), pilot.std(0)
            self.scale = torch.where(scale > 0, scale, site.unit)

    def start(self, draw: Mapping[str, Tensor]) -> Tensor:
        """Return the coordinates of a draw of the guide; of an independent one for a Gaussian."""
        if self.gaussian is not None:
            return torch.randn(self.shape).to(self.gaussian.mean)
        coordinates: Tensor = (self.bijection.inv(draw[self.site.name]) - self.loc) / self.scale
        return coordinates

    def values_at(self, coordinates: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the values of the model's sites, and the log Jacobian up to a constant."""
        if self.gaussian is not None:
            value = self.gaussian.mean + self.gaussian.scale_noise(coordinates)
            return self.site.split(value), coordinates.new_zeros(())
        unconstrained = self.loc + self.scale * coordinates
        value = self.bijection(unconstrained)
        jacobian = self.bijection.log_abs_det_jacobian(unconstrained, value).sum()
        return {self.site.name: value}, jacobian


class LogJoint:
    """The log joint density of a model in coordinates of a guide, up to a constant.

    Args:
        model: The model.
        guide: The guide.
        args: The arguments of the model.

    Attributes:
        size: The number D of coordinates.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: StructuredGuide,
        args: tuple[Any, ...],
    ) -> None:
        self._model, self._args = model, args
        with poutine.block():
            trace = poutine.trace(model).get_trace(*args)
        latent = {
            name: node
            for name, node in trace.iter_stochastic_nodes()
            if not site_is_subsample(node)
        }
        pilot = [guide.draw(number=number) for number in range(PILOT_DRAWS)]
        self._sites: list[_Site] = []
        for posterior in guide.all_posteriors():
            site, q = posterior.site, posterior()
            if not set(site.names) <= latent.keys():
                continue
            has_factor = getattr(type(q), "scale_noise", None) is not GaussianWeight.scale_noise
            if isinstance(q, GaussianWeight) and has_factor:
                self._sites.append(_Site(site, q, None))
            else:
                for name in site.names:
                    part = replace(site, name=name, bias=None, support=latent[name]["fn"].support)
                    inverse = bijection_onto(part.support).inv
                    draws = torch.stack([inverse(draw[name]) for draw in pilot])
                    self._sites.append(_Site(part, None, draws))
        missing = latent.keys() - {name for each in self._sites for name in each.site.names}
        if missing:
            raise ValueError(
                f"The sites {sorted(missing)} of `model` are missing in `guide`. Make the guide of the "
                "model without `hide` and `block`."
            )
        self._lengths = [each.shape.numel() for each in self._sites]
        self.size = sum(self._lengths)
        if self.size < 2:
            raise ValueError(
                "`model` must have at least two latent numbers, since a velocity of unit length turns, "
                f"but has {self.size}. Sample it with `pyro.infer.NUTS`."
            )

    def start(self, draw: Mapping[str, Tensor]) -> Tensor:
        """Return the coordinates ``(D,)`` of a draw of the guide."""
        return torch.cat([each.start(draw).flatten() for each in self._sites])

    def values_at(self, coordinates: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the values of all sites, and the log Jacobian up to a constant."""
        values: dict[str, Tensor] = {}
        total = coordinates.new_zeros(())
        for each, part in zip(self._sites, coordinates.split(self._lengths), strict=True):
            own, jacobian = each.values_at(part.reshape(each.shape))
            values |= own
            total = total + jacobian
        return values, total

    def __call__(self, coordinates: Tensor) -> Tensor:
        """Return the log density at coordinates ``(D,)``."""
        values, jacobian = self.values_at(coordinates)
        with poutine.block(), pyro.validation_enabled(False):
            conditioned = poutine.condition(self._model, data=values)
            trace = poutine.trace(conditioned).get_trace(*self._args)
            log_joint: Tensor = trace.log_prob_sum()
        return log_joint + jacobian


# ---- the chains ----------------------------------------------------------------------------------


class _Chains:
    """Microcanonical Langevin chains, all in one pass.

    Args:
        target: The log density.
        position: The starting coordinates ``(C, D)``.

    Attributes:
        position: The coordinates.
        log_density: The log density there ``(C,)``.
        step_size: The step size.
        length: The decoherence length.
    """

    def __init__(self, target: LogJoint, position: Tensor) -> None:
        self._evaluate = _gradients(target, position)
        self.position = position
        self.log_density, self._gradient = self._evaluate(position)
        if not bool(torch.isfinite(self.log_density).all()):
            raise RuntimeError(
                "The log joint is not finite at a draw of `guide`. Fit the guide before sampling."
            )
        self._velocity = _unit(torch.randn_like(position))
        self.length = math.sqrt(target.size)
        self.step_size = self.length / 4

    def warm_up(self, count: int, variance: float, progress: bool) -> None:
        """Tune the step size by the energy's change, and the length by the width of the posterior."""
        size = self.position.shape[-1]
        moments = _Moments()
        weighted = weights = 0.0
        for number in tqdm(range(count), desc="warm-up", disable=not progress):
            change, moved = self._move()
            if not bool(moved.all()):
                self.step_size, weighted, weights = self.step_size / 2, 0.0, 0.0
                if self.step_size < 1e-9 * self.length:
                    raise RuntimeError(
                        "The energy changes without bound however small the step is, so no chain can "
                        "move. Check the data, or sample in double precision."
                    )
                continue
            # The change is of the order of step^3: an average of change^2 / step^6 predicts the step.
            relative = float(change.square().mean()) / (size * variance) + 1e-8
            weight = math.exp(-0.5 * (math.log(relative) / (6 * SPREAD)) ** 2)
            decay = (MEMORY - 1) / (MEMORY + 1)
            weighted = decay * weighted + weight * relative / self.step_size**6
            weights = decay * weights + weight
            self.step_size = min((weighted / weights) ** (-1 / 6), self.length)
            if number >= count // 4:
                moments.add(self.position)
            if number in (count // 2, 3 * count // 4):
                self.length = math.sqrt(moments.total_variance)
                moments = _Moments()

    def step(self) -> dict[str, Tensor]:
        """Take a step; return statistics of the chains."""
        change, _ = self._move()
        return {"energy_change": change}

    def transition(self) -> dict[str, Tensor]:
        """Take a trajectory and accept or reject it (Metropolis-Hastings)."""
        start = self.position, self.log_density, self._gradient
        self._velocity = _unit(torch.randn_like(self.position))
        mean = max(1, round(self.length / self.step_size))
        change = torch.zeros_like(self.log_density)
        has_moved = torch.ones_like(change, dtype=torch.bool)
        for _ in range(int(torch.randint(1, 2 * mean + 1, ()))):
            own, moved = self._move(refreshes=False)
            change, has_moved = change + own, has_moved & moved
        rate = torch.where(has_moved, (-change).clamp_max(0.0).exp(), 0.0)
        accepted = torch.rand_like(rate) < rate
        self.position, self.log_density, self._gradient = (
            torch.where(accepted.reshape(-1, *[1] * (new.dim() - 1)), new, old)
            for new, old in zip(
                (self.position, self.log_density, self._gradient), start, strict=True
            )
        )
        return {"energy_change": change, "acceptance_rate": rate}

    def _move(self, refreshes: bool = True) -> tuple[Tensor, Tensor]:
        """Take a step of the minimal-norm integrator, and add noise to the velocities.

        Chains without a finite energy stay, with the opposite velocity.

        Returns:
            The energy's change ``(C,)``, and which chains have moved.
        """
        h = self.step_size
        velocity, first = _kick(self._velocity, self._gradient, REFLECTED * h)
        position = self.position + h / 2 * velocity
        velocity, second = _kick(velocity, self._evaluate(position)[1], (1 - 2 * REFLECTED) * h)
        position = position + h / 2 * velocity
        log_density, gradient = self._evaluate(position)
        velocity, third = _kick(velocity, gradient, REFLECTED * h)
        change = first + second + third - (log_density - self.log_density)
        moved = torch.isfinite(change) & torch.isfinite(gradient).all(-1)
        each = moved.unsqueeze(-1)
        self.position = torch.where(each, position, self.position)
        self._gradient = torch.where(each, gradient, self._gradient)
        self.log_density = torch.where(moved, log_density, self.log_density)
        velocity = torch.where(each, velocity, -self._velocity)
        if refreshes:
            noise = math.sqrt(math.expm1(2 * h / self.length) / velocity.shape[-1])
            velocity = _unit(velocity + noise * torch.randn_like(velocity))
        self._velocity = velocity
        return torch.where(moved, change, 0.0), moved


class _Moments:
    """Means and variances of positions over chains and steps."""

    def __init__(self) -> None:
        self._count, self._sum, self._squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, positions: Tensor) -> None:
        """Add positions ``(C, D)``."""
        self._count += len(positions)
        self._sum = self._sum + positions.double().sum(0)
        self._squares = self._squares + positions.double().square().sum(0)

    @property
    def total_variance(self) -> float:
        """The sum of the variances of all coordinates."""
        mean = self._sum / self._count
        return float((self._squares / self._count - mean.square()).sum())


def _kick(velocity: Tensor, gradient: Tensor, time: float) -> tuple[Tensor, Tensor]:
    """Turn unit velocities ``(C, D)`` towards the gradient; return the change of kinetic energy, too.

    The exact flow of the velocity at a fixed position (Robnik et al. 2023, Eq. 16), by exponentials of
    negative numbers only.
    """
    size = velocity.shape[-1]
    norm = gradient.norm(dim=-1, keepdim=True)
    direction = gradient / norm.clamp_min(torch.finfo(norm.dtype).tiny)
    turn = time * norm / (size - 1)
    cosine = (direction * velocity).sum(-1, keepdim=True)
    decay = (-turn).exp()
    turned = direction * (1 - decay) * (1 + decay + cosine * (1 - decay)) + 2 * decay * velocity
    change = turn - math.log(2) + (1 + cosine + (1 - cosine) * decay.square()).log()
    return _unit(turned), (size - 1) * change.squeeze(-1)


def _unit(vectors: Tensor) -> Tensor:
    unit: Tensor = vectors / vectors.norm(dim=-1, keepdim=True)
    return unit


def _gradients(
    target: Callable[[Tensor], Tensor], example: Tensor
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a function from positions ``(C, D)`` to log densities and gradients.

    Its operations are recorded once, so that later calls run without the Python of the model. A model
    that cannot be recorded runs as it is.
    """
    both = vmap(grad_and_value(target), randomness="error")

    def evaluate(positions: Tensor) -> tuple[Tensor, Tensor]:
        gradient, value = both(positions)
        return value.detach(), gradient.detach()

    try:
        evaluate(example)
    except RuntimeError as error:
        raise RuntimeError(
            "`model` cannot run several draws in one pass of `torch.func.vmap`: "
            f"{str(error).splitlines()[0]}"
        ) from error
    try:
        record = Record(evaluate, [example])
    except RuntimeError:
        return evaluate

    def replay(positions: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = record([positions])
        assert value is not None
        assert gradient is not None
        return value, gradient

    return replay
