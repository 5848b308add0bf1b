"""Particles in one pass and in a loop with the same noise, so that both give the same numbers."""

from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch

from pyro_structvi.infer import elbo as elbo_module
from pyro_structvi.infer.terms import average


def terms_together(elbo, model, guide, *args):
    """Return the terms of all particles in one pass, each with the noise of its number."""
    return _in_one_pass(lambda: elbo.terms(model, guide, *args))


def terms_in_a_loop(elbo, model, guide, *args):
    """Return the terms of the particles one after another, each with the noise of its number."""
    with _noise_of_particles() as noise:

        def loop(run, numbers):
            return average([noise.run(run, int(number)) for number in numbers])

        with patch.object(elbo_module, "_run_together", loop):
            return elbo.terms(model, guide, *args)


def draws_together(joint, count):
    """Return the draws of a joint posterior in one pass, each with the noise of its number."""
    return _in_one_pass(lambda: joint.draw_many(range(count), local=True), count)


def _in_one_pass(compute, count=None):
    """Map over numbers by vmap, or over ``count`` numbers by the first dimension of the noise."""
    vmap = torch.func.vmap
    with _noise_of_particles() as noise:
        noise.count = count

        def numbered(function, **options):
            return vmap(lambda number: noise.run(function, number), **options)

        with patch("torch.func.vmap", numbered):
            return compute()


def draws_in_a_loop(joint, count):
    """Return the draws one after another, each with the noise of its number."""
    with _noise_of_particles() as noise:
        each = [
            noise.run(lambda number: joint.draw(True, number), number) for number in range(count)
        ]
    return {name: torch.stack([draw[name] for draw in each]) for name in each[0]}


class _Noise:
    """Noise in place of torch's: for each draw of a pass one table with a row for each particle."""

    _rows = 64

    def __init__(self):
        self.count, self._number, self._random = None, None, np.random.default_rng(0)

    def run(self, function, number):
        self._number, self._random = number, np.random.default_rng(0)
        return function(number)

    def randn(self, *shape, dtype=None, device=None):
        return self._row(self._random.standard_normal, shape, dtype)

    def rand(self, *shape, dtype=None, device=None):
        return self._row(self._random.random, shape, dtype)

    def randint(self, high, shape, device=None):
        return self._row(lambda size: self._random.integers(high, size=size), shape, torch.int64)

    def _row(self, draw, shape, dtype):
        own = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        is_of_all = self._number is None
        assert not is_of_all or own[0] == self.count
        size = (self._rows, *own[is_of_all:])
        table = torch.as_tensor(draw(size)).to(dtype or torch.get_default_dtype())
        if is_of_all:
            return table[: self.count]
        return table.index_select(0, torch.as_tensor(self._number).reshape(1)).squeeze(0)


@contextmanager
def _noise_of_particles():
    noise, before = _Noise(), torch.get_rng_state()
    with (
        patch("torch.randn", noise.randn),
        patch("torch.randn_like", lambda like: noise.randn(like.shape, dtype=like.dtype)),
        patch("torch.rand", noise.rand),
        patch("torch.randint", noise.randint),
    ):
        yield noise
    if not torch.equal(before, torch.get_rng_state()):
        raise AssertionError("a particle takes noise of another kind")
