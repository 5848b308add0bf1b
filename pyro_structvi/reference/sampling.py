"""NUTS for a Pyro model through its translation to NumPyro."""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pyro
import pyro.poutine as poutine
import torch
from numpyro.infer import MCMC, NUTS, init_to_median
from numpyro.infer.util import log_density
from torch import Tensor

from pyro_structvi._checks import (
    Count,
    check_finite,
    check_no_nan,
    check_tensors,
    checked,
    warn_user,
)
from pyro_structvi.posterior.prediction import Level
from pyro_structvi.reference.draws import ChainDraws, NumDraws, convergence_of, warn_unless_mixed
from pyro_structvi.reference.jax_net import JaxNet, to_array
from pyro_structvi.reference.numpyro_model import NumPyroModel, to_numpyro
from pyro_structvi.sites.finding import find_sites_by_running, separate_randomness
from pyro_structvi.weights.site_role import sample_nodes

_ROWS_AT_A_TIME = 1024
# Statistics of NumPyro, and their names in ArviZ.
_FIELDS = {
    "diverging": "diverging",
    "energy": "energy",
    "accept_prob": "acceptance_rate",
    "adapt_state.step_size": "step_size",
    "num_steps": "n_steps",
}


class DivergenceWarning(UserWarning):
    """Transitions of the sampler diverged, so its draws may miss parts of the posterior."""


class NUTSDraws(ChainDraws):
    """Draws of NUTS; see :class:`ChainDraws`.

    ``sample_stats`` has ``lp``, the log joint in unconstrained coordinates, ``energy``,
    ``acceptance_rate``, ``step_size``, ``n_steps``, ``tree_depth`` and ``diverging``.
    """

    @property
    def divergences(self) -> int:
        """The number of divergent transitions after warm-up, over all chains."""
        return int(self.sample_stats["diverging"].sum())


@checked
def nuts(
    model: Any,
    x: Tensor,
    y: Tensor,
    *,
    num_warmup: Count = 500,
    num_samples: NumDraws = 500,
    num_chains: Count = 4,
    target_accept_prob: Level = 0.8,
    max_tree_depth: Count = 10,
    seed: int = 0,
    progress: bool = True,
) -> NUTSDraws:
    r"""Sample the posterior of a model by the No-U-Turn Sampler in NumPyro, in float64.

    The log joints of the model and its translation to NumPyro are compared at a draw from the prior.
    Chains start at the median of 15 prior draws. They run in parallel, without a progress bar, if JAX
    has a device for each: on a CPU, ``numpyro.set_host_device_count(4)`` before the first use of JAX
    creates four.

    Args:
        model: A model for :func:`to_numpyro`.
        x: All N training inputs, ``(N, ...)``.
        y: All N observations, as for the model.
        num_warmup: Number of tuning steps of each chain.
        num_samples: Number of draws of each chain, at least 4.
        num_chains: Number of chains.
        target_accept_prob: The target acceptance probability of the step size, in (0, 1). Higher values
            mean smaller steps and fewer divergences.
        max_tree_depth: A draw takes at most ``2 ** max_tree_depth - 1`` gradients.
        seed: Seed of JAX's generator; the generators of torch stay as they are.
        progress: Whether to show a progress bar for each chain.

    Returns:
        The draws by site, in the dtype and on the device of the model, with sampler statistics.

    Raises:
        TypeError: If the model is none of these.
        ValueError: If an argument is out of range, ``x`` or ``y`` is not finite, or they are not all
            of the model's data.
        NotImplementedError: If the model has no translation to NumPyro.

    Warns:
        DivergenceWarning: If transitions diverged after warm-up.
        NotMixedWarning: If the largest split R-hat of function values is above 1.1.

    Example:
        >>> from pyro_structvi import Regressor, bayesianize
        >>> net = bayesianize(torch.nn.Linear(1, 1, bias=False), prior=1.0)
        >>> model = Regressor(net, num_data=3, noise_scale=1.0)
        >>> x = torch.ones(3, 1)
        >>> draws = nuts(model, x, 2 * x, num_warmup=50, num_samples=50, progress=False)
        >>> draws["net.weight"].shape
        torch.Size([200, 1, 1])

    References:
        Hoffman and Gelman (2014), "The No-U-Turn Sampler", JMLR 15.
    """
    counts = {"num_warmup": num_warmup, "num_samples": num_samples, "num_chains": num_chains}
    start = time.perf_counter()
    translated = to_numpyro(model)
    _check_data(model, x, y)
    if not model.is_num_data_given:  # `fit` sets it likewise
        model.num_data = len(x)
        translated = replace(translated, num_data=len(x))
    with separate_randomness():
        find_sites_by_running(model, (x, y), {})  # which names inputs of another dtype
        pyro.set_rng_seed(seed)
        example = _check_translation(model, translated, x, y)
    with jax.enable_x64(True):
        kernel = NUTS(
            translated,
            target_accept_prob=target_accept_prob,
            max_tree_depth=max_tree_depth,
            init_strategy=init_to_median,
        )
        method, bar = _chain_method(num_chains, progress)
        mcmc = MCMC(kernel, chain_method=method, progress_bar=bar, **counts)
        mcmc.run(
            jax.random.PRNGKey(seed),
            to_array(x),
            to_array(y),
            extra_fields=("potential_energy", *_FIELDS),
        )
        samples = jax.device_get(mcmc.get_samples(group_by_chain=True))
        functions = [*_function_values(translated.net, samples, to_array(x))]
        fields = jax.device_get(mcmc.get_extra_fields(group_by_chain=True))
    stats = {name: np.array(fields[field]) for field, name in _FIELDS.items()}
    stats["lp"] = -np.array(fields["potential_energy"])
    # A tree of depth d has 2^(d-1) to 2^d - 1 steps.
    stats["tree_depth"] = np.frexp(stats["n_steps"])[1].astype(np.int64)
    chains = {name: torch.as_tensor(np.array(value)) for name, value in samples.items()}
    draws = NUTSDraws(
        {name: chains[name].flatten(0, 1).to(value) for name, value in example.items()},
        num_chains,
        sample_stats=stats,
        **convergence_of(functions, chains.values(), num_chains),
        seconds=time.perf_counter() - start,
    )
    if draws.divergences:
        warn_user(
            f"{draws.divergences} of {num_chains * num_samples} transitions diverged, so the draws may "
            "miss narrow parts of the posterior. Raise `target_accept_prob` above "
            f"{target_accept_prob}, for instance to {1 - (1 - target_accept_prob) / 4:g}.",
            DivergenceWarning,
        )
    warn_unless_mixed(draws, "`num_warmup` and `num_samples`")
    return draws


