"""Draws of Markov chains."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pyro.ops.stats import split_gelman_rubin
from torch import Tensor

from pyro_structvi._checks import Rule, warn_user

NumDraws = Annotated[
    int, Rule("at least 4, so that R-hat can be computed", lambda value: value >= 4)
]


MIXED = 1.1  # the largest R-hat of chains that agree


class NotMixedWarning(UserWarning):
    """The chains of a sampler disagree about function values, or none of these differs."""


class ChainDraws(dict[str, Tensor]):
    """Draws by site name, each ``(num_chains * num_draws, *shape)``, one chain after another.

    They are ``posterior_samples`` of Pyro's ``Predictive``. Convergence is judged by function values:
    hidden units can be permuted, so chains with the same function may have different weights.

    Args:
        draws: The draws.
        num_chains: Number of chains.
        r_hat: Largest split R-hat of function values at the data.
        weight_r_hat: Largest split R-hat over the elements of all sites.
        sample_stats: Statistics of the sampler ``(chain, draw)``, under ArviZ's names.
        ess: Smallest effective sample size of function values at the data, over all chains.
        chain_r_hat: Largest split R-hat of function values within each chain, ``(chain,)``. Chains in
            separate modes may each be near 1 although ``r_hat`` is not.
        seconds: Wall time of sampling with its warm-up.

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
        ess: float = math.nan,
        chain_r_hat: np.ndarray | None = None,
        seconds: float = math.nan,
    ) -> None:
        super().__init__(draws)
        self.num_chains, self.r_hat, self.weight_r_hat = num_chains, r_hat, weight_r_hat
        self.sample_stats = dict(sample_stats or {})
        self.ess, self.chain_r_hat, self.seconds = ess, chain_r_hat, seconds

    @property
    def ess_per_second(self) -> float:
        """The effective sample size ``ess`` for each second of sampling with its warm-up."""
        return self.ess / self.seconds

    def grouped(self) -> dict[str, np.ndarray]:
        """Return the draws as arrays ``(chain, draw, *shape)``, as for ArviZ."""
        return {
            name: value.reshape(self.num_chains, -1, *value.shape[1:]).cpu().numpy()
            for name, value in self.items()
        }


def warn_unless_mixed(draws: ChainDraws, longer: str) -> None:
    """Warn if the chains disagree, with the arguments that make them longer."""
    if math.isnan(draws.r_hat):
        warn_user(
            "R-hat of function values is NaN: no number that the model returns at the data differs "
            "between draws, so that convergence is not judged. Let the model return what depends on "
            "its sites, such as the outputs of its net.",
            NotMixedWarning,
        )
    elif draws.r_hat > MIXED:
        assert draws.chain_r_hat is not None
        warn_user(
            f"The largest split R-hat of function values is {draws.r_hat:.3g}, so the chains differ or "
            f"are too short; {(draws.chain_r_hat <= MIXED).sum()} of {draws.num_chains} chains have an "
            f"R-hat of at most {MIXED} alone. Raise {longer}. Chains in separate modes of a net may "
            "never agree: their draws are then an ensemble of modes with equal weights.",
            NotMixedWarning,
        )


def bulk_ess(values: Tensor) -> Tensor:
    r"""Return the bulk effective sample size of values ``(chain, draw, *shape)``, ``(*shape)``.

    Chains are split in halves, values are replaced by the normal scores of their ranks, and
    autocorrelations are summed by Geyer's initial monotone sequence. NaN for constants and for NaN.

    References:
        Vehtari, Gelman, Simpson, Carpenter and Buerkner (2021), "Rank-normalization, folding, and
        localization: an improved R-hat", sections 3.2 and 4.
    """
    half = values.shape[1] // 2
    halves = torch.cat([values[:, :half], values[:, -half:]]).double()
    number, count, *shape = halves.shape
    total = number * count
    columns = halves.reshape(total, -1).mT.contiguous()
    ordered = columns.sort(-1).values
    below = torch.searchsorted(ordered, columns)
    ranks = (below + torch.searchsorted(ordered, columns, right=True) + 1) / 2
    scores = torch.special.ndtri((ranks - 0.375) / (total + 0.25)).mT.reshape(number, count, -1)
    centered = scores - scores.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centered, 2 * count, dim=1)
    covariance = torch.fft.irfft(spectrum.abs().square(), 2 * count, dim=1)[:, :count] / count
    within = covariance[:, 0].mean(0) * count / (count - 1)
    pooled = within * (count - 1) / count + scores.mean(1).var(0)
    correlation = 1 - (within - covariance.mean(0)) / pooled  # (lag, values)
    correlation[0] = 1.0
    pairs = correlation[: count // 2 * 2].unflatten(0, (-1, 2)).sum(1)
    is_kept = (pairs > 0).cumprod(0).bool()
    is_kept[max(0, (count - 3) // 2) :] = False  # lags of few terms
    kept = torch.where(is_kept, pairs.cummin(0).values, 0.0).sum(0)
    ends = is_kept.sum(0, keepdim=True)
    following = correlation.gather(0, 2 * ends).squeeze(0)
    is_negative = pairs.gather(0, ends).squeeze(0) < 0
    following = torch.where(is_negative, following.clamp_min(0.0), following)
    time = (2 * kept - 1 + following).clamp_min(1 / math.log10(total))
    is_unknown = (columns == columns[:, :1]).all(1) | columns.isnan().any(1)
    return torch.where(is_unknown, math.nan, total / time).reshape(shape)


def convergence_of(
    functions: Sequence[Tensor], weights: Iterable[Tensor], num_chains: int
) -> dict[str, Any]:
    """Return R-hats and effective sample size of function values and weights ``(chain, draw, ...)``.

    They are the arguments of :class:`ChainDraws`; constants are left out.
    """
    each = torch.cat([bulk_ess(part).flatten() for part in functions])
    return {
        "r_hat": _largest_r_hat(functions),
        "weight_r_hat": _largest_r_hat(weights),
        "ess": -_largest(-each),
        "chain_r_hat": np.array([
            _largest_r_hat(part[[chain]] for part in functions) for chain in range(num_chains)
        ]),
    }


def _largest_r_hat(values: Iterable[Tensor]) -> float:
    return _largest(torch.cat([split_gelman_rubin(each).flatten() for each in values]))


def _largest(values: Tensor) -> float:
    """Return the largest of the values that are not NaN; NaN if there are none."""
    known = values[~values.isnan()]
    return float(known.max()) if known.numel() else math.nan
