"""Guides that put one family on every site that it serves; other sites get mean field."""

from collections.abc import Callable
from typing import Any, Unpack

from pyro_structvi.families import (
    FullCovariance,
    KTied,
    LowRank,
    MatrixNormal,
    MeanField,
    Rowwise,
)
from pyro_structvi.families.low_rank import Diagonal
from pyro_structvi.guides.options import GuideOptions
from pyro_structvi.guides.structured import StructuredGuide

__all__ = [
    "AutoLowRankLRT",
    "FullCovarianceGuide",
    "KTiedGuide",
    "MatrixNormalGuide",
    "MeanFieldGuide",
    "RowwiseGuide",
]


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
        self,
        model: Callable[..., Any],
        rank: int = 2,
        *,
        join_bias: bool = False,
        **options: Unpack[GuideOptions],
    ) -> None:
        super().__init__(model, {"*": KTied(rank, join_bias=join_bias)}, **options)


class MatrixNormalGuide(StructuredGuide):
    """The matrix normal at every weight, with full covariances; mean field at vectors.

    A layer has one covariance over its outputs and one over its inputs, out (out + 1) / 2 and
    in (in + 1) / 2 parameters beside the means.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        join_bias: Whether a layer's bias is a further column of its weight, so that both vary
            together.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, bayesianize
        >>> net = torch.nn.Linear(400, 400, bias=False)
        >>> model = Classifier(bayesianize(net, prior=0.3), num_data=100)
        >>> sum(parameter.numel() for parameter in MatrixNormalGuide(model).parameters())
        320400

    References:
        Louizos and Welling (2016), "Structured and efficient variational deep learning with matrix
        Gaussian posteriors".
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        join_bias: bool = False,
        **options: Unpack[GuideOptions],
    ) -> None:
        super().__init__(model, {"*": MatrixNormal(join_bias=join_bias)}, **options)


class RowwiseGuide(StructuredGuide):
    """A full covariance over the inputs of each unit, at every weight; mean field at vectors.

    Units are independent. Each has in (in + 1) / 2 parameters beside its means, and takes as many
    numbers as the layer has weights, out in, for each example.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        join_bias: Whether a layer's bias is a further column of its weight, so that both vary
            together.
        max_memory: The most that training one layer may take, in GiB, by the formula of
            :class:`pyro_structvi.families.Rowwise`.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Raises:
        ValueError: If ``max_memory`` is not a positive number.
        MemoryError: If a layer would take more than ``max_memory``.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, bayesianize
        >>> net = torch.nn.Linear(20, 50, bias=False)
        >>> model = Classifier(bayesianize(net, prior=0.3), num_data=100)
        >>> sum(parameter.numel() for parameter in RowwiseGuide(model).parameters())
        11500

    References:
        Rossi and Filippone, tutorial on variational inference, the "column-wise" posterior; layers
        are written x W there.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        join_bias: bool = False,
        max_memory: float = 8.0,
        **options: Unpack[GuideOptions],
    ) -> None:
        super().__init__(model, {"*": Rowwise(max_memory, join_bias=join_bias)}, **options)


class AutoLowRankLRT(StructuredGuide):
    """Low rank plus diagonal at every weight and vector, drawn by local reparameterization.

    With a constant diagonal this is ELRG-VI, for which the paper takes ``diagonal_variance=exp(-10)``;
    with a full one it is ELRG-D-VI.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        rank: The number K of directions in which the elements of a site vary together.
        diagonal: The diagonal part: "constant", "isotropic" (one learned number for each site) or
            "full".
        diagonal_variance: The variance of a constant diagonal; that of the paper is exp(-10), which
            costs a nat for each element and factor of e by which the posterior is wider. When None, the
            standard deviation is 0.1 over the root of the fan-in, and at most a tenth of the prior's.
        alpha: What multiplies the low-rank part; 1/K when None.
        join_bias: Whether a layer's bias is a further column of its weight, so that both vary
            together.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Raises:
        ValueError: If an option is out of its range.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, bayesianize
        >>> net = torch.nn.Linear(400, 400, bias=False)
        >>> model = Classifier(bayesianize(net, prior=0.3), num_data=100)
        >>> sum(parameter.numel() for parameter in AutoLowRankLRT(model, rank=2).parameters())
        480000

    References:
        Tomczak, Swaroop and Turner (2020), "Efficient low rank Gaussian variational inference for
        neural networks".
    """

    def __init__(
        self,
        model: Callable[..., Any],
        rank: int = 1,
        diagonal: Diagonal = "constant",
        *,
        diagonal_variance: float | None = None,
        alpha: float | None = None,
        join_bias: bool = False,
        **options: Unpack[GuideOptions],
    ) -> None:
        family = LowRank(rank, diagonal, diagonal_variance, alpha, join_bias=join_bias)
        super().__init__(model, {"*": family}, **options)


class FullCovarianceGuide(StructuredGuide):
    """One full covariance for each layer, weight and bias together; for small nets.

    A layer of D weights and biases takes D + D (D + 1) / 2 parameters and, for each example, about
    D^2 multiplications. Dense layers draw a weight for each example; the weight of a convolution is
    drawn once for the batch.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        join_bias: Whether a layer's bias is a further column of its weight, so that both vary
            together.
        max_memory: The most that training one layer may take, in GiB, by the formula of
            :class:`pyro_structvi.families.FullCovariance`.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Raises:
        ValueError: If ``max_memory`` is not a positive number.
        MemoryError: If a layer would take more than ``max_memory``.

    Example:
        >>> import torch
        >>> from pyro_structvi import Regressor, bayesianize
        >>> net = bayesianize(torch.nn.Linear(4, 3), prior=1.0)
        >>> guide = FullCovarianceGuide(Regressor(net, num_data=8, noise_scale=0.1))
        >>> sum(parameter.numel() for parameter in guide.parameters())
        135

    References:
        The full-rank row of Table 1 in Tomczak, Swaroop and Turner (2020), "Efficient low rank
        Gaussian variational inference for neural networks"; FCG-W in Ritter, Kukla, Zhang and Li
        (2021), "Sparse uncertainty representation in deep learning with inducing weights".
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        join_bias: bool = True,
        max_memory: float = 8.0,
        **options: Unpack[GuideOptions],
    ) -> None:
        family = FullCovariance(max_memory, join_bias=join_bias)
        super().__init__(model, {"*": family}, **options)
