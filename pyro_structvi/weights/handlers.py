"""The handler under which a guide hands its weights to the model undrawn."""

from typing import Any

from pyro.poutine.messenger import Messenger

from pyro_structvi.weights.lazy import LazyWeight
from pyro_structvi.weights.site_role import SiteRole, SiteUse
from pyro_structvi.weights.weight_distribution import WeightDistribution


class DelayDraws(Messenger):
    """Delays the draws of a guide's weights until the model uses them.

    The value of a sample site becomes a :class:`~pyro_structvi.weights.lazy.LazyWeight` if its
    distribution is a :class:`~pyro_structvi.distributions.WeightDistribution` and its role says that the
    model uses it once, or if a draw of it may be applied in factors. Sites in plates are drawn at once.

    For an objective that is linear in each log density, such as the ELBO: outputs drawn for the
    likelihood do not belong to a weight that is drawn later for a density. Importance weights combine
    the two, so they need drawn weights.

    Example:
        >>> import pyro
        >>> import torch
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> from pyro_structvi.weights.site_role import SiteUse
        >>> q = MeanFieldNormal(torch.zeros(2, 3), torch.tensor(1.0))
        >>> infer = SiteRole(use=SiteUse("weight", count=1)).as_infer()
        >>> with DelayDraws():
        ...     type(pyro.sample("weight", q, infer=infer)).__name__
        'LazyWeight'
        >>> type(pyro.sample("weight", q, infer=infer)).__name__
        'Tensor'
    """

    def _pyro_sample(self, msg: Any) -> None:
        distribution, use = msg["fn"], SiteRole.of(msg).use
        if use is None or msg["value"] is not None or not self._waits(distribution, use):
            return
        if isinstance(distribution, WeightDistribution) and not distribution.batch_shape:
            msg["value"] = LazyWeight(distribution, use)

    def _waits(self, distribution: Any, use: SiteUse) -> bool:
        """Whether a weight may be drawn when it is used, or not at all."""
        can_wait = use.may_wait or getattr(distribution, "applies_in_factors", False)
        return can_wait and not use.drawn_first


class LeaveUndrawn(DelayDraws):
    """Delays all draws of weights, for a pass that reads their posteriors and uses no weight."""

    def _waits(self, distribution: Any, use: SiteUse) -> bool:
        return True
