"""The likelihoods of the library's models in NumPyro."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from pyro_structvi._pyro import declared_name
from pyro_structvi.nn.classifiers import BinaryClassifier, Classifier
from pyro_structvi.nn.likelihood import Likelihood
from pyro_structvi.nn.regressors import SMALLEST_SCALE, PoissonRegressor, Regressor
from pyro_structvi.reference.jax_net import to_array

# From the net's output and the values of all sites to the distribution of the observations.
JaxLikelihood = Callable[[Any, dict[str, Any]], Any]


def to_jax_likelihood(model: Any) -> tuple[JaxLikelihood, set[str]]:
    """Return a model's likelihood in NumPyro, and the latent sites that it reads.

    Args:
        model: The model.

    Raises:
        TypeError: If it is none of the models in the table below.
    """
    found = next((make for kind, make in _TRANSLATIONS.items() if isinstance(model, kind)), None)
    if found is None:
        *others, last = (kind.__name__ for kind in _TRANSLATIONS)
        raise TypeError(
            f"`model` must be a {', '.join(others)} or {last}, but got {type(model).__name__}. Write "
            "`Regressor(bayesianize(net), num_data, noise_scale)`."
        )
    return found(model)


def _classes(model: Classifier) -> tuple[JaxLikelihood, set[str]]:
    if model.class_weights is not None:
        raise NotImplementedError(
            "`class_weights` must be None for a model in NumPyro; leave it out."
        )
    return lambda logits, sites: dist.Categorical(logits=logits), set()


def _labels(model: BinaryClassifier) -> tuple[JaxLikelihood, set[str]]:
    return lambda logits, sites: _over_targets(dist.Bernoulli(logits=logits)), set()


def _counts(model: PoissonRegressor) -> tuple[JaxLikelihood, set[str]]:
    return lambda logs, sites: _over_targets(dist.Poisson(jnp.exp(logs))), set()


def _targets(model: Regressor) -> tuple[JaxLikelihood, set[str]]:
    def noise(mean: Any, scale: Any) -> Any:
        is_normal = model.df is None
        return _over_targets(
            dist.Normal(mean, scale) if is_normal else dist.StudentT(model.df, mean, scale)
        )

    def heteroscedastic(output: Any, sites: dict[str, Any]) -> Any:
        mean, raw = jnp.split(output, 2, -1)
        return noise(mean, jnp.maximum(jax.nn.softplus(raw), SMALLEST_SCALE))

    if model.is_heteroscedastic:
        return heteroscedastic, set()
    buffer = dict(model.named_buffers(recurse=False)).get("noise_scale")
    if buffer is None:
        name = declared_name(model, "noise_scale")
        return lambda mean, sites: noise(mean, sites[name]), {name}
    value = to_array(buffer)
    return lambda mean, sites: noise(mean, jnp.asarray(value)), set()


def _over_targets(distribution: Any) -> Any:
    return distribution.to_event(len(distribution.batch_shape) - 1)


_TRANSLATIONS: dict[type[Likelihood], Callable[[Any], tuple[JaxLikelihood, set[str]]]] = {
    Classifier: _classes,
    BinaryClassifier: _labels,
    PoissonRegressor: _counts,
    Regressor: _targets,
}
