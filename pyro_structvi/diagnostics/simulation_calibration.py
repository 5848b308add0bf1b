"""Whether a way of fitting finds the right posterior on data that the model itself made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro.poutine.util import site_is_subsample
from scipy.stats import chisquare
from torch import Tensor

from pyro_structvi._checks import Count, Program, brief, checked
from pyro_structvi._pyro import ONE_THREAD
from pyro_structvi.posterior.draws import Posterior, as_arguments, count_draws
from pyro_structvi.posterior.passes import Passes
from pyro_structvi.posterior.runs import evaluation_mode, observed_log_prob, run_at_draw
from pyro_structvi.weights.site_role import SiteRole
from pyro_structvi.weights.stand_in import as_drawn

MIN_SIMULATIONS = 10  # so that a bin of ranks has 5 of them or more
MAX_BINS = 20
DEFAULT_INPUTS = 5


@dataclass(frozen=True)
class ModelDraw:
    """A model at one draw of its latent sites, for test quantities.

    Attributes:
        values: The draw by site.
        function: The model's return value, ``(N, ...)``; the mean of the observation where the model
            returns nothing for each example.
        log_likelihood: The log density of the observations, ``(N,)``, in nats.
    """

    values: dict[str, Tensor]
    function: Tensor
    log_likelihood: Tensor


Quantity = Callable[[ModelDraw], Any]


@dataclass(frozen=True)
class CalibrationRanks:
    """Ranks of the true quantities among the posterior's draws, from many simulated data sets.

    Attributes:
        ranks: By quantity, how many of the ``num_samples`` draws are below the true value,
            ``(num_simulations,)``, whole numbers from 0 to ``num_samples``.
        p_values: By quantity, that of a chi-square test of uniform ranks.
        num_samples: The number of draws that each rank is among.
    """

    ranks: dict[str, Tensor]
    p_values: dict[str, float]
    num_samples: int


@checked
def simulation_based_calibration(
    make_model: Program,
    fit: Program,
    x: Any,
    num_simulations: Count = 100,
    num_samples: Count = 99,
    functions: Mapping[str, Program] | None = None,
    *,
    site: str | None = None,
) -> CalibrationRanks:
    r"""Fit data sets that the model has made, and rank the truth among the draws of each posterior.

    In each simulation :math:`w \sim p(w)`, :math:`y \sim p(y \mid x, w)`, and draws :math:`w_1, \dots,
    w_S` come from the fitted posterior. Of a test quantity t the rank

    .. math:: r = \#\{s : t(w_s) < t(w)\} + \text{a random part of the ties}

    is uniform from 0 to S if the posterior is exact.

    How to read it: a small p value (below 0.01 over the number of quantities) says that this way of
    fitting does not give this model's posterior. Many ranks at both ends (a U): posteriors are too
    narrow. Many in the middle: too wide. Many at one end: shifted. Uniform ranks mean no more than that
    these quantities show no error; take quantities that you use, and the log likelihood, which sees
    what others do not.

    Args:
        make_model: Makes a new model, without arguments. It must have proper priors, and sample its
            observations where it is called with inputs only.
        fit: Takes ``(model, x, y)``, fits, and returns a guide or draws by site, such as those of NUTS.
        x: Inputs, first dimension the N examples; a tuple for a model of several inputs.
        num_simulations: The number of data sets, at least 10; each is a fit.
        num_samples: The number S of draws of each posterior.
        functions: Test quantities by name, each from a :class:`ModelDraw` to one number. When None, the
            function's first output at up to five inputs (weights themselves are not identified) and the
            total log likelihood.
        site: The observed site's name, where the model does not mark it.

    Returns:
        Ranks and p values.

    Raises:
        TypeError: If ``fit`` returns neither a guide nor draws, or ``make_model`` no model.
        ValueError: If numbers are out of range, the observed site is not known, or a quantity is not one
            number.

    Example:
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize
        >>> def make_model():
        ...     net = bayesianize(torch.nn.Linear(1, 1, bias=False), prior=1.0)
        ...     return Regressor(net, num_data=4, noise_scale=0.5)
        >>> def fit(model, x, y):  # the exact posterior
        ...     precision = 1 + x.square().sum() / 0.25
        ...     mean = (x * y).sum() / 0.25 / precision
        ...     return {"net.weight": mean + torch.randn(9, 1, 1) / precision.sqrt()}
        >>> found = simulation_based_calibration(make_model, fit, torch.ones(4, 1), 10, 9)
        >>> sorted(found.p_values)
        ['f(x[0])', 'f(x[1])', 'f(x[2])', 'f(x[3])', 'log likelihood']

    References:
        Talts et al. (2018), "Validating Bayesian inference algorithms with simulation-based
        calibration", algorithm 1; Modrak et al. (2023), "Simulation-based calibration checking for
        Bayesian computation: the choice of test quantities shapes sensitivity", for ties and the log
        likelihood.
    """
    if num_simulations < MIN_SIMULATIONS:
        raise ValueError(
            f"`num_simulations` must be at least {MIN_SIMULATIONS}, for a test of the ranks, but got "
            f"{num_simulations}."
        )
    if functions is not None and not functions:
        raise ValueError("`functions` must hold at least one test quantity, but is empty.")
    args = as_arguments(x)
    found: dict[str, list[int]] = {}
    for _ in range(num_simulations):
        model = make_model()
        if not callable(model) or isinstance(model, type):
            raise TypeError(f"`make_model()` must return a model, but got {brief(model)}.")
        truth, y = _simulate(model, args, site)
        posterior = fit(model, x, y)
        _check_posterior(posterior, num_samples)
        [true] = _draws(model, truth, (args, y), 1, site)
        drawn = _draws(model, posterior, (args, y), num_samples, site)
        for name, quantity in (functions or _default_quantities(true)).items():
            values = [_number(name, quantity(draw)) for draw in (true, *drawn)]
            found.setdefault(name, []).append(_rank(values[0], values[1:]))
    ranks = {name: torch.tensor(each) for name, each in found.items()}
    p_values = {name: _p_value(each, num_samples) for name, each in ranks.items()}
    return CalibrationRanks(ranks, p_values, num_samples)


def _simulate(
    model: Callable[..., Any], args: tuple[Any, ...], site: str | None
) -> tuple[dict[str, Tensor], Tensor]:
    """Return a draw of the latent sites from the prior, stacked, and observations drawn at it."""
    with ONE_THREAD, evaluation_mode(model):
        trace = run_at_draw(model, {}, args)
    drawn = {
        name: node
        for name, node in trace.nodes.items()
        if node["type"] == "sample" and not node["is_observed"] and not site_is_subsample(node)
    }
    observed = [
        name
        for name, node in drawn.items()
        if (name == site if site else SiteRole.of(node).is_observation)
    ]
    if len(observed) != 1:
        raise ValueError(
            f"The observed site must be one of {[*drawn]}, which the model draws, but got "
            f"`site={site!r}`: pass its name."
        )
    values = {name: as_drawn(node["value"]) for name, node in drawn.items()}
    y = values.pop(observed[0])
    return {name: value.unsqueeze(0) for name, value in values.items()}, y


def _check_posterior(posterior: Any, num_samples: int) -> None:
    if isinstance(posterior, Mapping) and posterior:
        count_draws(posterior, num_samples)
    elif isinstance(posterior, (type, Mapping)) or not callable(posterior):
        raise TypeError(
            "`fit(model, x, y)` must return a guide or a dict of draws by site, but got "
            f"{brief(posterior)}."
        )


def _draws(
    model: Callable[..., Any],
    posterior: Posterior,
    batch: tuple[tuple[Any, ...], Tensor],
    count: int,
    site: str | None,
) -> list[ModelDraw]:
    """Return the model at so many draws of a posterior."""
    with ONE_THREAD, evaluation_mode(model):
        done = [*Passes(model, posterior, [batch], site, _read, 1 / 32).run(count)]
    return [
        ModelDraw({name: value[number] for name, value in each.values.items()}, *outputs)
        for each in done
        for number, outputs in enumerate(zip(*each.outputs.values(), strict=True))
    ]


def _read(node: Any, returned: Any, y: Tensor | None) -> dict[str, Tensor]:
    """Return what test quantities need of a model at a draw."""
    assert y is not None
    per_example = isinstance(returned, Tensor) and returned.shape[:1] == y.shape[:1]
    function = returned if per_example else node["fn"].mean
    return {"function": function, "log_likelihood": observed_log_prob(node, y)}


def _default_quantities(draw: ModelDraw) -> dict[str, Quantity]:
    size = len(draw.function)
    chosen = torch.linspace(0, size - 1, min(DEFAULT_INPUTS, size)).round().long().tolist()

    def output_at(number: int) -> Quantity:
        return lambda draw: draw.function[number].flatten()[0]

    at_inputs = {f"f(x[{number}])": output_at(number) for number in chosen}
    return at_inputs | {"log likelihood": lambda draw: draw.log_likelihood.sum()}


def _number(name: str, value: Any) -> float:
    """Return a test quantity as a number, or raise."""
    tensor = torch.as_tensor(value) if isinstance(value, (Tensor, float, int)) else torch.empty(0)
    if tensor.numel() != 1 or bool(tensor.isnan().any()):
        raise ValueError(
            f"`functions[{name!r}]` must return one number that is not NaN, but got {brief(value)}."
        )
    return float(tensor)


def _rank(truth: float, draws: list[float]) -> int:
    """Return how many draws are below the truth, and a random number of those that equal it."""
    ties = sum(draw == truth for draw in draws)
    return sum(draw < truth for draw in draws) + int(torch.randint(ties + 1, ()))


def _p_value(ranks: Tensor, num_samples: int) -> float:
    """Return the p value of a chi-square test that ranks from 0 to ``num_samples`` are uniform."""
    bins = min(MAX_BINS, max(2, len(ranks) // 10), num_samples + 1)
    bin_of = torch.arange(num_samples + 1) * bins // (num_samples + 1)
    share = torch.bincount(bin_of, minlength=bins).double() / (num_samples + 1)
    counts = torch.bincount(bin_of[ranks], minlength=bins).double()
    return float(chisquare(counts.numpy(), (len(ranks) * share).numpy()).pvalue)
