"""Warnings of data and starts that a fit does badly with: before its first step, and after its last."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import Laplace, Normal, StudentT
from torch.nn.modules.module import register_module_forward_pre_hook

from pyro_structvi._checks import warn_user
from pyro_structvi._nested import nested_tensors
from pyro_structvi._pyro import declared_samples, stored_parameters, unwrapped
from pyro_structvi.infer.history import History
from pyro_structvi.nn.likelihood import Likelihood
from pyro_structvi.sites.autoguide import check_made_of, give_model
from pyro_structvi.sites.finding import separate_randomness, trial_run
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.structures.points import are_points
from pyro_structvi.weights.site_role import SiteRole
from pyro_structvi.weights.torch_distributions import base_of

PRIOR_DRAWS = 4
FAR = 10.0  # standard deviations of the prior predictive
FAR_START = 30.0  # standard deviations of the prior; 1,000 steps of 0.1 move a mean by 50 at most
LARGE_INPUT = 1000.0
# Products for each of the layer's, which take less long: a hundred times the layer's time.
SLOW = 400
NOTICED = 2e10  # products, about half a second of one core
WINDOWS = 20  # of a fit, over each of which the terms of the bound are averaged
LEAST = 10  # steps in a window, fewer of which are too noisy to compare
VANISHED = 0.01  # of the standard deviation of the targets, a scale of noise
SOME = 0.05  # of the targets


class NumDataWarning(UserWarning):
    """The model counts another number of examples than the data have."""


class SharedParametersWarning(UserWarning):
    """A module takes parameters of a former module from Pyro's param store."""


class DataScaleWarning(UserWarning):
    """Data lie far outside of what the prior expects."""


class SlowFamilyWarning(UserWarning):
    """A posterior takes hundreds of times as long as its layer."""


class VanishingNoiseWarning(UserWarning):
    """Point estimates fit the examples so closely that learned noise falls to nearly zero."""


def set_num_data(model: Any, guide: Any, found: int | None) -> None:
    """Tell a model how many examples the data have, if known, or compare with what it was told."""
    if isinstance(guide, StructuredGuide):
        give_model(guide, model)
        check_made_of(guide, model, "fit(guide.model, guide, data)")
    model = unwrapped(model)
    if not isinstance(model, Likelihood):
        return
    if not model.is_num_data_given:
        if found is None:
            raise ValueError(
                "`num_data` must be given to the model, since `data` does not tell how many examples "
                f"it has: `{type(model).__name__}(net, num_data=...)`."
            )
        model.num_data = found
    elif found not in (None, model.num_data):
        warn_user(
            f"The model was told of num_data={model.num_data} examples, and `data` has {found}. The "
            "likelihood counts as that of the former; leave `num_data` out to have it set.",
            NumDataWarning,
        )


@contextmanager
def warning_of_shared_parameters(parts: nn.Module) -> Iterator[None]:
    """Warn of parameters that modules take from Pyro's store in a block."""
    modules, own, stored = [*parts.children()], [*parts.parameters()], stored_parameters()
    yield
    known = {id(parameter) for parameter in own}
    taken = {id(each) for part in modules for each in part.parameters()} - known
    names = [name for name, parameter in stored.items() if id(parameter) in taken]
    if names:
        warn_user(
            f"Pyro's param store has the parameters {names} of another module, and these modules share "
            "them: a fit goes on from their values, and changes the other module. Call "
            "`pyro.clear_param_store()` and make model and guide anew, or call "
            "`pyro.settings.set(module_local_params=True)` before you make any.",
            SharedParametersWarning,
        )


