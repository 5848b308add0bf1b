"""The matrix normal: one full covariance for rows and one for columns."""

import math
from dataclasses import dataclass

from torch import Tensor

from pyro_structvi import distributions
from pyro_structvi.families.cholesky_parameters import cholesky_factor, initial_factor
from pyro_structvi.families.family import MatrixFamily
from pyro_structvi.families.site import LatentSite


@dataclass(frozen=True)
class MatrixNormal(MatrixFamily):
    """Normals with one covariance over the outputs of a layer and one over its inputs.

    Parameters are ``loc`` and the Cholesky factors of both covariances: ``row_log_diagonal (out,)``
    and ``row_lower (out (out - 1) / 2,)``, the entries below the diagonal as multiples of the row's
    diagonal entry; for columns likewise. Together out in + out (out + 1) / 2 + in (in + 1) / 2
    numbers.

    Args:
        join_bias: Whether a layer's bias is a further column of its weight.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, bayesianize
        >>> from pyro_structvi.guides import StructuredGuide
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> guide = StructuredGuide(model, {"*.weight": MatrixNormal(join_bias=True)})
        >>> sum(parameter.numel() for parameter in guide.parameters())
        36

    References:
        Louizos and Welling (2016), "Structured and efficient variational deep learning with matrix
        Gaussian posteriors", section 3; they restrict both covariances to be diagonal.
    """

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start with the covariance ``scale^2`` times the identity, ``scale`` on each side."""
        parameters = {"loc": loc.clone()}
        for side, size in (("row", loc.shape[0]), ("column", loc[0].numel())):
            log_diagonal, lower = initial_factor(size, math.sqrt(scale), loc)
            parameters |= {f"{side}_log_diagonal": log_diagonal, f"{side}_lower": lower}
        return parameters

    def distribution(self, site: LatentSite, **parameters: Tensor) -> distributions.MatrixNormal:
        """Return the matrix normal with the factors that the parameters hold."""
        row, column = (
            cholesky_factor(parameters[f"{side}_log_diagonal"], parameters[f"{side}_lower"])
            for side in ("row", "column")
        )
        return distributions.MatrixNormal(parameters["loc"], row, column, validate_args=False)
