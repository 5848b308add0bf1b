"""A distribution under test with its dense moments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from pyro_structvi.testing.contracts import Contract
from pyro_structvi.testing.noise import UnitDraws, assert_mean, unit_draws
from pyro_structvi.weights.weight_distribution import GaussianWeight

SAMPLES = 400  # of draws without exact moments
Moment = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Oracle:
    """Dense moments by definition, as in :func:`check_distribution`; None for none."""

    covariance: Moment | None
    mean: Moment | None
    kl: Callable[[Any, Tensor, Tensor], Tensor] | None
    shared_covariance: Moment | None


@dataclass(frozen=True)
class Subject:
    """A distribution in double precision whose tensors are leaves, with dense moments."""

    contract: Contract
    q: Any
    oracle: Oracle
    mean: Tensor
    covariance: Tensor
    is_normal: bool

    @classmethod
    def of(cls, contract: Contract, q: Any, oracle: Oracle) -> "Subject":
        """Read the moments off the draws, or off the oracle if there is one."""
        drawn = linear(q.rsample)
        if drawn is None and scales_noise(q):
            contract.fail(
                "draws are `loc + scale_noise(e)`", "a linear function", "another function"
            )
        mean, covariance = q.mean, q.covariance_matrix
        if drawn is not None:
            size, count = q.event_shape.numel(), q.batch_shape.numel()
            whole = drawn.covariance.reshape(count, size, count, size)
            mean = drawn.mean
            covariance = whole.diagonal(dim1=0, dim2=2).movedim(-1, 0)
            covariance = covariance.reshape(*q.batch_shape, size, size)
            apart = ~torch.eye(count, dtype=torch.bool)[:, None, :, None]
            rule = "weights of a batch are drawn independently of each other"
            contract.close(rule, whole * apart, torch.zeros_like(whole))
        if oracle.mean is not None:
            mean = oracle.mean(q)
        if oracle.covariance is not None:
            covariance = oracle.covariance(q)
        return cls(contract, q, oracle, mean, covariance, drawn is not None)

    @property
    def event_dim(self) -> int:
        """The number of dimensions of a weight."""
        return len(self.q.event_shape)

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """The mean ``(*batch, out, in)`` and the covariance ``(*batch, out, in, out, in)``."""
        mean = self.q.as_matrix(self.mean)
        return mean, self.covariance.reshape(*self.q.batch_shape, *mean.shape[-2:] * 2)

    def dense(self) -> MultivariateNormal:
        """Return the dense normal over the row-major weight."""
        return MultivariateNormal(self.mean.flatten(-self.event_dim), self.covariance)

    def check_draws(
        self, name: str, draw: Callable[..., Tensor], mean: Tensor, covariance: Tensor
    ) -> None:
        """Check moments of draws of independent examples with events of E elements."""
        size = covariance.shape[-1]
        found = linear(draw) if self.is_normal else None
        if found is not None:
            self.contract.close(f"{name} have their mean", found.mean, mean.expand_as(found.mean))
            blocks = torch.block_diag(*covariance.reshape(-1, size, size))
            same = torch.block_diag(*torch.ones_like(covariance.detach()).reshape(-1, size, size))
            between = torch.where(same > 0, torch.zeros(()), found.covariance)
            rule = f"{name} are independent between weights of a batch, or examples"
            self.contract.close(rule, between, torch.zeros_like(between), False)
            rule = f"{name} have their covariance, A A' for mean + A e"
            self.contract.close(rule, found.covariance, blocks)
            return
        if self.is_normal:
            self.contract.fail(f"{name} are linear in normal noise, like the weight", True, False)
        with torch.no_grad():
            draws = torch.stack([draw() for _ in range(SAMPLES)]).flatten(1)
            away = draws - mean.flatten()
            try:
                assert_mean(draws, mean)
                assert_mean(away.square(), covariance.diagonal(dim1=-2, dim2=-1))
            except AssertionError as error:
                self.contract.fail(f"{name} have mean and variance", "no significant error", error)


def scales_noise(q: Any) -> bool:
    """Whether a distribution defines ``scale_noise``."""
    return isinstance(q, GaussianWeight) and type(q).scale_noise is not GaussianWeight.scale_noise


def linear(draw: Callable[..., Tensor]) -> UnitDraws | None:
    """Return a draw as a linear function of normal noise, None if it is not one."""
    try:
        return unit_draws(draw)
    except AssertionError:
        return None
