"""The NumPyro model of a Pyro model: the same net, priors, likelihood and site names."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpyro
import numpyro.distributions
import torch
from pyro.nn import PyroModule
from torch import nn

from pyro_structvi._pyro import declared_name, declared_samples
from pyro_structvi.nn.priors import BufferedPrior, TiedPrior, argument_names
from pyro_structvi.reference.jax_net import (
    JaxLikelihood,
    JaxNet,
    SiteAttribute,
    to_array,
    to_jax_likelihood,
)
from pyro_structvi.sites.finding import find_declared_sites

# Distributions with the same names and arguments in Pyro and NumPyro.
_KINDS = (
    *("Beta", "Cauchy", "Exponential", "Gamma", "HalfCauchy", "HalfNormal", "InverseGamma"),
    *("Laplace", "LogNormal", "Normal", "StudentT", "Uniform"),
)


@dataclass(frozen=True, eq=False)
class NumPyroModel:
    """The result of :func:`to_numpyro`.

    Attributes:
        net: The net as a function of input and sites.
        priors: A function to the prior of each site, in the current precision of JAX.
        num_data: The number of training examples; None for the size of the input.
        likelihood: From the net's output and the sites to the distribution of the observations.
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
        NotImplementedError: If a prior, a layer or a function of the net has no translation.

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
    likelihood, read = to_jax_likelihood(model)
    net = JaxNet(model.net, _site_attributes(model))
    used = net.sites | read
    priors = {
        name: _translate_prior(name, found.prior)
        for name, found in find_declared_sites(model).items()
        if name in used
    }
    if not priors:
        raise ValueError(
            "`model` has no latent site to sample. Make its net Bayesian first, with "
            "`bayesianize(net, prior=1.0)`."
        )
    return NumPyroModel(net, priors, model.num_data, likelihood)


def _site_attributes(model: nn.Module) -> list[SiteAttribute]:
    """Return the attributes that are sites; raise if a prior may depend on other sites."""
    found = []
    for module in model.modules():
        if not isinstance(module, PyroModule):
            continue
        for attribute, prior in declared_samples(module).items():
            name = declared_name(module, attribute)
            if isinstance(prior, TiedPrior):
                site = declared_name(prior.owner, prior.attribute)
            elif isinstance(prior, (BufferedPrior, torch.distributions.Distribution)):
                site = name
            else:
                raise NotImplementedError(
                    f"The prior of the site '{name}' is a function of its module, so it may depend "
                    "on other sites, which has no translation to NumPyro. Give it a distribution, "
                    "as `bayesianize(net, prior=...)` does."
                )
            found.append((module, attribute, site))
    return found


def _translate_prior(name: str, prior: Any) -> partial[Any]:
    shape = tuple(prior.shape())
    while type(prior).__name__ in ("Independent", "ExpandedDistribution"):
        prior = prior.base_dist
    kind = type(prior).__name__
    if kind not in _KINDS:
        raise NotImplementedError(
            f"The prior of the site '{name}' is a {kind}, which has no translation to NumPyro. "
            f"Supported are {', '.join(_KINDS)}."
        )
    arguments = {key: to_array(_unexpand(getattr(prior, key))) for key in argument_names(prior)}
    return partial(_make_prior, kind, shape, **arguments)


def _make_prior(kind: str, shape: tuple[int, ...], **arguments: Any) -> Any:
    arrays = {name: jnp.asarray(value) for name, value in arguments.items()}
    element = getattr(numpyro.distributions, kind)(**arrays)
    return element.expand(shape).to_event(len(shape))


def _unexpand(value: torch.Tensor) -> torch.Tensor:
    """Reduce expanded dimensions to size 1."""
    return value[tuple(slice(1) if step == 0 else slice(None) for step in value.stride())]