def warn_of_first_batch(
    parts: tuple[Any, Any], args: Any, kwargs: Any, num_batches: float, size: int | None
) -> None:
    """Warn of a count of examples, of scales of data and of posteriors that will not do.

    The model runs at some draws of its prior, with the arguments of the first step.
    """
    model, guide = parts
    seen = _Recorder()
    hook = register_module_forward_pre_hook(seen.note_input)
    with hook, separate_randomness(), trial_run(model), seen:
        try:
            for _ in range(PRIOR_DRAWS):
                model(*args, **kwargs)
        # A prior draw may have values that no distribution takes, and a net may need gradients, which a
        # trial run has not. An error of net or data comes again in the first step, which words it.
        except (ValueError, RuntimeError):
            return
    if not any(msg["is_observed"] for draws in seen.sites.values() for msg in draws):
        raise ValueError(
            "`data` must hold what the model observes, but it observed nothing: pass `(x, y)`, or "
            "mini-batches of them. A `collate_fn` splits what a loader has in one object."
        )
    sizes = [len(each) for each in nested_tensors((args, kwargs)) if each.dim()]
    first = {name: draws[0] for name, draws in seen.sites.items()}
    scales = {name: msg["scale"] for name, msg in first.items()}
    unscaled = [n for n, scale in scales.items() if not isinstance(scale, Tensor) and scale == 1]
    if len(unscaled) < len(scales):  # the others may be of the weights, as a `pyro.factor` of them
        unscaled = [name for name in unscaled if _is_of_examples(first[name], sizes)]
    # A model of the user's own may count a mini-batch for all the data.
    if unscaled and num_batches > 1 and not isinstance(unwrapped(model), Likelihood):
        whole = "all examples" if size is None else f"all {size} examples"
        warn_user(
            f"The observed sites {unscaled} count a mini-batch for all the data: their scale is 1, and "
            f"a pass through `data` has {num_batches} mini-batches, so the posterior will be too wide. "
            f"Give their plate the number of {whole}, `pyro.plate(name, size, subsample=x)`.",
            NumDataWarning,
        )
    if seen.inputs and LARGE_INPUT < seen.inputs[0] < math.inf:
        warn_user(
            f"Inputs of the first random layer have a root mean square of {seen.inputs[0]:.3g}; priors "
            "expect about 1. Standardize them, `x = (x - x.mean(0)) / x.std(0).clamp_min(1e-6)`.",
            DataScaleWarning,
        )
    for name, draws in seen.sites.items():
        _warn_of_far(name, draws[0]["value"], [base_of(draw["fn"]) for draw in draws])
    if isinstance(guide, StructuredGuide):
        _warn_of_far_starts(guide, seen.priors)
        _warn_of_slow(guide, max(sizes, default=1))


def warn_of_ignored_data(history: History) -> None:
    """Warn where the KL's rise cost more log likelihood than what is kept, and than the KL that is left.

    The steps under a small weight are a short maximum-likelihood fit. A posterior of a model that fits
    loses about half a nat of its expected log likelihood for each direction that the data determine, and
    pays more KL than that for it. A fit of noise is lost too, and rightly, but not most of what was
    learned since the start. A posterior that lost more than both has given up the fit.
    """
    rises = sum(weight < history.kl_weight[-1] for weight in history.kl_weight)
    size = len(history.elbo) // WINDOWS
    if size < LEAST or rises < size:
        return
    sums = [0.0, *accumulate(history.log_likelihood)]
    best = max((sums[end] - sums[end - size]) / size for end in range(size, rises + 1))
    last = (sums[-1] - sums[-1 - size]) / size
    kl = sum(history.kl[-size:]) / size
    if best - last > max(kl, last - sums[1]) and kl > 0:
        warn_user(
            f"The expected log likelihood ends at {last:.4g} nats, and was {best:.4g} while the weight "
            f"of the KL rose. The loss is above the KL of {kl:.4g}: the posterior ignores most of the "
            "data. Take a guide whose layers depend on each other (`GlobalInducingGuide`), several "
            "starts (`MixtureGuide`), more steps, another prior or a smaller `kl_weight`.",
            UserWarning,
        )


def warn_of_vanishing_noise(parts: tuple[Any, Any], args: Any, kwargs: Any) -> None:
    """Warn of point estimates whose learned noise is far smaller than the spread of the targets."""
    model, guide = parts
    if not (isinstance(guide, StructuredGuide) and are_points(guide.all_posteriors())):
        return
    seen = _Recorder()
    # With gradients, which show that a scale is learned.
    with separate_randomness(), trial_run(model), torch.enable_grad(), seen:
        drawn = poutine.trace(guide).get_trace(*args, **kwargs)
        poutine.replay(model, trace=drawn)(*args, **kwargs)
    for name, (draw, *_) in seen.sites.items():
        noise, y = base_of(draw["fn"]), draw["value"]
        is_learned = isinstance(noise, Normal | StudentT | Laplace) and noise.scale.requires_grad
        if not is_learned or not y.dim() or len(y) < 2:
            continue
        share = float((noise.scale < VANISHED * y.std(0)).float().mean())
        if share > SOME:
            warn_user(
                f"The noise of '{name}' has fallen below {VANISHED:.0%} of the observations' standard "
                f"deviation at {share:.0%} of them. Point estimates that fit every example drive "
                "learned noise to zero, and predictions are then far too certain. Unless the data have "
                "no noise, hold out data, `validation=Validation((x, y), every=10, patience=30)`, or "
                "give `noise_scale` a number.",
                VanishingNoiseWarning,
            )


