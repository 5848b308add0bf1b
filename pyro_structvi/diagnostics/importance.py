"""Distance of a guide from the posterior, by importance weights."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from pyro_structvi._checks import Program, Rule, check_no_nan, checked
from pyro_structvi._pyro import ONE_THREAD, unwrapped
from pyro_structvi.posterior.inference_data import import_arviz, pareto_smoothed
from pyro_structvi.posterior.passes import counted_bytes
from pyro_structvi.posterior.runs import evaluation_mode
from pyro_structvi.sites.finding import modules_of
from pyro_structvi.sites.site_posterior import in_one_pass
from pyro_structvi.sites.structured import StructuredGuide, check_one_posterior
from pyro_structvi.structures.dropout import BernoulliDropout
from pyro_structvi.structures.mean_field import PrunedNormal
from pyro_structvi.structures.points import Members, PointMixture
from pyro_structvi.weights.site_distributions import PointMass
from pyro_structvi.weights.site_role import SiteRole, sample_nodes

# A fifth of the weights is the tail that a Pareto distribution is fitted to.
Draws = Annotated[int, Rule("at least 100, for a tail of weights", lambda value: value >= 100)]
MAX_BYTES = 2**25  # of weights and layers' outputs in one pass, as by default in `predict`
ROUNDING = 1e-8  # relative differences of log weights that count as zero


@dataclass(frozen=True)
class ImportanceDiagnosis:
    """Importance weights of a guide's draws, summarized.

    Attributes:
        k_hat: The shape of the generalized Pareto distribution of the largest weights; minus infinity
            if all weights above zero are equal.
        elbo: The average of the log weights, in nats: an estimate of the evidence lower bound; minus
            infinity if a weight is zero, as beyond a constraint of the model.
        importance_weighted_bound: The log of the average weight, in nats.
        effective_sample_size: The number of posterior draws that the smoothed weights are worth.
        log_weights: The log weights ``(num_samples,)``, in nats.
    """

    k_hat: float
    elbo: float
    importance_weighted_bound: float
    effective_sample_size: float
    log_weights: Tensor = field(repr=False, compare=False)


@checked
def pareto_k(
    model: Program, guide: StructuredGuide, *args: Any, num_samples: Draws = 1000, **kwargs: Any
) -> ImportanceDiagnosis:
    r"""Compare a guide with the posterior of all weights jointly.

    The log weights of S draws of the whole guide, :math:`r_s = \log p(y, w_s) - \log q(w_s)`, all equal
    the log evidence if q is the posterior. They give the ELBO and the importance-weighted bound

    .. math:: \mathcal{L} = \frac1S \sum_s r_s \le \mathcal{L}_S = \log \frac1S \sum_s e^{r_s},

    with expectations :math:`\mathrm{E}[\mathcal{L}] \le \mathrm{E}[\mathcal{L}_S] \le \log p(y)`.

    How to read it: for k below 0.5 weighted draws of the guide give accurate averages under the
    posterior; up to 0.7 they need many draws; above 0.7 all but the ELBO is unreliable, as nearly always
    in a net of many weights, whose posterior has several modes. Predictions may still be good, so check
    them on held-out data (:func:`expected_coverage`).

    The model runs in evaluation mode. An ``InducingWeightGuide`` has the density of the weights W alone,
    so its ELBO here is above the training bound on W and U; with ``shared=True`` both are joint.

    Args:
        model: The model.
        guide: A fitted guide with a density: no points, ensembles or dropout.
        *args: The arguments of model and guide: *all* training data, observations included.
        num_samples: The number S of draws, at least 100.
        **kwargs: Their keyword arguments.

    Raises:
        ImportError: If ArviZ is not installed.
        ValueError: If the guide has no density or other sites than the model, the data are not all, as
            in a plate that takes a random part of them, ``num_samples`` is below 100, a log weight is
            NaN or plus infinity, or all weights are zero.

    Example:
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize
        >>> net = bayesianize(torch.nn.Linear(1, 1, bias=False), prior=1.0)
        >>> model = Regressor(net, num_data=8, noise_scale=1.0)
        >>> x = torch.linspace(-1, 1, 8).unsqueeze(-1)
        >>> guide = MeanFieldGuide(model, init_scale=0.01)  # not trained, and far too narrow
        >>> diagnosis = pareto_k(model, guide, x, 2 * x, num_samples=200)
        >>> diagnosis.elbo < diagnosis.importance_weighted_bound
        True

    References:
        Yao, Vehtari, Simpson and Gelman (2018), "Yes, but did it work? Evaluating variational
        inference", section 2; Burda, Grosse and Salakhutdinov (2016), "Importance weighted
        autoencoders", Theorem 1.
    """
    import_arviz()  # an error comes before the draws
    with ONE_THREAD, evaluation_mode(model):
        joint = guide.begin_pass(*args, **kwargs)
        _check_density(guide)

        def log_weight(number: Any) -> Tensor:
            """Draw all sites once and return ``log p(y, w) - log q(w)``, in double precision."""
            program = joint.program()
            with poutine.block():
                of_guide = poutine.trace(program).get_trace(*args, **kwargs)
                replayed = poutine.replay(model, trace=of_guide)
                of_model = poutine.trace(replayed).get_trace(*args, **kwargs)
            _check_sites(of_model, of_guide)
            _check_data(of_model, getattr(unwrapped(model), "num_data", None))
            return of_model.log_prob_sum().double() - of_guide.log_prob_sum().double()

        joint.factorize()
        weights = guide.median().values()
        size = sum(value.numel() * value.element_size() for value in weights)
        return _diagnosis(_of_draws(log_weight, num_samples, size, modules_of(model)))


def _check_density(guide: StructuredGuide) -> None:
    """Raise a ``ValueError`` if the posterior of some site has no density."""
    check_one_posterior(guide)
    without = (PointMass, PointMixture, BernoulliDropout, PrunedNormal)
    for posterior in guide.all_posteriors():
        of_inducing = getattr(posterior.family, "posterior", None)
        if isinstance(posterior(), without) or isinstance(of_inducing, Members):
            raise ValueError(
                "`guide` must have a density over all weights, but its posterior of "
                f"'{posterior.site.name}', {posterior.family}, has none. Compare its predictions with "
                "observations instead, by `expected_coverage`."
            )


def _check_sites(of_model: Any, of_guide: Any) -> None:
    """Raise a ``ValueError`` unless model and guide have the same latent sites."""
    model, guide = (
        {name: node for name, node in sample_nodes(trace).items() if not node["is_observed"]}
        for trace in (of_model, of_guide)
    )
    missing = [name for name in model if name not in guide]
    others = {name: node for name, node in guide.items() if name not in model}
    unknown = [name for name, node in others.items() if not SiteRole.of(node).is_auxiliary]
    if missing or unknown:
        raise ValueError(
            f"`guide` must have the latent sites of the model, but these are missing in it: {missing}, "
            f"and these are not in the model: {unknown}. Pass the guide of this very model, and the "
            "observations too."
        )


def _check_data(of_model: Any, num_data: int | None) -> None:
    """Raise a ``ValueError`` unless the observations are all data, ``num_data`` for a likelihood."""
    for name, node in of_model.nodes.items():
        for frame in node["cond_indep_stack"] if node["type"] == "sample" else ():
            is_told = num_data is not None and SiteRole.of(node).is_observation
            whole = max(frame.size, frame.full_size or 0)
            whole = num_data if is_told and frame.name == "data" else whole
            if frame.size != whole:
                raise ValueError(
                    f"The observations '{name}' must be all {whole} training examples, but are "
                    f"{frame.size}, whose scaled likelihood has another posterior. Pass all data to a "
                    "model without `subsample_size`; `num_data` of the model is their number."
                )


def _of_draws(
    log_weight: Callable[[Any], Tensor], count: int, size: int, modules: list[nn.Module]
) -> Tensor:
    """Return the log weights of several draws, vectorized unless torch cannot vectorize the model."""
    # vmap disables validation, so the first draw runs alone to raise errors.
    with counted_bytes() as outputs:  # of layers
        first = log_weight(0)
    at_once = max(1, MAX_BYTES // max(1, size + sum(outputs)))
    numbers = torch.arange(1, count, device=first.device)
    others: list[Tensor] = []
    for part in numbers.split(at_once):
        together = in_one_pass(log_weight, part, modules)
        if together is None:
            others = [log_weight(number).reshape(1) for number in numbers]
            break
        others.append(together)
    return torch.cat([first.reshape(1), *others])


def _diagnosis(log_weights: Tensor) -> ImportanceDiagnosis:
    name = "log p(y, w) - log q(w)"
    check_no_nan(name, log_weights)
    above_zero = log_weights[log_weights.isfinite()]
    if not len(above_zero) or log_weights.max() == math.inf:
        raise ValueError(
            f"`{name}` must be below infinity, and above minus infinity at some draw, but is from "
            f"{float(log_weights.min())} to {float(log_weights.max())}. Fit the guide to the support of "
            "the model's posterior."
        )
    elbo = float(log_weights.mean())
    bound = float(log_weights.logsumexp(0)) - math.log(len(log_weights))
    k_hat, size = -math.inf, float(len(above_zero))
    if above_zero.max() - above_zero.min() > ROUNDING * max(1.0, float(above_zero.abs().max())):
        smoothed, k_hat = pareto_smoothed(log_weights.cpu().numpy())
        size = 1 / float(torch.as_tensor(smoothed).softmax(0).square().sum())
    return ImportanceDiagnosis(k_hat, elbo, bound, size, log_weights)
