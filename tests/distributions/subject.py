"""What the tests of the contract work with: a distribution and its oracles."""

from dataclasses import dataclass

import pyro.distributions as dist
import pytest
import torch

from pyro_structvi.distributions import AugmentedMatrixNormal, WeightDistribution
from pyro_structvi.structures.inducing.augmented import AugmentedNormal
from tests import dense_oracles as dense
from tests.distributions.cases import CASES, MATRIX, VECTOR, Case

FLOAT64, FLOAT32 = torch.float64, torch.float32
FILTERS = (4, 2, 2)


@dataclass(frozen=True)
class Subject:
    """A distribution under test, with what a test needs to know of it."""

    case: Case
    q: WeightDistribution

    @property
    def dtype(self):
        return self.q._first_parameter.dtype

    @property
    def event_dim(self):
        return len(self.q.event_shape)

    @property
    def out(self):
        return self.q.event_shape[0]

    @property
    def size(self):
        """The inputs of the weight seen as a matrix."""
        return self.q.event_shape[1:].numel()

    def with_leaves(self, dtype=None):
        """Return a copy whose arguments are leaves of a graph of their own."""
        return with_arguments(self.q, lambda value: value.detach().to(dtype, copy=True))

    def exact(self):
        """Return the copy in float64 that oracles compute with."""
        return self.with_leaves(FLOAT64)

    def randn(self, *shape):
        return torch.randn(shape, dtype=self.dtype)

    def assert_close(self, actual, expected):
        """Compare with the tolerance of the dtype; ``expected`` is in float64.

        Entries much smaller than the largest, as where terms cancel, are compared on its scale.
        """
        relative = 1e-10 if self.dtype == FLOAT64 else 1e-4
        largest = expected.detach().abs().max().clamp_min(1.0).item()
        torch.testing.assert_close(
            actual.double(), expected, rtol=relative, atol=relative * largest, check_stride=False
        )

    def assert_gradients_close(self, value, q, oracle, exact, others=()):
        """Compare the gradients of two scalars with respect to all arguments, and other leaves."""
        found, dense_ones = gradients(value, q, others), gradients(oracle, exact, others)
        for actual, expected in zip(found, dense_ones, strict=True):
            self.assert_close(actual, expected)


def named_arguments(q):
    """Return the tensors that a distribution was made of, by name."""
    named = {name: getattr(q, name) for name in q.argument_names}
    if isinstance(q, AugmentedNormal):
        inner = named_arguments(q.inducing)
        named |= q.joint.arguments | {f"inducing_{name}": value for name, value in inner.items()}
    return named


def rebuilt(q, named):
    """Return a copy of a distribution that was made of other tensors."""
    new = q.expand(q.batch_shape)  # without what the other has formed
    if isinstance(q, AugmentedNormal):
        prefix = "inducing_"
        joint = {name: named[name] for name in q.joint.arguments}
        inner = {name[len(prefix) :]: named[name] for name in named if name.startswith(prefix)}
        AugmentedNormal.__init__(
            new,
            AugmentedMatrixNormal(**joint, event_shape=q.event_shape, validate_args=False),
            rebuilt(q.inducing, inner),
            named["conditional_scale"],
            validate_args=False,
        )
        new._validate_args = q._validate_args
        return new
    for name in q.argument_names:
        setattr(new, name, named[name])
    return new


def with_arguments(q, change):
    """Return a copy of a distribution whose arguments are changed, and leaves."""
    changed = {name: change(value) for name, value in named_arguments(q).items()}
    return rebuilt(q, {name: value.requires_grad_() for name, value in changed.items()})


def arguments(q):
    return list(named_arguments(q).values())


def gradients(value, q, others=()):
    """Return the gradient with respect to every argument and other leaves; all must enter the value.

    Of a triangular argument only the triangle counts: oracles and distributions may or may not look
    at the other entries.
    """
    names = [*named_arguments(q), *("" for _ in others)]
    found = torch.autograd.grad(value.sum(), [*arguments(q), *others])
    return [
        gradient.tril() if "scale_tril" in name else gradient
        for name, gradient in zip(names, found, strict=True)
    ]


def name_of(value):
    return "x".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def settings():
    """Give one weight of every kind to each structure, a batch of matrices and one of vectors."""
    for case in CASES:
        shapes = [((), MATRIX), ((1, 2), MATRIX), ((), FILTERS)]
        if VECTOR in case.event_shapes:
            shapes += [((), VECTOR), ((3, 2), VECTOR)]
        for batch_shape, event_shape in shapes:
            name = f"{case.name}, batch {name_of(batch_shape)}, {name_of(event_shape)}"
            yield pytest.param((case, batch_shape, event_shape), id=name)


def uniform_prior(shape, event_dim, dtype):
    return dist.Normal(torch.tensor(0.3, dtype=dtype), 0.7).expand(shape).to_event(event_dim)


def image_oracle(subject, exact, x):
    """Return the dense mean and covariance of ``W x``."""
    x = x.double()
    covariance = dense.image_covariance(x, subject.case.covariance(exact), subject.out)
    return dense.image_mean(x, subject.case.mean(exact), subject.event_dim), covariance


def assert_gradients_of_draws_are_exact(subject, found, q, moments, others=()):
    """Assert that ``E[a'w + w'Qw / 2]`` has the dense gradient for the mean and covariance of a draw.

    Args:
        subject: The subject of the test.
        found: The mean and the matrix of the draw, with their graph.
        q: The distribution whose arguments are leaves of it.
        moments: A function of an exact copy to the dense mean and covariance of all elements, in its
            entries ``(..., E)`` and ``(..., E, E)``.
        others: Further leaves that both depend on.
    """
    exact = subject.exact()
    mean, covariance = moments(exact)
    covariance = torch.block_diag(*covariance.reshape(-1, *covariance.shape[-2:]))
    linear, quadratic = torch.randn(found.mean.numel()), torch.randn(covariance.shape)
    value, oracle = (
        (linear * mean.flatten()).sum() + (quadratic * covariance).sum()
        for mean, covariance in ((found.mean, found.covariance), (mean, covariance))
    )
    subject.assert_gradients_close(value, q, oracle, exact, others)
