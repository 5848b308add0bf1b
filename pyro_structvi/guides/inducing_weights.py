"""The guide of inducing weights, with each posterior of Ritter et al. (2021)."""

from collections.abc import Callable
from typing import Any, Literal, Unpack

from pyro_structvi._checks import Count, Positive, checked
from pyro_structvi.families import (
    Family,
    FullCovariance,
    InducingWeights,
    MatrixNormal,
    MeanField,
    Members,
)
from pyro_structvi.families.inducing import InducingShape
from pyro_structvi.guides.options import GuideOptions
from pyro_structvi.guides.structured import StructuredGuide

InducingPosterior = Literal["diagonal", "matrix", "full", "ensemble"]


class InducingWeightGuide(StructuredGuide):
    r"""Inducing weights at every weight, its bias joined; mean field at vectors.

    No parameter is of a weight's size, and outputs are drawn without forming a weight, so that for wide
    layers guide and step are smaller than the net and its step.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        inducing_shape: The ``(M_out, M_in)`` of each layer's inducing weights; a layer that is smaller
            in both directions gets its own shape.
        inducing_posterior: Their posterior: "diagonal" (FFG-U), "matrix" (a matrix normal), "full"
            (FCG-U; of ``(M_out M_in)^2 / 2`` parameters), "ensemble" (Ensemble-U), or a family.
        ensemble_size: The members of an ensemble.
        shared: Whether a "matrix" or "full" posterior is one for all layers, which correlates them.
        max_conditional_scale: The most that the scale of the noise given the inducing weights may be,
            in units of the prior's standard deviation; no bound when None. The paper finds about 0.03
            best for image classifiers.
        max_inducing_scale: The most that the standard deviation of a whitened inducing weight may be,
            for "diagonal"; no bound when None. The paper takes 0.1.
        join_bias: Whether a layer's bias is a further column of its weight.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Raises:
        ValueError: If an option is out of its range, or does not go with the posterior.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4096, 4096), prior=0.02), num_data=100)
        >>> guide = InducingWeightGuide(model, inducing_shape=(64, 64))
        >>> sum(parameter.numel() for parameter in guide.parameters())  # of 16,781,312 weights
        532673

    References:
        Ritter, Kukla, Zhang and Li (2021), "Sparse uncertainty representation in deep learning with
        inducing weights".
    """

    @checked
    def __init__(
        self,
        model: Callable[..., Any],
        inducing_shape: InducingShape = (64, 64),
        inducing_posterior: InducingPosterior | Family = "diagonal",
        *,
        ensemble_size: Count | None = None,
        shared: bool = False,
        max_conditional_scale: float | None = None,
        max_inducing_scale: Positive | None = None,
        join_bias: bool = True,
        **options: Unpack[GuideOptions],
    ) -> None:
        family = InducingWeights(
            inducing_shape,
            _inducing_family(inducing_posterior, ensemble_size, max_inducing_scale),
            shared,
            max_conditional_scale,
            join_bias=join_bias,
        )
        super().__init__(model, {"*": family}, **options)


def _inducing_family(
    posterior: InducingPosterior | Family, ensemble_size: int | None, max_scale: float | None
) -> Family:
    """Return the family of inducing weights that goes by a name."""
    if ensemble_size is not None and posterior != "ensemble":
        raise ValueError(
            f'`ensemble_size` is for inducing_posterior="ensemble", but got {posterior!r}.'
        )
    if max_scale is not None and posterior != "diagonal":
        raise ValueError(
            f'`max_inducing_scale` is for inducing_posterior="diagonal", but got {posterior!r}.'
        )
    if isinstance(posterior, Family):
        return posterior
    families: dict[str, Family] = {
        "diagonal": MeanField(max_scale),
        "matrix": MatrixNormal(),
        "full": FullCovariance(),
        "ensemble": Members(5 if ensemble_size is None else ensemble_size),
    }
    return families[posterior]
