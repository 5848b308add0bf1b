"""The NumPyro model of a Pyro model: the same net, priors, likelihood and site names."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import nn

from pyro_structvi._pyro import declared_name, declared_samples
from pyro_structvi._torch import forward_hooks
from pyro_structvi.linalg.matrices import shrink
from pyro_structvi.nn.likelihood import BinaryClassifier, Classifier
from pyro_structvi.nn.priors import BufferedPrior, TiedPrior, argument_names
from pyro_structvi.nn.random_module import PASS_HOOKS, sites_of_every_pass
from pyro_structvi.nn.regressors import PoissonRegressor, Regressor
from pyro_structvi.reference.jax_net import JaxNet, to_array
from pyro_structvi.sites.finding import find_declared_sites
from pyro_structvi.structures.student_t import IsotropicStudentT

# From the net's output and values by site to the distribution of the observations.
JaxLikelihood = Callable[[Any, dict[str, Any]], Any]

# Distributions with the same names and arguments in Pyro and NumPyro.
_KINDS = (
    *("Beta", "Cauchy", "Exponential", "Gamma", "HalfCauchy", "HalfNormal", "InverseGamma"),
    *("Laplace", "LogNormal", "Normal", "StudentT", "Uniform"),
)

_LIKELIHOODS = (Classifier, BinaryClassifier, PoissonRegressor, Regressor)
_MEMBERS = ("forward", "run_net", "observe")  # that a subclass may change


@dataclass(frozen=True, eq=False)
class NumPyroModel:
    """The result of :func:`to_numpyro`.

    Attributes:
        net: The net as a function of input and sites.
        priors: Functions to the prior of each site, in the current precision of JAX.
        num_data: The number of training examples; None for the size of the input.
        likelihood: A function of the net's output and the sites to the distribution of observations.
    """

    net: JaxNet
    priors: dict[str, partial[Any]]
    num_data: int | None
    likelihood: JaxLikelihood

    def __call__(self, x: Any, y: Any = None) -> Any:
        """Sample all sites, and sample or observe the site ``obs``; return the net's output.

        Args:
            x: The net's input as an array, first dimension the batch.
            y: Observations as for the Pyro model, or None.
        """
        sites = {name: numpyro.sample(name, prior()) for name, prior in self.priors.items()}
        output = self.net(x, sites)
        likelihood = self.likelihood(output, sites)
        size = len(output)
        with (
            numpyro.handlers.scale(scale=(self.num_data or size) / size),
            numpyro.plate("data", size),
        ):
            numpyro.sample("obs", likelihood, obs=y)
        return output


def to_numpyro(model: Any) -> NumPyroModel:
    """Translate a model to NumPyro, with the same net, priors, likelihood and site names.

    Buffers and frozen parameters are copied.

    Args:
        model: A :class:`Classifier`, :class:`BinaryClassifier`, :class:`PoissonRegressor` or
            :class:`Regressor` around a Bayesian net of linear layers and activations.

    Returns:
        A NumPyro model of arrays ``(x, y=None)``, in the current precision of JAX, such as float64 under
        ``jax.enable_x64(True)``.

    Raises:
        TypeError: If the model is none of these.
        ValueError: If the model has no latent site.
        NotImplementedError: If a prior, a layer, a function of the net or a method of a subclass has no
            translation.

    Example:
        >>> import numpy as np
        >>> from numpyro.infer.util import log_density
        >>> from pyro_structvi import Regressor, bayesianize
        >>> model = Regressor(bayesianize(nn.Linear(2, 1), prior=1.0), num_data=5, noise_scale=0.1)
        >>> weights = {"net.weight": np.zeros((1, 2)), "net.bias": np.zeros(1)}
        >>> data = (np.zeros((5, 2)), np.zeros((5, 1)))
        >>> round(float(log_density(to_numpyro(model), data, {}, weights)[0]), 3)
        4.161
    """
    likelihood = _likelihood_of(model)
    net = JaxNet(model.net, _site_names(model), model.output)
    sampled = net.sites | sites_of_every_pass(model)
    priors = {
        name: _translate_prior(name, found.prior)
        for name, found in find_declared_sites(model).items()
        if name in sampled or not name.startswith("net.")
    }
    if not priors:
        raise ValueError(
            "`model` has no latent site to sample. Make its net Bayesian first, with "
            "`bayesianize(net, prior=1.0)`."
        )
    return NumPyroModel(net, priors, model.num_data, likelihood)


def _likelihood_of(model: Any) -> JaxLikelihood:
    kind = next((each for each in _LIKELIHOODS if isinstance(model, each)), None)
    if kind is None:
        raise TypeError(
            "`model` must be a Classifier, BinaryClassifier, PoissonRegressor or Regressor, but got "
            f"{type(model).__name__}. Write `Regressor(bayesianize(net), num_data, noise_scale)`."
        )
    own = [name for name in _MEMBERS if getattr(type(model), name) is not getattr(kind, name)]
    if own:
        raise NotImplementedError(
            f"A {type(model).__name__} has its own {', '.join(f'`{name}`' for name in own)}, without a "
            f"translation to NumPyro. Translate a {kind.__name__}, and let its net or `output` compute "
            "the rest."
        )
    if any(hook not in PASS_HOOKS for hook in forward_hooks(model)):
        raise NotImplementedError(
            f"Hooks of a {kind.__name__} have no translation to NumPyro. Register them at its net, "
            "whose hooks are translated."
        )
    if model.input_mean is not None:
        raise NotImplementedError(
            "`standardize` must be None for a model in NumPyro. Standardize the data themselves."
        )
    if isinstance(model, Regressor):
        return _regression(model)
    if isinstance(model, BinaryClassifier):
        return lambda logits, sites: _over_targets(dist.Bernoulli(logits=logits))
    if isinstance(model, PoissonRegressor):
        return lambda logs, sites: _over_targets(dist.Poisson(jnp.exp(logs)))
    if model.class_weights is not None:
        raise NotImplementedError(
            "`class_weights` must be None for a model in NumPyro; leave it out."
        )
    return lambda logits, sites: dist.Categorical(logits=logits)


def _regression(model: Regressor) -> JaxLikelihood:
    buffer = dict(model.named_buffers(recurse=False)).get("noise_scale")
    known = None if buffer is None else to_array(buffer)
    name, of_df = (declared_name(model, each) for each in ("noise_scale", "df_minus_one"))

    def likelihood(output: Any, sites: dict[str, Any]) -> Any:
        if model.is_heteroscedastic:
            output, raw = jnp.split(output, 2, -1)
            scale = jnp.hypot(jax.nn.softplus(raw), model.noise_floor)
        else:
            scale = sites[name] if known is None else jnp.asarray(known)
        if model.df is None:
            return _over_targets(dist.Normal(output, scale))
        df = 1 + sites[of_df] if model.df == "learned" else model.df
        return _over_targets(dist.StudentT(df, output, scale))

    return likelihood


def _over_targets(distribution: Any) -> Any:
    return distribution.to_event(len(distribution.batch_shape) - 1)


def _site_names(model: nn.Module) -> list[str]:
    """Return the names of the sites; raise if a prior may depend on other sites."""
    found = []
    for module in (each for each in model.modules() if isinstance(each, PyroModule)):
        for attribute, prior in declared_samples(module).items():
            name = declared_name(module, attribute)
            if isinstance(prior, (BufferedPrior, torch.distributions.Distribution)):
                found.append(name)
            elif not isinstance(prior, TiedPrior):  # the name of another module's site
                raise NotImplementedError(
                    f"The prior of the site '{name}' is a function of its module, so it may depend "
                    "on other sites, which has no translation to NumPyro. Give it a distribution, "
                    "as `bayesianize(net, prior=...)` does."
                )
    return found


def _translate_prior(name: str, prior: Any) -> partial[Any]:
    shape = tuple(prior.shape())
    while type(prior).__name__ in ("Independent", "ExpandedDistribution"):
        prior = prior.base_dist
    kind = type(prior).__name__
    if isinstance(prior, IsotropicStudentT):
        return partial(_make_student_t, shape, prior.dim, to_array(prior.df), to_array(prior.scale))
    if kind not in _KINDS:
        raise NotImplementedError(
            f"The prior of the site '{name}' is a {kind}, which has no translation to NumPyro. "
            f"Supported are {', '.join(_KINDS)} and {IsotropicStudentT.__name__}."
        )
    arguments = {key: getattr(prior, key) for key in argument_names(prior)}
    arrays = {key: to_array(shrink(value, value.dim())) for key, value in arguments.items()}
    return partial(_make_prior, kind, shape, **arrays)


def _make_prior(kind: str, shape: tuple[int, ...], **arguments: Any) -> Any:
    arrays = {name: jnp.asarray(value) for name, value in arguments.items()}
    element = getattr(dist, kind)(**arrays)
    return element.expand(shape).to_event(len(shape))


def _make_student_t(shape: tuple[int, ...], dim: int | None, df: Any, scale: Any) -> Any:
    grouped = (1, *shape) if dim is None else (shape[dim], *shape[:dim], *shape[dim + 1 :])
    num_groups, size, total = grouped[0], math.prod(grouped[1:]), math.prod(shape)
    order = np.moveaxis(np.arange(total).reshape(grouped), 0, dim or 0).ravel()
    scale_tril = jnp.asarray(scale) * jnp.eye(size)
    # Torch has checked them; JAX would compile each operation of another check.
    group = dist.MultivariateStudentT(
        jnp.asarray(df), jnp.zeros(size), scale_tril, validate_args=False
    )
    transforms = [
        dist.transforms.ReshapeTransform((total,), (num_groups, size)),
        dist.transforms.PermuteTransform(jnp.asarray(order)),
        dist.transforms.ReshapeTransform(shape, (total,)),
    ]
    return dist.TransformedDistribution(group.expand([num_groups]).to_event(1), transforms)
