"""Guides that put one family on every weight; vectors and constrained sites get mean field."""

from collections.abc import Callable
from typing import Any, Unpack

from pyro_structvi.families import KTied, MeanField
from pyro_structvi.guides.structured import GuideOptions, StructuredGuide


class MeanFieldGuide(StructuredGuide):
    """Mean field at every site: independent normals, drawn by local reparameterization.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Example:
        >>> import torch
        >>> from pyro_structvi import Regressor, bayesianize
        >>> model = Regressor(bayesianize(torch.nn.Linear(2, 1), prior=1.0), num_data=8, noise_scale=0.1)
        >>> sum(parameter.numel() for parameter in MeanFieldGuide(model).parameters())
        6

    References:
        Blundell et al. (2015), "Weight uncertainty in neural networks"; Kingma, Salimans and
        Welling (2015) for the local reparameterization.
    """

    def __init__(self, model: Callable[..., Any], **options: Unpack[GuideOptions]) -> None:
        super().__init__(model, {"*": MeanField()}, **options)


class KTiedGuide(StructuredGuide):
    """The k-tied Normal at every weight, mean field at vectors.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        rank: The rank k of each matrix of standard deviations. With k = 2 the paper's nets do about
            as well as with mean field; k = 1 is worse on some of them.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Raises:
        ValueError: If the rank is not a whole number of at least 1.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(400, 400), prior=0.3), num_data=100)
        >>> sum(parameter.numel() for parameter in KTiedGuide(model, rank=2).parameters())
        162400

    References:
        Swiatkowski et al. (2020), "The k-tied Normal distribution: a compact parameterization of
        Gaussian mean field posteriors in Bayesian neural networks".
    """

    def __init__(
        self, model: Callable[..., Any], rank: int = 2, **options: Unpack[GuideOptions]
    ) -> None:
        super().__init__(model, {"*": KTied(rank)}, **options)