class _Recorder(Messenger):
    """Records observed sites, priors of the others, and the first input of a layer that has sites."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: dict[str, list[Any]] = {}
        self.priors: dict[str, Any] = {}
        self.inputs: list[float] = []

    def note_input(self, module: Any, given: Any) -> None:
        values = next(nested_tensors(given), None)
        # A likelihood may standardize its inputs.
        is_layer = declared_samples(module) and not isinstance(module, Likelihood)
        if values is not None and is_layer and not self.inputs:
            scale = values.detach().float().square().mean().sqrt()
            self.inputs.append(float(scale) * values.is_floating_point())

    def _pyro_post_sample(self, msg: Any) -> None:
        if SiteRole.of(msg).is_observation:
            self.sites.setdefault(msg["name"], []).append(msg)
        else:
            self.priors[msg["name"]] = base_of(msg["fn"])


def _is_of_examples(msg: Any, sizes: list[int]) -> bool:
    """Whether an observed site is in a plate, or has one of these numbers of examples."""
    return bool(msg["cond_indep_stack"]) or any(n in sizes for n in msg["fn"].shape()[:1])


def _warn_of_far(name: str, y: Any, priors: list[Any]) -> None:
    """Warn of observations many standard deviations from what draws of the prior predict."""
    if not isinstance(y, Tensor) or priors[0].support.is_discrete:
        return
    try:
        means = torch.stack([prior.mean for prior in priors])
        variance = means.var(correction=0) + priors[0].variance.mean()
    except NotImplementedError:
        return
    far = float(((y - means.mean()).square().mean() / variance).sqrt())
    if far > FAR:
        warn_user(
            f"The observations '{name}' are {far:.0f} standard deviations from what the prior predicts, "
            "so the posterior will not reach them. Standardize them, `y = (y - y.mean()) / y.std()`, "
            "and predictions back; or widen the priors.",
            DataScaleWarning,
        )


def _warn_of_far_starts(guide: StructuredGuide, priors: dict[str, Any]) -> None:
    """Warn of posteriors that start many standard deviations of the prior from its mean."""
    distances = {}
    with separate_randomness(), torch.no_grad():
        for name, value in guide.joint_posterior().median().items():
            prior = priors.get(name)
            # A plate of the first mini-batch has a part of the values.
            if prior is not None and value.shape == prior.batch_shape + prior.event_shape:
                with suppress(NotImplementedError):
                    away = (value - prior.mean) / prior.stddev
                    distances[name] = float(away.square().mean().sqrt())
    far = {name: each for name, each in distances.items() if FAR_START < each < math.inf}
    if far:
        name = max(far, key=lambda name: far[name])
        warn_user(
            f"The posteriors of {[*far]} start far outside of the prior, that of '{name}' at "
            f"{far[name]:.3g} standard deviations. Steps are in units of the prior, so a fit may end "
            "before it gets there. Widen the prior, or start at it: `init_loc_fn=init_to_median` of "
            "`pyro.infer.autoguide`.",
            UserWarning,
        )


def _warn_of_slow(guide: StructuredGuide, examples: int) -> None:
    """Warn of posteriors whose dense factors take far more products than their layer's pass."""
    for posterior in guide.all_posteriors():
        name, family = posterior.site.name, type(posterior.family).__name__
        products = sum(_products_of(*named) for named in posterior.named_parameters())
        if products > max(NOTICED, SLOW * 6 * posterior.site.shape.numel() * examples):
            warn_user(
                f"A step takes about {products:.0e} products for the {family} of '{name}', hundreds of "
                f"times those of its layer. A cheaper family is {{'{name}': LowRank(rank=5), ...}}.",
                SlowFamilyWarning,
            )


def _products_of(name: str, value: Tensor) -> float:
    """Return the cubed sizes of triangular factors, whose entries a parameter has."""
    if name == "across":
        return float((2 * value.numel()) ** 1.5)
    is_lower = name.endswith("lower") and value.numel() > 0
    return float(value[..., 0].numel() * (2 * value.shape[-1]) ** 1.5) if is_lower else 0.0
