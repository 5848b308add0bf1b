"""From a guide or from NUTS to ArviZ, so that its summaries, comparisons and plots apply."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_structvi._checks import Count, Positive, Program, check_tensors, checked
from pyro_structvi._pyro import ONE_THREAD
from pyro_structvi.linalg.precision import at_least_single
from pyro_structvi.posterior.draws import Posterior, as_arguments, check_posterior, count_draws
from pyro_structvi.posterior.passes import Passes
from pyro_structvi.posterior.runs import evaluation_mode, observed_log_prob


@checked
def to_inference_data(
    model: Program,
    posterior: Posterior,
    x: Any,
    y: Tensor,
    num_samples: Count | None = None,
    *,
    site: str | None = None,
    max_memory: Positive = 1 / 32,
) -> Any:
    """Draw from a posterior and put what ArviZ needs into its InferenceData.

    Args:
        model: A model that samples its observations when called with inputs only.
        posterior: A guide, or draws by site such as those of ``reference.nuts``, whose chains are
            kept apart.
        x: Inputs, first dimension the N examples; a tuple for a model of several inputs.
        y: Observations, ``(N, *event)``.
        num_samples: Number of draws; None for all that are given, or 100 of a guide.
        site: The observed site's name, where it cannot be told from the model.
        max_memory: As for :func:`predict`.

    Returns:
        An ``arviz.InferenceData`` with the groups ``posterior`` (each site under its own
        name), ``posterior_predictive``, ``log_likelihood`` (one value for each example) and
        ``observed_data``, in float64. A guide's draws form one chain.

    Raises:
        ImportError: If ArviZ is not installed.
        TypeError: If ``posterior`` is neither a guide nor draws.
        ValueError: If numbers or lengths do not fit, the observed site is ambiguous, or ``posterior``
            does not have exactly the model's global sites.

    Example:
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize
        >>> net = bayesianize(torch.nn.Linear(1, 1), prior=1.0)
        >>> model = Regressor(net, num_data=8, noise_scale=0.1)
        >>> x = torch.linspace(-1, 1, 8).unsqueeze(-1)
        >>> data = to_inference_data(model, MeanFieldGuide(model), x, 2 * x, num_samples=20)
        >>> sorted(data.groups())
        ['log_likelihood', 'observed_data', 'posterior', 'posterior_predictive']
        >>> dict(data.posterior.sizes)["draw"]
        20
    """
    try:
        import arviz
    except ImportError as error:
        raise ImportError('ArviZ is needed: `pip install "pyro-structvi[diagnostics]"`.') from error
    check_posterior(model, posterior)
    args = as_arguments(x)
    check_tensors("y", y)
    if any(len(value) != len(y) for value in args):
        raise ValueError(
            f"`x` and `y` must have the same length, but got {[len(v) for v in args]} and {len(y)}."
        )
    chains = getattr(posterior, "num_chains", 1)
    total = count_draws(posterior, num_samples)
    if total % chains:
        raise ValueError(
            f"`num_samples` must be a multiple of the {chains} chains, but got {num_samples}."
        )
    with ONE_THREAD, evaluation_mode(model):
        passes = Passes(model, posterior, [(args, y)], site, _read, max_memory)
        done = [*passes.run(total)]

    def joined(draws: Iterable[Tensor]) -> Any:
        values = at_least_single(torch.cat([*draws])).detach().cpu().numpy()
        if np.issubdtype(values.dtype, np.floating):
            values = values.astype(np.float64)
        return values.reshape(chains, total // chains, *values.shape[1:])

    name = passes.observed
    return arviz.from_dict(
        posterior={key: joined(each.values[key] for each in done) for key in done[0].values},
        posterior_predictive={name: joined(each.outputs["sample"] for each in done)},
        log_likelihood={name: joined(each.outputs["log_prob"] for each in done)},
        observed_data={name: at_least_single(y).cpu().numpy()},
    )


def _read(likelihood: Any, returned: Any, y: Tensor | None) -> dict[str, Tensor]:
    """Draw observations, and score those that were made."""
    assert y is not None
    return {"sample": likelihood.sample(), "log_prob": observed_log_prob(likelihood, y)}
