"""Microcanonical Langevin sampling that starts at the draws of a guide."""

import time
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.func import vmap
from tqdm.auto import tqdm

from pyro_structvi._checks import Count, Positive, Program, brief, checked, warn_user
from pyro_structvi._pyro import ONE_THREAD
from pyro_structvi.infer.batches import TensorBatches, as_batches, num_examples
from pyro_structvi.infer.data_warnings import set_num_data
from pyro_structvi.nn.random_module import transient_pass
from pyro_structvi.posterior.runs import evaluation_mode
from pyro_structvi.reference.chains import Chains, Compiled, gradients_of, without_python
from pyro_structvi.reference.draws import ChainDraws, NumDraws, convergence_of, warn_unless_mixed
from pyro_structvi.reference.log_joint import LogJoint
from pyro_structvi.sites.finding import find_sites_by_running, modules_of, separate_randomness
from pyro_structvi.sites.structured import StructuredGuide


class StuckChainWarning(UserWarning):
    """Chains of a sampler did not move, and their draws are left out."""


@checked
def mclmc(
    model: Program,
    guide: StructuredGuide,
    data: Any,
    *,
    num_warmup: Count = 2000,
    num_draws: NumDraws = 500,
    num_chains: Count = 8,
    thinning: Count | None = None,
    energy_variance: Positive = 5e-4,
    initial_energy_variance: Positive | None = None,
    adjusted: bool = False,
    compiled: Compiled = "auto",
    seed: int = 0,
    progress: bool = True,
) -> ChainDraws:
    r"""Sample the posterior by microcanonical Langevin dynamics, from draws of a guide.

    A chain moves with a velocity :math:`u` of unit length in the coordinates :math:`z` of the guide,

    .. math:: \dot z = u, \qquad \dot u = \frac{1}{D - 1} (I - u u^\top) \nabla \log p(z \mid y)
        + \text{noise},

    and its stationary distribution of z is the posterior. The coordinates are the noise of Gaussian
    posteriors, :math:`W = \mu + A z`, so that the guide's covariance is the preconditioner; other sites
    have unconstrained values in units of the guide's standard deviation, or of the prior's for point
    estimates. All chains run in one pass of :func:`torch.func.vmap`. They start at separate draws of the
    guide, or at the members of an ensemble, one basin for each chain.

    The warm-up tunes the step size of each chain so that the variance of the energy's change per
    dimension is ``energy_variance``, and the decoherence length to the width of the posterior. Draws
    have a bias by the discretization that falls with ``energy_variance``. ``adjusted=True`` has none: a
    transition is a trajectory of about one decoherence length, many steps, and is accepted or rejected
    as a whole. A step that changes the energy by more than about 1,000 nats is not taken, and the
    chain goes on with smaller ones.

    Args:
        model: The model, in evaluation mode during sampling. Its point estimates stay fixed.
        guide: A guide that has been initialized and usually fitted.
        data: All data, a tuple ``(x, y)`` of tensors, the model's arguments.
        num_warmup: Number of tuning steps of each chain.
        num_draws: Number of draws of each chain, at least 4.
        num_chains: Number of chains.
        thinning: Number of steps for each draw, 10 when None; with ``adjusted`` number of transitions, 1
            when None.
        energy_variance: Target variance of the energy's change in a step, per dimension, in squared
            nats.
        initial_energy_variance: Target at the first step of the warm-up. The target falls
            geometrically to ``energy_variance`` over three quarters of the warm-up; it is constant when
            None. A larger one explores more of a net's posterior before the draws.
        adjusted: Whether each trajectory is accepted or rejected, so that the posterior is exact.
        compiled: Whether inductor compiles the gradient, which needs a C++ compiler and changes
            rounding. "auto" compiles it if the gradients to come take more than about a minute without,
            by the number of their operations and elements.
        seed: Seed of the chains.
        progress: Whether to show a progress bar.

    Returns:
        The draws by site, ``(num_chains * num_draws, *shape)``; after an interrupt from the keyboard
        those so far, if there are four of each chain. ``r_hat``, ``chain_r_hat`` and ``ess`` summarize
        up to 500 values that the model returns at the data; the log densities of observations if it
        returns no others. ``sample_stats`` have ``lp``, the log joint in unconstrained coordinates up to
        a constant, ``energy_change``, ``diverging``, ``step_size`` and ``decoherence_length``; for
        ``adjusted=True`` ``acceptance_rate``, too.

    Raises:
        ValueError: If an argument is out of range, the guide is not initialized, sites of the model are
            missing in it, the model has a single latent number, the support of a site depends on others,
            or a plate takes a part of the data.
        RuntimeError: If the model cannot run several draws in one pass, or be compiled for
            ``compiled=True``, or no chain can move.

    Warns:
        NotMixedWarning: If the largest split R-hat of function values is above 1.1, or NaN, where all
            of them are constant.
        NumDataWarning: If the model was told of another number of examples than the data have.
        StuckChainWarning: If chains are left out because most of their steps failed, or all trajectories
            were rejected.

    Example:
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize, fit
        >>> x = torch.linspace(-1, 1, 16).unsqueeze(-1)
        >>> model = Regressor(bayesianize(torch.nn.Linear(1, 1), prior=1.0), 16, noise_scale=0.5)
        >>> guide = MeanFieldGuide(model)
        >>> _ = fit(model, guide, (x, 2 * x), num_steps=200, progress=False)
        >>> draws = mclmc(model, guide, (x, 2 * x), num_draws=100, progress=False)
        >>> draws["net.weight"].shape
        torch.Size([800, 1, 1])

    References:
        Robnik, De Luca, Silverstein and Seljak (2023), "Microcanonical Hamiltonian Monte Carlo", JMLR;
        Robnik and Seljak (2023), "Fluctuation without dissipation: microcanonical Langevin Monte Carlo";
        Robnik, Cohn-Gordon and Seljak (2025), "Metropolis adjusted microcanonical Hamiltonian Monte
        Carlo"; Sommer, Robnik, Nozadze, Seljak and Ruegamer (2025), "Microcanonical Langevin ensembles:
        advancing the sampling of Bayesian neural networks".
    """
    batches = as_batches(data, None, next((p.device for p in guide.parameters()), None))
    if not isinstance(batches, TensorBatches):
        raise TypeError(
            "`data` must be a tuple of tensors with all examples, since each step needs all the data, "
            f"but got {brief(data)}. Write `mclmc(model, guide, (x, y))`."
        )
    if not guide.is_initialized:
        raise ValueError(
            "`guide` must be initialized, but it has not found the sites of `model`. Fit it, or call "
            "`guide.initialize(*data)`."
        )
    set_num_data(model, guide, num_examples(batches))
    start = time.perf_counter()
    parts = transient_pass(modules_of(model))
    with ONE_THREAD, separate_randomness(), evaluation_mode(model), evaluation_mode(guide), parts:
        find_sites_by_running(model, batches.data, {})  # which names inputs of another dtype
        pyro.set_rng_seed(seed)
        target = LogJoint(model, guide, batches.data)
        position = torch.stack([
            target.start(guide.draw(local=True, number=k)) for k in range(num_chains)
        ])
        thinning = thinning or (1 if adjusted else 10)
        num_gradients = 2 * (num_warmup + num_draws * thinning)
        chains = Chains(position, gradients_of(target, position, num_gradients, compiled))
        transition = chains.transition if adjusted else chains.step
        initial = initial_energy_variance or energy_variance
        chains.warm_up(num_warmup, initial, energy_variance, progress)
        kept: list[dict[str, Tensor]] = []
        try:
            for _ in tqdm(range(num_draws), desc="mclmc", disable=not progress):
                found = transition()
                for _ in range(thinning - 1):
                    last, found = found, transition()
                    found["diverging"] = found["diverging"] | last["diverging"]
                kept.append(found | {"position": chains.position, "lp": chains.log_density})
        except KeyboardInterrupt:
            if len(kept) < 4:
                raise
            warn_user("Interrupted: the draws are those so far.", UserWarning)
        return _as_draws(target, chains, kept, start)


