"""The moments of a net's output as a module, which can be compiled and exported."""

from typing import Any, Literal

from torch import Tensor, nn

from pyro_structvi._checks import checked, naming
from pyro_structvi.guides import StructuredGuide
from pyro_structvi.moments.net import check_served, output_moments
from pyro_structvi.moments.random_tensor import Settings
from pyro_structvi.moments.weights import posteriors_of, random_values
from pyro_structvi.nn.likelihoods.likelihood import Likelihood


class NetMoments(nn.Module):
    r"""Mean and variance of a net's output under a posterior of its weights, in one pass.

    .. math:: m(x) = E_q[f(x, W)], \qquad v(x) = \operatorname{Var}_q[f(x, W)]

    Each layer's moments are computed from those of its input. A linear layer's are exact for any
    structure; functions of single elements are exact for normal inputs; covariances between units are
    left out unless ``covariance="full"``, and so are those between positions of a convolution, between
    the terms of a residual sum, and between the uses of one weight.

    No random number is in it, so it can be differentiated, compiled, and exported by
    :func:`torch.export.export` (``strict=False``) without Pyro. With ``covariance="full"`` slices and
    permutations of units are found out by values, which an export does not take.

    Args:
        model: A :class:`~pyro_structvi.Classifier`, :class:`~pyro_structvi.Regressor` or another
            likelihood around a net.
        guide: A guide of this package that is no ensemble.
        covariance: "full" to keep the covariance between the units of dense layers, and return it.
        linearize: Whether a function without a rule is replaced by its tangent at the mean.

    Raises:
        TypeError: If ``model`` or ``guide`` is something else.
        ValueError: If the guide is an ensemble, of which each member has moments of its own.
        NotImplementedError: In a call, if a function of the net has no rule.

    Example:
        >>> import torch
        >>> from pyro_structvi import KTiedGuide, Regressor, bayesianize
        >>> model = Regressor(bayesianize(nn.Linear(4, 2), prior=1.0), 10, noise_scale=0.1)
        >>> mean, variance = NetMoments(model, KTiedGuide(model))(torch.zeros(5, 4))
        >>> mean.shape, variance.shape
        (torch.Size([5, 2]), torch.Size([5, 2]))

    References:
        Frey and Hinton (1999), "Variational learning in nonlinear Gaussian belief networks". Wu,
        Nowozin, Meeds, Turner, Hernandez-Lobato and Gaunt (2019), "Deterministic variational inference
        for robust Bayesian neural networks".
    """

    @checked
    def __init__(
        self,
        model: Any,
        guide: Any,
        covariance: Literal["diagonal", "full"] = "diagonal",
        linearize: bool = False,
    ) -> None:
        super().__init__()
        check_served(model, guide, "guide")
        if guide.ensemble is not None:
            raise ValueError(
                "`guide` must be no ensemble, whose members have moments of their own, but got "
                f'{type(guide).__name__}. Call `predict(..., method="moments")`, which mixes them.'
            )
        self.model: Likelihood = model
        self.guide: StructuredGuide = guide
        self.settings = Settings(covariance == "full", linearize)

    def forward(self, x: Any) -> tuple[Tensor, Tensor]:
        """Return the output's mean ``(batch, ...)`` and variance, or covariance ``(batch, E, E)``."""
        values = random_values(posteriors_of(self.guide.joint_posterior()), self.settings)
        with naming("x", x):
            output = output_moments(self.model, values, x, self.settings)
        return output.loc, output.variance if output.covariance is None else output.covariance
