"""Guides of points: one net, an ensemble of nets, one net with dropout."""

from collections.abc import Callable
from typing import Any, Unpack

from pyro_structvi.families import Dropout, Members, PointEstimate
from pyro_structvi.guides.options import GuideOptions
from pyro_structvi.guides.structured import StructuredGuide


class MAPGuide(StructuredGuide):
    """A point estimate of every site: maximum a posteriori.

    With ``kl_weight=0`` it is maximum likelihood, the deterministic net.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(400, 400), prior=0.3), num_data=100)
        >>> sum(parameter.numel() for parameter in MAPGuide(model).parameters())
        160400
    """

    def __init__(self, model: Callable[..., Any], **options: Unpack[GuideOptions]) -> None:
        super().__init__(model, {"*": PointEstimate()}, **options)


class EnsembleGuide(StructuredGuide):
    """A deep ensemble: K point estimates of the whole net, each equally likely.

    Under :class:`~pyro_structvi.StructuredELBO`, and so in :func:`~pyro_structvi.fit`, every step
    trains all members on the whole batch, each with the loss of a maximum a posteriori estimate; the
    loss is their mean. Other objectives train one member a step, chosen at random.
    :func:`~pyro_structvi.predict` uses each member once. Members share what is not a site, such as the
    parameters and running statistics of a batch normalization.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        size: The number K of members. The first starts where the guide's means would, the others at the
            elements of each site in random order, plus noise of standard deviation ``init_scale``.
        vectorize: Whether to run all members in one pass, by :func:`torch.func.vmap`: faster for
            small nets, and K times the memory. Not for layers that update running statistics.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Raises:
        ValueError: If the size is not a whole number of at least 1.
        RuntimeError: In training, if the net cannot be vectorized.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=100)
        >>> EnsembleGuide(model, size=5)["net.weight"].members.shape
        torch.Size([5, 3, 4])

    References:
        Lakshminarayanan, Pritzel and Blundell (2017), "Simple and scalable predictive uncertainty
        estimation using deep ensembles"; the Ensemble-W of Ritter, Kukla, Zhang and Li (2021),
        "Sparse uncertainty representation in deep learning with inducing weights".
    """

    def __init__(
        self,
        model: Callable[..., Any],
        size: int = 5,
        *,
        vectorize: bool = True,
        **options: Unpack[GuideOptions],
    ) -> None:
        super().__init__(model, {"*": Members(size, vectorize)}, **options)


class MCDropoutGuide(StructuredGuide):
    """Monte Carlo dropout: the input channels of every weight are dropped at random.

    In training each example has a separate mask; a draw, as :func:`~pyro_structvi.predict` makes it,
    has one mask for all inputs, so that it is one function. Vectors and scalars are points.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        rate: The probability with which an input channel is dropped, of a first layer too; give that
            one another family, by :class:`StructuredGuide`, to keep all its inputs.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Raises:
        ValueError: If the rate is not at least 0 and below 1.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(400, 400), prior=0.3), num_data=100)
        >>> sum(parameter.numel() for parameter in MCDropoutGuide(model).parameters())
        160400

    References:
        Gal and Ghahramani (2016), "Dropout as a Bayesian approximation: representing model
        uncertainty in deep learning".
    """

    def __init__(
        self, model: Callable[..., Any], rate: float = 0.1, **options: Unpack[GuideOptions]
    ) -> None:
        super().__init__(model, {"*": Dropout(rate)}, **options)