def _check_data(model: Any, x: Tensor, y: Tensor) -> None:
    for name, value in (("x", x), ("y", y)):
        check_tensors(name, value)
        check_no_nan(name, value)
        check_finite(name, value)
    if model.is_num_data_given and model.num_data != len(x):
        raise ValueError(
            f"`x` must hold all {model.num_data} training examples (the model's `num_data`), but "
            f"got {len(x)}: a sampler needs all the data at each step. Pass all of it, or make the "
            "model with the `num_data` that it is to learn from."
        )


def _check_translation(
    model: Any, translated: NumPyroModel, x: Tensor, y: Tensor
) -> dict[str, Tensor]:
    """Return a prior draw of all sites after comparing the log joints of Pyro and NumPyro there."""
    with torch.no_grad(), poutine.block():
        trace = poutine.trace(model).get_trace(x, y)
        trace.compute_log_prob()
    nodes = sample_nodes(trace).items()
    sites = {name: node["value"] for name, node in nodes if not node["is_observed"]}
    difference = ""
    if set(sites) != set(translated.priors):
        difference = f"the model's sites are {[*sites]}, the other's {[*translated.priors]}"
    else:
        with jax.enable_x64(True):
            values = {name: to_array(value) for name, value in sites.items()}
            data = (to_array(x), to_array(y))
            # As one function: JAX compiles it once, instead of each operation by itself.
            log_joint = jax.jit(lambda *data: log_density(translated, data[:-1], {}, data[-1])[0])
            other = float(log_joint(*data, values))
        terms = [float(node["log_prob_sum"]) for node in trace.nodes.values() if "log_prob" in node]
        # Terms may cancel in the sum, and the model may compute in float32.
        tolerance = 1e-3 * (1 + sum(map(abs, terms)))
        if math.isfinite(tolerance) and not abs(sum(terms) - other) <= tolerance:
            difference = (
                f"at a draw from the prior the model's log joint is {sum(terms):.6g}, the other's "
                f"{other:.6g}"
            )
    if difference:
        raise NotImplementedError(
            f"The translation to NumPyro is another model: {difference}. The model is more than its "
            "net, priors and likelihood, such as by another method. Sample it with `pyro.infer.NUTS`."
        )
    return sites


def _chain_method(num_chains: int, progress: bool) -> tuple[Any, bool]:
    """Return the chain method and whether to show a progress bar."""
    if jax.local_device_count() >= num_chains > 1:
        # The progress bar of parallel chains fails: its callback runs in another thread, without
        # `enable_x64`.
        return "parallel", False
    # Without a bar "sequential" compiles again for each chain. A batch of chains ("vectorized") takes
    # twice the time on a CPU: each step waits for the longest trajectory.
    return "sequential" if progress else lambda run: jax.jit(partial(jax.lax.map, run)), progress


def _function_values(net: JaxNet, chains: dict[str, Any], x: Any) -> Iterator[Tensor]:
    """Yield net(x), ``(chain, draw, rows, ...)``, for some rows at a time."""
    run = jax.jit(
        lambda sites, rows: jax.lax.map(lambda s: jax.lax.map(lambda v: net(rows, v), s), sites)
    )
    for start in range(0, len(x), _ROWS_AT_A_TIME):
        values = run(chains, x[start : start + _ROWS_AT_A_TIME])
        yield torch.as_tensor(np.array(jax.device_get(values)))
