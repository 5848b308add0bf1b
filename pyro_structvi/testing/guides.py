"""The contract of guides, checked on a model with data."""

import copy
import io
import math
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer import Predictive, Trace_ELBO
from torch import Tensor

from pyro_structvi.infer.checkpoint import Checkpoint
from pyro_structvi.infer.elbo import StructuredELBO
from pyro_structvi.infer.training import fit
from pyro_structvi.posterior.runs import sample_nodes
from pyro_structvi.sites.site_posterior import stack_draws
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.testing.contracts import Contract, fixed_seed, is_defined

PASSES = 200
PARTICLES = 4
LEVELS = [0.1, 0.5, 0.9]
MakeGuide = Callable[[Any], StructuredGuide]


def check_guide(make: MakeGuide, model: Any, *data: Tensor, is_bound: bool = False) -> None:
    """Check that a guide obeys the contract of guides on a model with data.

    The checks cover the sites; draws against calls of the guide, medians and quantiles; the random
    state; gradients of all parameters; the mean of ``StructuredELBO`` against Pyro's ``Trace_ELBO``;
    state dicts; checkpoints; ``Predictive``; and several particles in one pass. Tests of means have a
    false alarm in 1e6 tests.

    Args:
        make: A function of the model to the guide, such as its class, with an ``init_scale`` near 0.3.
        model: A small model.
        *data: Its arguments, with observations last.
        is_bound: Whether the KL is an upper bound, such as a KL that counts auxiliary variables too.

    Raises:
        AssertionError: If a rule is violated, with the rule, the expected value and the value got.

    Example:
        >>> import pyro_structvi as ps
        >>> net = ps.bayesianize(torch.nn.Linear(3, 2), prior=1.0)
        >>> model = ps.Regressor(net, num_data=6, noise_scale=0.5)
        >>> x, y = torch.randn(6, 3), torch.randn(6, 2)
        >>> check_guide(lambda model: ps.KTiedGuide(model, init_scale=0.3), model, x, y)
    """

    def initialized() -> StructuredGuide:
        guide = make(model)
        guide.initialize(*data)
        return guide

    with fixed_seed(torch.get_default_dtype()):
        before = torch.get_rng_state()
        guide = initialized()
        contract = Contract(type(guide).__name__)
        stays = torch.equal(before, torch.get_rng_state())
        contract.equal("making a guide leaves the random state as it is", stays, True)
        with contract.part("sites"):
            _check_sites(contract, guide, model, data)
        with contract.part("the ELBO"):
            elbo_gradients(contract, guide, model, data, PARTICLES)
            losses = _losses(StructuredELBO(), model, guide, data)
            dense = _losses(Trace_ELBO(), model, guide, data)
            if not is_bound or losses.mean() < dense.mean():
                rule = "the mean loss of `StructuredELBO` equals the mean loss of `Trace_ELBO`"
                difference = (losses - dense).unsqueeze(-1)
                contract.mean_of(f"{rule}, by drawn weights", difference, torch.zeros(1))
        with contract.part("draws"):
            _check_draws(contract, guide, data)
        with contract.part("saving"):
            check_state(contract, initialized)
            _check_predictive(contract, guide, model, data)
            _check_checkpoint(contract, make, model, data)
        with contract.part("particles"):
            _check_particles(contract, guide, model, data, losses)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names under which two mappings of tensors differ."""
    both = one.keys() & other.keys()
    return [n for n in {**one, **other} if n not in both or not torch.equal(one[n], other[n])]


def check_state(contract: Contract, make: Callable[[], StructuredGuide]) -> None:
    """Change a guide, and load its state, from a file, into another one."""
    guide = make()
    with torch.no_grad():
        for value in guide.parameters():
            value.add_(0.1 * torch.randn_like(value))
    state, file = guide.state_dict(), io.BytesIO()
    tensors = all(isinstance(value, Tensor) for value in state.values())
    contract.equal("a state dict holds tensors only", tensors, True)
    torch.save(state, file)
    file.seek(0)
    before, other = _draws(guide), make()
    other.load_state_dict(torch.load(file, weights_only=True))
    rule = "a state dict restores the posterior in a new guide"
    contract.equal(f"{rule}: tensors that differ", differences(state, other.state_dict()), [])
    contract.equal(f"{rule}: draws that differ", differences(before, _draws(other)), [])


def _draws(guide: StructuredGuide) -> dict[str, Tensor]:
    """Return draws with a fixed seed, and the medians."""
    torch.manual_seed(1)
    return {**guide.draw(local=True), **{f"{k} (median)": v for k, v in guide.median().items()}}


def elbo_gradients(
    contract: Contract, guide: StructuredGuide, model: Any, data: Any, num_particles: int
) -> dict[str, Tensor]:
    """Return the gradients of the ELBO by the names of parameters, and check that they are finite."""
    loss = StructuredELBO(num_particles=num_particles).differentiable_loss(model, guide, *data)
    names, values = zip(*guide.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, values, allow_unused=True)
    for name, gradient in zip(names, found, strict=True):
        finite = gradient is not None and bool(gradient.isfinite().all())
        contract.equal(f"the ELBO has a finite gradient for `{name}`", finite, True)
    return dict(zip(names, found, strict=True))


def _check_sites(contract: Contract, guide: StructuredGuide, model: Any, data: Any) -> None:
    nodes = sample_nodes(poutine.trace(model).get_trace(*data)).items()
    values = {name: node["value"] for name, node in nodes if not node["is_observed"]}
    latent = {name: (value.shape, value.dtype) for name, value in values.items()}
    rule = "the guide has the latent sites of the model"
    contract.equal(rule, set(guide.site_names), set(latent))
    sampled = poutine.trace(guide).get_trace(*data)
    ways: dict[str, Any] = {
        "draw": guide.draw(local=True),
        "median": guide.median(),
        "a call": {name: sampled.nodes[name]["value"] for name in guide.site_names},
    }
    for way, values in ways.items():
        found = {name: (value.shape, value.dtype) for name, value in values.items()}
        contract.equal(f"values of `{way}` have the shapes and dtypes of the sites", found, latent)
    has_quantiles = is_defined(lambda: guide.quantiles(LEVELS))
    for name, value in guide.quantiles(LEVELS).items() if has_quantiles else ():
        rule = "`quantiles` are for each element"
        contract.equal(rule, tuple(value.shape), (3, *latent[name][0]))
        ordered = bool((value.diff(dim=0) >= 0).all())
        contract.equal(f"`quantiles` of '{name}' increase", ordered, True)


@torch.no_grad()
def _check_draws(contract: Contract, guide: StructuredGuide, data: Any) -> None:
    """Compare draws with the values of a call, and with quantiles and medians if they are exact."""

    def called() -> dict[str, Tensor]:
        nodes = poutine.trace(guide).get_trace(*data).nodes
        return {name: nodes[name]["value"] for name in guide.site_names}

    def stacked(draw: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        torch.manual_seed(1)
        return stack_draws([draw() for _ in range(PASSES)])

    drawn, sampled = stacked(partial(guide.draw, local=True)), stacked(called)
    own, other = (torch.cat([each[n].flatten(1) for n in drawn], 1) for each in (drawn, sampled))
    if not torch.equal(own, other):
        mean, mixed = own.mean(0), torch.randn(own.shape[1], 8) / own.shape[1] ** 0.5
        rule = "`draw` has the {} of the values in a call of the guide"
        contract.mean_of(rule.format("mean"), own - other, 0 * mean)
        squares = (((each - mean) @ mixed.to(mean)).square() for each in (own, other))
        excess = next(squares) - next(squares)
        contract.mean_of(rule.format("covariance"), excess, 0 * excess[0])
    if not is_defined(lambda: guide.quantiles(LEVELS)):
        return
    asked: dict[str, Any] = {"quantiles": (LEVELS, guide.quantiles(LEVELS))}
    if not any(getattr(each(), "is_mixture", False) for each in guide.all_posteriors()):
        asked["median"] = [0.5], {name: own.unsqueeze(0) for name, own in guide.median().items()}
    for way, (shares, values) in asked.items():
        for name, value in values.items():
            flat = drawn[name].flatten(1)
            is_continuous = (flat.sort(0).values.diff(dim=0) > 0).all(0)
            below = (flat.unsqueeze(1) <= value.flatten(1)).double()[..., is_continuous]
            share = torch.tensor(shares, dtype=torch.float64).unsqueeze(-1).expand_as(below[0])
            rule = f"`{way}` of '{name}' have the shares {shares} of draws below them"
            if is_continuous.any():
                contract.mean_of(rule, below, share)


@torch.no_grad()
def _losses(elbo: Any, model: Any, guide: Any, data: Any, count: int = PASSES) -> Tensor:
    losses = [float(elbo.loss(model, guide, *data)) for _ in range(count)]
    return torch.tensor(losses, dtype=torch.float64)


def _check_particles(
    contract: Contract, guide: StructuredGuide, model: Any, data: Any, single: Tensor
) -> None:
    """Compare several particles in one pass with passes one by one: mean and variance of the loss."""
    together = StructuredELBO(num_particles=PARTICLES, vectorize_particles=True)
    try:
        several = _losses(together, model, guide, data, PASSES // PARTICLES)
    except RuntimeError as error:
        rule = "several particles run in one pass, by `torch.func.vmap`"
        noise = (
            "noise of `torch.randn` or `torch.rand`; distributions of torch fill tensors in place"
        )
        contract.fail(rule, noise, error)
    rule = "several particles in one pass have the mean loss of single passes"
    apart = single.reshape(-1, PARTICLES).mean(-1)
    contract.mean_of(rule, (several - apart).unsqueeze(-1), torch.zeros(1))
    if several.std() < 3e-5 * single.abs().max():  # constant up to rounding, as of points
        return
    (own, own_error), (one, one_error) = map(_log_variance, (several, single))
    excess = own - (one - math.log(PARTICLES))  # log(PARTICLES) if they share their noise
    limit = max(math.log(2.2), 3 * math.hypot(own_error, one_error))
    if excess > min(limit, 0.9 * math.log(PARTICLES)):
        rule = "particles in one pass have independent noise: the variance falls with their number"
        contract.fail(rule, f"about {math.exp(one) / PARTICLES:.4g}", f"{math.exp(own):.4g}")


def _log_variance(values: Tensor) -> tuple[float, float]:
    """Return the logarithm of a variance, with its standard error by the jackknife."""
    count, squares = len(values), (values - values.mean()).square()
    left_out = (squares.sum() - count / (count - 1) * squares).log()
    error = ((count - 1) * left_out.var(correction=0)).sqrt()
    return float(values.var().log()), float(error)


def _check_predictive(contract: Contract, guide: StructuredGuide, model: Any, data: Any) -> None:
    drawn = guide.draw()
    predictive = Predictive(model, guide=guide, num_samples=3, return_sites=[*drawn])
    samples = predictive(*data[:-1])
    for name, value in drawn.items():
        contract.equal(f"`Predictive` draws '{name}'", samples[name].numel(), 3 * value.numel())


def _check_checkpoint(contract: Contract, make: MakeGuide, model: Any, data: Any) -> None:
    """Resume a run that is over: the new guide has the parameters of the old one."""
    with tempfile.TemporaryDirectory() as folder:
        guides = []
        for _ in range(2):
            pyro.clear_param_store()
            own = copy.deepcopy(model)
            guides.append(make(own))
            checkpoint = Checkpoint(Path(folder) / "run.pt", resume=True)
            fit(own, guides[-1], data, num_steps=3, checkpoint=checkpoint, progress=False)
    first, second = (guide.state_dict() for guide in guides)
    rule = "a checkpoint restores the guide: tensors that differ"
    contract.equal(rule, differences(first, second), [])
