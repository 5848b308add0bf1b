"""The contract of guides, checked on a model with data."""

import copy
import io
import math
import tempfile
from collections.abc import Callable, Mapping
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
from pyro_structvi.nn.likelihood import Likelihood
from pyro_structvi.posterior.files import load, save
from pyro_structvi.sites.sampled_net import has_members
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.testing.contracts import Contract, fixed_seed, is_defined
from pyro_structvi.testing.weights import MANY, linear
from pyro_structvi.weights.site_distributions import normal_quantiles
from pyro_structvi.weights.site_role import sample_nodes

PASSES = 200
PARTICLES = 4
LEVELS = [0.1, 0.5, 0.9]
MakeGuide = Callable[[Any], StructuredGuide]


def check_guide(make: MakeGuide, model: Any, *data: Tensor, is_bound: bool = False) -> None:
    """Check that a guide obeys the contract of guides on a model with data.

    The checks cover the sites; draws against calls of the guide, medians, quantiles and ``to_net``; the
    random state; gradients of all parameters; the mean of ``StructuredELBO`` against Pyro's
    ``Trace_ELBO``; state dicts, options and files; checkpoints; ``Predictive``; and several particles in
    one pass. Parameters are moved away from the start. Tests of means have a false alarm in 1e6 tests.

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
        is_double = all(value.dtype == torch.float64 for value in guide.parameters())
        contract = Contract(type(guide).__name__, (), torch.float64 if is_double else torch.float32)
        stays = torch.equal(before, torch.get_rng_state())
        contract.equal("making a guide leaves the random state as it is", stays, True)
        _move(guide)
        with contract.part("sites"):
            _check_sites(contract, guide, model, data)
        with contract.part("draws"):
            _check_draws(contract, guide, data)
            _check_quantiles(contract, guide)
            _check_nets(contract, guide, model, data[:-1])
        with contract.part("saving"):
            check_state(contract, initialized)
            _check_file(contract, guide, model, initialized)
            _check_predictive(contract, guide, model, data)
            _check_checkpoint(contract, make, model, data)
        with contract.part("the ELBO"):
            elbo_gradients(contract, guide, model, data, PARTICLES)
            losses = _losses(StructuredELBO(), model, guide, data)
            dense = _losses(Trace_ELBO(), model, guide, data)
            if not is_bound or losses.mean() < dense.mean():
                rule = "the mean loss of `StructuredELBO` equals the mean loss of `Trace_ELBO`"
                difference = (losses - dense).unsqueeze(-1)
                contract.mean_of(f"{rule}, by drawn weights", difference, torch.zeros(1))
        with contract.part("particles"):
            _check_particles(contract, guide, model, data, losses)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names under which two mappings of tensors differ."""
    both = one.keys() & other.keys()
    return [n for n in {**one, **other} if n not in both or not torch.equal(one[n], other[n])]


def check_state(contract: Contract, make: Callable[[], StructuredGuide]) -> None:
    """Change a guide, and load its state, from a file, into another one."""
    guide = make()
    _move(guide)
    state, file = guide.state_dict(), io.BytesIO()
    tensors = all(isinstance(value, Tensor) for value in state.values())
    contract.equal("a state dict holds tensors only", tensors, True)
    torch.save(state, file)
    file.seek(0)
    before, other = _draws(guide), make()
    other.load_state_dict(torch.load(file, weights_only=True))
    copies = {
        "a state dict restores the posterior in a new guide": other,
        "a deep copy has the posterior": copy.deepcopy(guide),
    }
    for rule, own in copies.items():
        contract.equal(f"{rule}: tensors that differ", differences(state, own.state_dict()), [])
        contract.equal(f"{rule}: draws that differ", differences(before, _draws(own)), [])


@torch.no_grad()
def _move(guide: StructuredGuide) -> None:
    """Change all parameters, since correlations and differences of scales start at zero."""
    for value in guide.parameters():
        value.add_(0.1 * torch.randn_like(value))


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


