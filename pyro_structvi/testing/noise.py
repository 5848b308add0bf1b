"""Draws that are linear in standard normal noise, as exact functions of the noise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


@dataclass(frozen=True)
class UnitDraws:
    """A draw as a linear function of its noise, ``mean + A e``."""

    mean: Tensor  # the draw without noise, in its shape
    matrix: Tensor  # A, with a column for each number of noise and a row for each element

    @property
    def covariance(self) -> Tensor:
        """The covariance ``A A'`` of all elements of the draw, ``(numel, numel)``."""
        return self.matrix @ self.matrix.mT


def unit_draws(draw: Callable[[], Tensor]) -> UnitDraws:
    """Return mean and matrix of a draw that is linear in standard normal noise, with their graph.

    The draw runs with each unit vector as its noise, so moments have no sampling error. If the gradients
    of ``A A'`` are right, the expected gradient of every function of the draw is right, since two ``A``
    with one covariance differ by a rotation of the noise. An ``AssertionError`` is raised if the draw is
    not linear, or takes noise by other functions than ``torch.randn``, ``torch.randn_like`` and
    ``Tensor.normal_``, as torch's normals do.
    """
    with _replaced_noise() as source:
        mean, size = source.run(draw, None), source.taken
        units = [source.run(draw, unit) for unit in torch.eye(size, dtype=torch.float64)]
        noise = torch.linspace(-1.5, 2.0, size, dtype=torch.float64)
        together = (source.run(draw, noise) - mean).flatten()
    columns = [(unit - mean).flatten() for unit in units]
    matrix = torch.stack(columns, -1) if columns else mean.new_zeros(mean.numel(), 0)
    torch.testing.assert_close(
        together, matrix @ noise.to(matrix), rtol=1e-9, atol=1e-9, msg="the draw is not linear"
    )
    return UnitDraws(mean, matrix)


def draw_with_noise(draw: Callable[[], Tensor], noise: Tensor | None) -> tuple[Tensor, int]:
    """Return a draw with given noise ``(size,)``, zeros if None, and the size of its noise."""
    with _replaced_noise() as source:
        return source.run(draw, noise), source.taken


class _Source:
    """Numbers in place of torch's random numbers."""

    noise: Tensor | None
    taken: int

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

    def randn(self, *size: Any, generator: Any = None, **options: Any) -> Tensor:
        return self.fill(torch.empty(*size, **options))

    def randn_like(self, like: Tensor, **options: Any) -> Tensor:
        return self.fill(torch.empty_like(like, **options).detach())

    def normal_(
        self, tensor: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None
    ) -> Tensor:
        with torch.no_grad():
            return self.fill(tensor).mul_(std).add_(mean)


@contextmanager
def _replaced_noise() -> Iterator[_Source]:
    """Replace torch's normal noise, and fail if torch's generator moves all the same."""
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


def assert_mean(samples: Tensor, expected: Tensor, false_alarm: float = 1e-6) -> None:
    """Assert that some hundred independent draws ``(n, *shape)`` have a mean ``(*shape)``.

    The bound of a z-test is widened by the first terms of the Cornish-Fisher expansion, for the degrees
    of freedom and the skewness of the draws. ``false_alarm`` is the probability of a failure although
    the mean is right, to first order.
    """
    samples = samples.detach().double().reshape(len(samples), -1)
    expected = expected.detach().double().flatten()
    count = samples.shape[0]
    assert torch.isfinite(samples).all(), "a draw is not finite"
    tail = torch.tensor(false_alarm / expected.numel() / 2, dtype=torch.float64)
    z = -float(torch.special.ndtri(tail))
    centred, deviation = samples - samples.mean(0), samples.std(0)
    skewness = centred.pow(3).mean(0).abs() / deviation.clamp_min(1e-100).pow(3)
    bound = z + (z**3 + z) / (4 * (count - 1)) + skewness * (2 * z**2 + 1) / (6 * count**0.5)
    error, deviation = samples.mean(0) - expected, deviation / count**0.5
    excess = error.abs() - bound * deviation - 1e-6 * deviation.max() - 1e-12  # for rounding
    worst = int(excess.argmax())
    assert excess[worst] <= 0, (
        f"the mean is off: entry {worst} of {len(error)} by {error[worst]:.3g}, which is "
        f"{error[worst] / deviation[worst]:.1f} standard deviations where {bound[worst]:.1f} are allowed"
    )
