"""What the tests of the contract work with: a distribution and its oracles."""

import copy
import itertools
from dataclasses import dataclass

import pyro.distributions as dist
import pytest
import torch

from pyro_structvi.distributions import AugmentedMatrixNormal, WeightDistribution
from pyro_structvi.distributions.inducing.augmented import AugmentedNormal
from tests import dense_oracles as dense
from tests.distributions.cases import CASES, Case
from tests.statistics import assert_mean

FLOAT64, FLOAT32 = torch.float64, torch.float32
BATCH_SHAPES = [(), (3,), (2, 3)]


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

    def assert_gradients_close(self, value, q, oracle, exact):
        """Compare the gradients of two scalars with respect to all arguments."""
        for actual, expected in zip(gradients(value, q), gradients(oracle, exact), strict=True):
            self.assert_close(actual, expected)


def named_arguments(q):
    """Return the tensors that a distribution was made of, by name."""
    named = {name: getattr(q, name) for name in q._parameters}
    if isinstance(q, AugmentedNormal):
        inner = named_arguments(q.inducing)
        named |= q.joint.arguments | {f"inducing_{name}": value for name, value in inner.items()}
    return named


def rebuilt(q, named):
    """Return a copy of a distribution that was made of other tensors."""
    new = copy.copy(q)
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
    for name in q._parameters:
        setattr(new, name, named[name])
    return new


def with_arguments(q, change):
    """Return a copy of a distribution whose arguments are changed, and leaves."""
    changed = {name: change(value) for name, value in named_arguments(q).items()}
    return rebuilt(q, {name: value.requires_grad_() for name, value in changed.items()})


def arguments(q):
    return list(named_arguments(q).values())


def gradients(value, q):
    """Return the gradient with respect to every argument; every one must enter the value.

    Of a triangular argument only the triangle counts: oracles and distributions may or may not look
    at the other entries.
    """
    found = torch.autograd.grad(value.sum(), arguments(q))
    return [
        gradient.tril() if "scale_tril" in name else gradient
        for name, gradient in zip(named_arguments(q), found, strict=True)
    ]


def name_of(value):
    return "x".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def settings():
    for case, batch_shape, dtype in itertools.product(CASES, BATCH_SHAPES, [FLOAT64, FLOAT32]):
        for event_shape in case.event_shapes:
            name = f"{case.name}, batch {name_of(batch_shape)}, {name_of(event_shape)}, {dtype}"
            yield pytest.param((case, batch_shape, event_shape, dtype), id=name)


def uniform_prior(shape, event_dim, dtype):
    return dist.Normal(torch.tensor(0.3, dtype=dtype), 0.7).expand(shape).to_event(event_dim)


def image_oracle(subject, exact, x):
    """Return the dense mean and covariance of ``W x``."""
    x = x.detach().double()
    covariance = dense.image_covariance(x, subject.case.covariance(exact), subject.out)
    return dense.image_mean(x, subject.case.mean(exact), subject.event_dim), covariance


def independent_copies(q):
    """Return 2000 weights that share no argument, so that each draw has gradients of its own."""
    count = 2000 // q.batch_shape.numel()
    expanded = q.expand((count, *q.batch_shape))
    return with_arguments(expanded, lambda value: value.detach().clone())


def assert_gradients_of_draws(subject, draws, copies, moments):
    """Assert that gradients of ``E[a'w + w'Aw / 2]`` by draws are unbiased."""
    mean, covariance = moments(exact := subject.exact())
    linear, root = torch.randn(mean.shape[-1]), torch.randn(2 * (mean.shape[-1],))
    quadratic = root @ root.mT / mean.shape[-1]
    w = draws.reshape(-1, *mean.shape).double()
    value = w @ linear + ((w @ quadratic) * w).sum(-1) / 2
    oracle = dense.expected_quadratic(mean, covariance, linear, quadratic)
    expected = gradients(oracle, exact)
    for sampled, gradient in zip(gradients(value, copies), expected, strict=True):
        assert_mean(sampled, gradient)
