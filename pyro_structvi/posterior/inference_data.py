"""From a guide or from NUTS to ArviZ, so that its summaries, comparisons and plots apply."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_structvi._checks import Count, Positive, Program, checked
from pyro_structvi._pyro import ONE_THREAD
from pyro_structvi._torch import take_apart
from pyro_structvi.distributions.own_tensors import base_of
from pyro_structvi.posterior.arviz_versions import from_groups, import_arviz
from pyro_structvi.posterior.batch_statistics import statistics_for
from pyro_structvi.posterior.columns import Columns, PosteriorGroup, as_array, one_by_one
from pyro_structvi.posterior.dimensions import (
    dims_beside,
    dims_of_observations,
    dims_of_sites,
)
from pyro_structvi.posterior.draws import (
    Posterior,
    as_arguments,
    as_batches,
    check_posterior,
    count_draws,
    spaced,
)
from pyro_structvi.posterior.passes import Passes
from pyro_structvi.posterior.runs import evaluation_mode, observed_log_prob

Values = dict[str, Tensor]


@checked
def to_inference_data(
    model: Program,
    posterior: Posterior,
    x: Any,
    y: Tensor,
    num_samples: Count | None = None,
    *,
    sites: Sequence[str] | None = None,
    functions: Mapping[str, Program] | None = None,
    outputs: bool = False,
    site: str | None = None,
    max_memory: Positive = 1 / 32,
    batch_statistics: Any = None,
) -> Any:
    """Draw from a posterior and put what ArviZ needs into its own form.

    The dimensions of a weight ``net.0.weight`` are named ``net.0.weight_out``, ``net.0.weight_in`` and
    ``net.0.weight_kernel``, those of observations ``obs_id``, ``obs_dim_0`` and so on, in all groups.

    Args:
        model: A model that samples its observations when called with inputs only.
        posterior: A guide, or draws by site such as those of ``reference.nuts``, whose chains are
            kept apart and whose statistics of the sampler are kept.
        x: Inputs, first dimension the N examples; a tuple for a model of several inputs. An input is a
            tensor, or a mapping of tensors, such as a ``BatchEncoding``.
        y: Observations, ``(N, *event)``.
        num_samples: Number of draws; None for all that are given, or 100 of a guide.
        sites: Which sites to keep in the group ``posterior``, by name or pattern, such as
            ``["net.0.*"]``; None for all, ``()`` for none. The weights of a large net take the memory of
            all draws together. With nothing in the group ``arviz.loo`` needs its ``reff``.
        functions: What else to keep there, by name: functions of one draw, a dict of all sites' values
            ``(*shape)``, that return a tensor of any shape.
        outputs: Whether to keep there, as ``outputs``, what the model returns at x, such as means or
            logits ``(N, ...)``; as ``outputs.0``, ``outputs.1``, ... where it returns several tensors.
        site: The observed site's name, where it cannot be told from the model.
        max_memory: As for :func:`predict`.
        batch_statistics: As for :func:`predict`.

    Returns:
        An ``arviz.InferenceData`` of ArviZ 0.23, an ``xarray.DataTree`` of ArviZ 1.x, with the groups
        ``posterior``, ``posterior_predictive``, ``log_likelihood`` (one value for each example),
        ``observed_data`` and, of NUTS, ``sample_stats``; real values in float64, counts and labels as
        whole numbers. Observations and outputs of shape (N, 1) lose the last dimension, as log
        likelihoods have none. A guide's draws form one chain. Where a token is not observed, as in
        padding, predictive draws have its ``ignore_index`` too, and where the model masks an observation
        its log likelihood is zero.

    Raises:
        ImportError: If ArviZ is not installed.
        TypeError: If ``posterior`` is neither a guide nor draws, or a function returns no tensor.
        ValueError: If numbers or lengths do not fit, the observed site is ambiguous, ``posterior``
            does not have exactly the model's global sites, one of ``sites`` matches none of them, or
            a name is taken; if ``batch_statistics`` are given for a model without batch normalization.

    Example:
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize
        >>> net = bayesianize(torch.nn.Linear(1, 1), prior=1.0)
        >>> model = Regressor(net, num_data=8, noise_scale=0.1)
        >>> x = torch.linspace(-1, 1, 8).unsqueeze(-1)
        >>> data = to_inference_data(
        ...     model,
        ...     MeanFieldGuide(model),
        ...     x,
        ...     2 * x,
        ...     num_samples=20,
        ...     sites=["*.bias"],
        ...     functions={"norm": lambda draw: draw["net.weight"].norm()},
        ...     outputs=True,
        ... )
        >>> {name: each.shape for name, each in data["posterior"].data_vars.items()}
        {'net.bias': (1, 20, 1), 'outputs': (1, 20, 8), 'norm': (1, 20)}
        >>> data["log_likelihood"]["obs"].dims
        ('chain', 'draw', 'obs_id')
    """
    arviz = import_arviz()
    check_posterior(model, posterior)
    batches = as_batches(as_arguments(x), y, None)
    chains, total = getattr(posterior, "num_chains", 1), count_draws(posterior, num_samples)
    if total % chains:
        raise ValueError(
            f"`num_samples` must be a multiple of the {chains} chains, but got {total}."
        )
    group, predicted = PosteriorGroup(sites, functions or {}), Columns()
    statistics, read = statistics_for(model, posterior, batch_statistics), partial(_read, outputs)
    with ONE_THREAD, evaluation_mode(model):
        passes = Passes(model, posterior, batches, site, read, max_memory, statistics)
        for done in passes.run(total):
            predicted.add({name: done.outputs.pop(name) for name in ("sample", "log_prob")})
            group.add_draws(done.values, done.outputs, passes.observed)

    def by_chain(columns: Columns) -> dict[str, Any]:
        return {
            name: values.reshape(chains, total // chains, *values.shape[1:])
            for name, values in columns.joined().items()
        }

    name, kept, drawn = passes.observed, by_chain(group), by_chain(predicted)
    kept |= {key: one_by_one(kept[key], 3) for key in group.outputs}
    observed, sample = one_by_one(as_array(y), 1), one_by_one(drawn["sample"], 3)
    if sample.dtype.kind in "iu":
        observed = observed.astype(sample.dtype)
    dims = dims_of_observations(name, observed.shape)
    groups = {
        "posterior": kept,
        "sample_stats": _sample_stats(posterior, total),
        "posterior_predictive": {name: sample},
        "log_likelihood": {name: drawn["log_prob"]},
        "observed_data": {name: observed},
    }
    shapes = {key: value.shape[2:] for key, value in kept.items()}
    all_dims = dims_of_sites(model, shapes) | {name: dims}
    for key in group.outputs:
        all_dims[key] = dims_beside(key, shapes[key], dims, observed.shape)
    return from_groups(arviz, groups, all_dims, {dims[0]: np.arange(len(y))})


def _sample_stats(posterior: Any, total: int) -> dict[str, Any]:
    """Return a sampler's statistics ``(chain, draw)`` at the draws that are taken; none of a guide."""
    return {
        name: value.reshape(-1)[spaced(value.size, total)].reshape(len(value), -1)
        for name, value in getattr(posterior, "sample_stats", {}).items()
    }


def _read(keeps_outputs: bool, node: Any, returned: Any, y: Tensor | None) -> Values:
    """Score observations, draw others, and take what the model returns."""
    assert y is not None
    log_prob = observed_log_prob(node, y)  # it looks at their shape
    found = {"log_prob": log_prob, "sample": _draw_like(node["fn"], y)}
    return found | (_outputs(returned) if keeps_outputs else {})


def _draw_like(likelihood: Any, y: Tensor) -> Tensor:
    """Draw observations, counts as whole numbers, without those that are not in ``y``."""
    drawn = likelihood.sample()
    if likelihood.support.is_discrete:
        drawn = drawn.long()
    ignored = getattr(base_of(likelihood), "ignore_index", None)
    return drawn if ignored is None else torch.where(y == ignored, y, drawn)


def _outputs(returned: Any) -> Values:
    leaves, _ = take_apart(returned)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
        raise TypeError(
            "`outputs=True` needs a model that returns a tensor, or tensors in a tuple or dict, but it "
            f"returns {kinds}."
        )
    names = [f"outputs.{number}" for number in range(len(leaves))] if leaves[1:] else ["outputs"]
    return dict(zip(names, leaves, strict=True))
