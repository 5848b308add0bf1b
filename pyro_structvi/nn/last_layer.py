"""A net of which only the last layer is random."""

from typing import Any

from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_structvi._checks import checked, naming
from pyro_structvi.nn.conversion import bayesianize
from pyro_structvi.nn.priors import Prior


class LastLayer(PyroModule):
    """A net whose features are points and whose last layer has a prior: a Bayesian last layer.

    The outputs are then normal under any posterior of the layer whose image is, so the bound has no
    noise with ``StructuredELBO(estimator="moments")``, or ``"bound"`` for classes, and predictions by
    ``predict(..., method="moments")`` are exact up to quadrature over the likelihood.

    Args:
        features: From inputs to features ``(batch, ..., in)``; trained along with the posterior.
        head: The last layer, from features to outputs; it is copied.
        prior: As for :func:`bayesianize`.
        frozen: Whether the features stay as they are, in evaluation mode and without gradients.

    Attributes:
        features: The features, the module that was given.
        head: The last layer with its sample sites.

    Raises:
        TypeError: If ``features`` or ``head`` is no module.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, FullCovarianceGuide, StructuredELBO, fit
        >>> net = LastLayer(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 3), prior=1.0)
        >>> model = Classifier(net)
        >>> guide = FullCovarianceGuide(model)
        >>> data = torch.randn(20, 4), torch.arange(20) % 3
        >>> elbo = StructuredELBO(estimator="bound")
        >>> history = fit(model, guide, data, num_steps=5, elbo=elbo, progress=False)
        >>> list(guide.median())
        ['net.head.weight', 'net.head.bias']

    References:
        Harrison, Willes and Snoek (2024), "Variational Bayesian last layers".
    """

    @checked
    def __init__(
        self, features: nn.Module, head: nn.Module, prior: Prior = 1.0, frozen: bool = False
    ) -> None:
        super().__init__()
        self.features = features.requires_grad_(False).eval() if frozen else features
        self.head = bayesianize(head, prior)
        self.frozen = frozen

    def forward(self, x: Any) -> Tensor:
        """Return the outputs of the last layer."""
        if self.frozen:
            self.features.eval()
        with naming("x", x):
            outputs: Tensor = self.head(self.features(x))
        return outputs
