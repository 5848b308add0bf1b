"""Exact tests of draws that are linear in their noise, ``mean + A e`` with standard normal ``e``.

In place of many random draws, the draw itself is run once for each number of its noise, with that
number one and all others zero. The results are the columns of ``A``, and ``A A'`` is the covariance,
without any error of sampling: one wrong sign, factor or shape shows at 1e-10.

    def test_outputs():
        q = MeanFieldNormal(loc, scale)
        draw = lambda: q.image(x).rsample()  # a fresh draw at each call
        assert_draws(draw, mean, covariance)  # from an oracle; leading dimensions are independent

``draw`` takes no arguments and returns one tensor, in float64 and on the CPU. It may be the
``rsample`` of a distribution, a layer with a lazy weight (make the lazy weight inside ``draw``) or
a guide's draw. Noise is what ``torch.randn``, ``torch.randn_like`` and ``Tensor.normal_`` give, in
any number of calls, those of Pyro's and torch's normals among them. Other randomness, and a draw
that is not linear, fail the test.

:func:`unit_draws` gives mean and ``A`` for other comparisons. Both keep the graph, so the gradients of
``A A'`` can be compared with those of a dense covariance. If these agree, the expected gradient of every
function of the draw is right: two ``A`` with one covariance differ by a rotation of the noise, and a
rotated standard normal is the same standard normal.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor


@dataclass(frozen=True)
class UnitDraws:
    """A draw as a linear function of its noise.

    Attributes:
        mean: The draw without noise, of the draw's shape.
        matrix: ``A``, a column for each number of noise, a row for each element of the draw.
    """

    mean: Tensor
    matrix: Tensor

    @property
    def covariance(self) -> Tensor:
        """The covariance of all elements of the draw, ``(numel, numel)``."""
        return self.matrix @ self.matrix.mT


def unit_draws(draw: Callable[[], Tensor]) -> UnitDraws:
    """Return mean and matrix of a draw that is linear in standard normal noise.

    Args:
        draw: Makes one draw. It must take the same amount of noise at each call.
    """
    with _replaced_noise() as source:
        mean, size = source.run(draw, None), source.taken
        units = [source.run(draw, unit) for unit in torch.eye(size, dtype=torch.float64)]
        noise = torch.linspace(-1.5, 2.0, size, dtype=torch.float64)
        together = (source.run(draw, noise) - mean).flatten()
    columns = [(one - mean).flatten() for one in units]
    matrix = torch.stack(columns, -1) if columns else mean.new_zeros(mean.numel(), 0)
    torch.testing.assert_close(
        together, matrix @ noise.to(matrix), rtol=1e-9, atol=1e-9, msg="the draw is not linear"
    )
    return UnitDraws(mean, matrix)


def assert_draws(draw: Callable[[], Tensor], mean: Tensor, covariance: Tensor) -> UnitDraws:
    """Assert that a draw has a mean and a covariance, to 1e-10 of the largest entry.

    Args:
        draw: Makes one draw, of shape ``(*batch, *event)``.
        mean: What broadcasts to it.
        covariance: ``(*batch, E, E)`` for E elements of an event; the entries of a batch are
            independent of each other, which is tested too.

    Returns:
        Its mean and matrix, for more comparisons.
    """
    found = unit_draws(draw)
    blocks = covariance.reshape(-1, *covariance.shape[-2:])
    assert_close(found.mean, mean.expand(found.mean.shape))
    assert_close(found.covariance, torch.block_diag(*blocks))
    return found


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compare to 1e-10 of the largest entry, or of one where all are smaller."""
    assert actual.dtype == torch.float64
    atol = 1e-10 * max(1.0, expected.detach().abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=atol, check_stride=False)


def draw_with_noise(draw: Callable[[], Tensor], noise: Tensor | None) -> tuple[Tensor, int]:
    """Make one draw with given noise, zeros if None, and tell how many numbers it took.

    Args:
        draw: Makes one draw.
        noise: All numbers that it takes, in their order ``(size,)``.
    """
    with _replaced_noise() as source:
        return source.run(draw, noise), source.taken


class _Source:
    """Numbers in place of those that torch would draw."""

    def run(self, draw: Callable[[], Tensor], noise: Tensor | None) -> Tensor:
        self.noise, self.taken = noise, 0
        value = draw()
        if noise is not None and self.taken != len(noise):
            raise AssertionError(f"the draw took {self.taken} numbers of noise, not {len(noise)}")
        return value

    def fill(self, tensor: Tensor) -> Tensor:
        start, self.taken = self.taken, self.taken + tensor.numel()
        if self.noise is None:
            return tensor.zero_()
        if self.taken > len(self.noise):
            raise AssertionError(f"the draw took more than {len(self.noise)} numbers of noise")
        return tensor.copy_(self.noise[start : self.taken].reshape(tensor.shape))

    def randn(self, *size, generator=None, **options):
        return self.fill(torch.empty(*size, **options))

    def randn_like(self, like, **options):
        return self.fill(torch.empty_like(like, **options).detach())

    def normal_(self, tensor, mean=0.0, std=1.0, *, generator=None):
        with torch.no_grad():
            return self.fill(tensor).mul_(std).add_(mean)


@contextmanager
def _replaced_noise():
    """Replace torch's normal noise, and fail where torch's generator is moved all the same."""
    source = _Source()
    before = torch.get_rng_state()
    with (
        patch("torch.randn", source.randn),
        patch("torch.randn_like", source.randn_like),
        patch.object(Tensor, "normal_", lambda tensor, *a, **k: source.normal_(tensor, *a, **k)),
    ):
        yield source
    if not torch.equal(before, torch.get_rng_state()):
        raise AssertionError("the draw takes noise that is not standard normal")