def _as_draws(
    target: LogJoint, chains: Chains, kept: list[dict[str, Tensor]], start: float
) -> ChainDraws:
    by_name = {name: torch.stack([each[name] for each in kept], 1) for name in kept[0]}
    by_name["step_size"] = chains.step_size.expand(-1, len(kept))
    by_name["decoherence_length"] = torch.full_like(by_name["lp"], chains.length)
    is_kept = _moving(chains, by_name["position"])
    by_name = {name: value[is_kept] for name, value in by_name.items()}
    each = by_name.pop("position")  # (chain, draw, D)
    values, _, given = vmap(vmap(target.values_at))(each)
    by_name["lp"] = by_name["lp"] - given
    run = without_python(target.functions_of, each[:, 0], len(kept), compiled=False)
    functions = torch.stack([run(draw)[0] for draw in each.unbind(1)], 1)  # (chain, draw, F)
    seconds = time.perf_counter() - start
    draws = ChainDraws(
        {name: value.flatten(0, 1) for name, value in values.items()},
        len(each),
        sample_stats={name: value.cpu().numpy() for name, value in by_name.items()},
        seconds=seconds,
        **convergence_of([functions], values.values(), len(each)),
    )
    warn_unless_mixed(draws, "`num_warmup`, and `num_draws` or `thinning`")
    return draws


def _moving(chains: Chains, positions: Tensor) -> Tensor:
    """Return which chains have moved; warn of those that have not."""
    has_changed = (positions != positions[:, :1]).flatten(1).any(1)
    is_moving = (2 * chains.num_moved >= chains.num_steps) & has_changed
    num_stuck = int((~is_moving).sum())
    reason = (
        "since the energy changed without bound in most of their steps, or all of their trajectories "
        "were rejected. Raise `num_warmup`, lower `energy_variance`, or sample in double precision."
    )
    if num_stuck == len(is_moving):
        raise RuntimeError(f"No chain has moved, {reason}")
    if num_stuck:
        warn_user(
            f"{num_stuck} of {len(is_moving)} chains are left out, {reason}", StuckChainWarning
        )
    return is_moving
