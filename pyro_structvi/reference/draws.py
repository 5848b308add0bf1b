"""Draws of Markov chains."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


class ChainDraws(dict[str, Tensor]):
    """Draws by site name, each ``(num_chains * num_samples, *shape)``, one chain after another.

    They are valid ``posterior_samples`` of ``pyro.infer.Predictive``. Convergence is judged by the R-hat
    of function values: hidden units can be permuted, so chains with the same function may have different
    weights.

    Args:
        draws: The draws.
        num_chains: Number of chains.
        r_hat: Largest split R-hat of the functions that the sampler monitors.
        weight_r_hat: Largest split R-hat over the elements of all sites.
        sample_stats: Statistics of the sampler ``(chain, draw)``, under ArviZ's names.

    Example:
        >>> draws = ChainDraws({"w": torch.zeros(6, 3)}, 2, r_hat=1.0, weight_r_hat=1.0)
        >>> draws["w"].shape, draws.grouped()["w"].shape
        (torch.Size([6, 3]), (2, 3, 3))
    """

    def __init__(
        self,
        draws: dict[str, Tensor],
        num_chains: int,
        *,
        r_hat: float,
        weight_r_hat: float,
        sample_stats: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        super().__init__(draws)
        self.num_chains, self.r_hat, self.weight_r_hat = num_chains, r_hat, weight_r_hat
        self.sample_stats = dict(sample_stats or {})

    def grouped(self) -> dict[str, np.ndarray]:
        """Return the draws as arrays ``(chain, draw, *shape)``, as for ArviZ."""
        return {
            name: value.reshape(self.num_chains, -1, *value.shape[1:]).cpu().numpy()
            for name, value in self.items()
        }


def split_r_hat(values: Tensor) -> Tensor:
    r"""Return split R-hat of values ``(chain, draw, *shape)``, ``(*shape)``; NaN for constants.

    It is :math:`\sqrt{(\frac{n-1}{n} V + B) / V}` with the mean variance V within half chains of n draws
    and the variance B of their means (Gelman et al., Bayesian Data Analysis, 3rd edition, section 11.4).

    Args:
        values: At least four draws of each chain.
    """
    half = values.shape[1] // 2
    halves = torch.cat([values[:, :half], values[:, -half:]])
    within = halves.var(1).mean(0)
    between = halves.mean(1).var(0)
    r_hat: Tensor = (((half - 1) / half * within + between) / within).sqrt()
    return r_hat