@torch.no_grad()
def _check_draws(contract: Contract, guide: StructuredGuide, data: Any) -> None:
    """Compare draws with the values of a call, exactly where they are linear in normal noise."""

    def drawn() -> Tensor:
        return _flat(guide.draw(local=True), guide)

    def called() -> Tensor:
        nodes = poutine.trace(guide).get_trace(*data).nodes
        return _flat({name: nodes[name]["value"] for name in guide.site_names}, guide)

    rule = "`draw` has the {} of the values in a call of the guide"
    own, other = linear(drawn), linear(called)
    if own is not None and other is not None:
        contract.close(rule.format("mean"), own.mean, other.mean)
        return contract.close(rule.format("covariance"), own.covariance, other.covariance)
    draws, values = (torch.stack([draw() for _ in range(PASSES)]) for draw in (drawn, called))
    mean = draws.mean(0)
    contract.mean_of(rule.format("mean"), draws - values, 0 * mean)
    mixed = torch.randn(len(mean), 8).to(mean) / len(mean) ** 0.5
    squares = (((each - mean) @ mixed).square() for each in (draws, values))
    excess = next(squares) - next(squares)
    return contract.mean_of(rule.format("covariance"), excess, 0 * excess[0])


def _flat(values: Mapping[str, Tensor], guide: StructuredGuide) -> Tensor:
    return torch.cat([values[name].flatten().double() for name in guide.site_names])


@torch.no_grad()
def _check_quantiles(contract: Contract, guide: StructuredGuide) -> None:
    """Compare quantiles and medians with draws, exactly where they are linear in normal noise."""
    if not is_defined(lambda: guide.quantiles(LEVELS)):
        return
    levels, medians = torch.tensor(LEVELS, dtype=torch.float64), guide.median()
    drawn: dict[str, Tensor] = {}
    for name, value in guide.quantiles(LEVELS).items():
        rule = f"`quantiles` of '{name}' are those of its draws"
        noise = linear(lambda name=name: guide.draw(local=True)[name].double())
        if noise is not None:
            deviation = noise.covariance.diagonal().reshape(noise.mean.shape).sqrt()
            contract.close(rule, value, normal_quantiles(noise.mean, deviation, levels))
            contract.close(f"`median` of '{name}' is that of its draws", medians[name], noise.mean)
            continue
        contract.equal("`quantiles` are for each element", value[0].shape, medians[name].shape)
        drawn = drawn or guide.joint_posterior().draw_many([*range(MANY)], local=True)
        flat = drawn[name].flatten(1)
        is_continuous = (flat.sort(0).values.diff(dim=0) > 0).all(0)
        if not is_continuous.any():
            continue
        value = value.flatten(1)[:, is_continuous]
        below = (flat[:, None, is_continuous] <= value).double()
        contract.mean_of(rule, below, levels.unsqueeze(-1).expand_as(value))
        if not has_members(guide):
            median = medians[name].flatten()[is_continuous]
            contract.close(f"`median` of '{name}' is its quantile 1/2", median, value[1])


@torch.no_grad()
def _check_nets(contract: Contract, guide: StructuredGuide, model: Any, x: Any) -> None:
    """Compare ``to_net`` and ``sampled`` with the net given the values of all sites."""
    if not isinstance(model, Likelihood):
        return
    drawn = guide.draw()
    ways: dict[str, tuple[Any, Any]] = {
        "to_net(draw)": (drawn, drawn),
        "to_net()": (None, guide.median()),
    }
    for name, (draw, values) in ways.items():
        if draw is None and (guide.num_members > 1 or has_members(guide)):
            continue
        torch.manual_seed(1)
        expected = poutine.condition(model.net, values)(*x)
        torch.manual_seed(1)
        contract.close(f"`{name}` has its values of all sites", guide.to_net(draw)(*x), expected)
        torch.manual_seed(1)
        with guide.sampled(values):
            contract.close("a block of `sampled` has its values", model.net(*x), expected)


def _check_file(
    contract: Contract, guide: StructuredGuide, model: Any, make: Callable[[], StructuredGuide]
) -> None:
    """Save the guide, and load it: a guide of this package by its options, where sites are declared."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "guide.safetensors"
        try:
            save(path, model, guide)
        except TypeError:  # an option that no file holds, such as a function
            return
        is_own = type(guide).__module__.startswith("pyro_structvi.")
        loaded = load(path, model, None if is_own and isinstance(model, Likelihood) else make())
    rule = "`options` and a file restore the guide"
    contract.equal(f"{rule}: draws that differ", differences(_draws(guide), _draws(loaded)), [])
    for name, value in vars(guide).items():
        if isinstance(value, bool | int | float | str) and not name.startswith("_"):
            contract.equal(f"{rule}: `{name}`", getattr(loaded, name, value), value)


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
        expected = "no error"
        if "inplace randomness" in str(error):
            expected = (
                "noise of `torch.randn` or `torch.rand`; distributions of torch fill in place"
            )
        contract.fail(rule, expected, error)
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
