"""The laws that every distribution over a weight obeys; structures are listed in ``cases.py``.

Oracles are dense and in float64, from the same numbers. Where a law is about draws, the test is
statistical, with a fixed seed and a false-alarm rate of 1e-6.
"""

import copy
import itertools
import pickle
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_structvi.distributions import MeanFieldNormal, WeightDistribution
from tests import dense_oracles as dense
from tests.distributions.cases import CASES, MATRIX, Case, positive
from tests.statistics import assert_mean, assert_moments

FLOAT64, FLOAT32 = torch.float64, torch.float32
BATCH_SHAPES = [(), (3,), (2, 3)]


@dataclass(frozen=True)
class Subject:
    """A distribution under test, with what a test needs to know of it."""

    case: Case
    q: WeightDistribution

    @property
    def dtype(self):
        return self.q.loc.dtype

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
        """Compare with the tolerance of the dtype; ``expected`` is in float64."""
        rtol, atol = (1e-9, 1e-10) if self.dtype == FLOAT64 else (2e-4, 2e-4)
        torch.testing.assert_close(
            actual.double(), expected, rtol=rtol, atol=atol, check_stride=False
        )

    def assert_gradients_close(self, value, q, oracle, exact):
        """Compare the gradients of two scalars with respect to all arguments."""
        for actual, expected in zip(gradients(value, q), gradients(oracle, exact), strict=True):
            self.assert_close(actual, expected)


def with_arguments(q, change):
    """Return a copy of a distribution whose arguments are changed, and leaves."""
    new = copy.copy(q)
    for name in q._parameters:
        setattr(new, name, change(getattr(q, name)).requires_grad_())
    return new


def arguments(q):
    return [getattr(q, name) for name in q._parameters]


def gradients(value, q):
    """Return the gradient with respect to every argument; every one must enter the value."""
    return torch.autograd.grad(value.sum(), arguments(q))


def name_of(value):
    return "x".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def settings():
    for case, batch_shape, dtype in itertools.product(CASES, BATCH_SHAPES, [FLOAT64, FLOAT32]):
        for event_shape in case.event_shapes:
            name = f"{case.name}, batch {name_of(batch_shape)}, {name_of(event_shape)}, {dtype}"
            yield pytest.param((case, batch_shape, event_shape, dtype), id=name)


@pytest.fixture(params=settings())
def subject(request):
    case, batch_shape, event_shape, dtype = request.param
    return Subject(case, case.make(batch_shape, event_shape, dtype))


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def plain_subject(request):
    """One weight matrix for each structure, for what does not depend on shapes."""
    return Subject(request.param, request.param.make((), MATRIX, FLOAT64))


# ---- moments -------------------------------------------------------------------------------------


def test_shapes(subject):
    q = subject.q
    shape, length = q.batch_shape + q.event_shape, q.event_shape.numel()
    assert q.mean.shape == q.variance.shape == q.stddev.shape == shape
    assert q.covariance_matrix.shape == (*q.batch_shape, length, length)
    assert q.variance_sum.shape == q.log_det_covariance.shape == q.batch_shape


def test_moments_are_those_of_the_dense_covariance(subject):
    q, exact = subject.q, subject.exact()
    covariance = subject.case.covariance(exact)
    variance = covariance.diagonal(dim1=-2, dim2=-1).reshape(q.variance.shape)
    subject.assert_close(q.mean, exact.loc)
    subject.assert_close(q.covariance_matrix, covariance)
    subject.assert_close(q.variance, variance)
    subject.assert_close(q.stddev, variance.sqrt())
    subject.assert_close(q.variance_sum, variance.flatten(-subject.event_dim).sum(-1))
    subject.assert_close(q.log_det_covariance, torch.linalg.slogdet(covariance).logabsdet)


def test_draws_have_the_moments(subject):
    q, exact = subject.q, subject.exact()
    draws = q.rsample((20_000,))
    blocks = subject.case.covariance(exact).reshape(-1, *2 * (q.event_shape.numel(),))
    assert_moments(draws, exact.loc, torch.block_diag(*blocks))


@pytest.mark.parametrize("sample_shape", [(), (5,), (2, 5)], ids=name_of)
def test_draws_have_the_shape(subject, sample_shape):
    q = subject.q
    shape = (*sample_shape, *q.batch_shape, *q.event_shape)
    assert q.rsample(sample_shape).shape == q.sample(sample_shape).shape == shape


def test_draws_pass_gradients_on_and_samples_do_not(plain_subject):
    q = plain_subject.with_leaves()
    assert q.rsample().requires_grad
    assert not q.sample().requires_grad


# ---- density, entropy, KL ------------------------------------------------------------------------


@pytest.mark.parametrize("sample_shape", [(), (5,)], ids=name_of)
def test_log_prob_is_the_dense_one(subject, sample_shape):
    q, exact = subject.q, subject.exact()
    value = subject.randn(*sample_shape, *q.batch_shape, *q.event_shape)
    covariance = subject.case.covariance(exact)
    oracle = dense.log_prob(value.double(), exact.loc, covariance, subject.event_dim)
    assert q.log_prob(value).shape == (*sample_shape, *q.batch_shape)
    subject.assert_close(q.log_prob(value), oracle)


def test_gradients_of_log_prob_are_the_dense_ones(subject):
    q, exact = subject.with_leaves(), subject.exact()
    value = subject.randn(*q.batch_shape, *q.event_shape)
    covariance = subject.case.covariance(exact)
    oracle = dense.log_prob(value.double(), exact.loc, covariance, subject.event_dim)
    subject.assert_gradients_close(q.log_prob(value), q, oracle, exact)


def test_entropy_is_the_dense_one(subject):
    assert subject.q.entropy().shape == subject.q.batch_shape
    subject.assert_close(
        subject.q.entropy(), dense.entropy(subject.case.covariance(subject.exact()))
    )


def uniform_prior(shape, event_dim, dtype):
    return dist.Normal(torch.tensor(0.0, dtype=dtype), 0.7).expand(shape).to_event(event_dim)


def uniform_prior_for_each_weight_of_a_batch(shape, event_dim, dtype):
    batch = shape[: len(shape) - event_dim]
    scale = positive(*batch, *(1 for _ in range(event_dim)), dtype=dtype)
    return dist.Normal(torch.zeros_like(scale), scale).expand(shape).to_event(event_dim)


def prior_without_batch(shape, event_dim, dtype):
    scale = positive(*shape[len(shape) - event_dim :], dtype=dtype)
    return dist.Normal(torch.zeros_like(scale), scale).to_event(event_dim)


def prior_with_a_scale_for_each_output(shape, event_dim, dtype):
    scale = positive(*shape[len(shape) - event_dim :][:1], *(1,) * (event_dim - 1), dtype=dtype)
    return dist.Normal(torch.zeros_like(scale), scale).expand(shape).to_event(event_dim)


def prior_with_a_loc(shape, event_dim, dtype):
    loc, scale = torch.randn(shape, dtype=dtype), positive(*shape, dtype=dtype)
    return dist.Normal(loc, scale).to_event(event_dim)


def plain_normal(shape, event_dim, dtype):
    return dist.Normal(torch.randn(shape, dtype=dtype), positive(*shape, dtype=dtype))


def torch_normal(shape, event_dim, dtype):
    base = torch.distributions.Normal(
        torch.randn(shape, dtype=dtype), positive(*shape, dtype=dtype)
    )
    return torch.distributions.Independent(base, event_dim)


def mean_field_prior(shape, event_dim, dtype):
    return MeanFieldNormal(
        torch.randn(shape, dtype=dtype), positive(*shape, dtype=dtype), event_dim
    )


PRIORS = [
    uniform_prior,
    uniform_prior_for_each_weight_of_a_batch,
    prior_without_batch,
    prior_with_a_scale_for_each_output,
    prior_with_a_loc,
    plain_normal,
    torch_normal,
    mean_field_prior,
]


@pytest.mark.parametrize("make_prior", PRIORS, ids=lambda make: make.__name__)
def test_kl_and_its_gradients_are_the_dense_ones(subject, make_prior):
    q, exact = subject.with_leaves(), subject.exact()
    prior = make_prior(q.batch_shape + q.event_shape, subject.event_dim, subject.dtype)
    kl = kl_divergence(q, prior)
    oracle = dense.kl_to_independent_normals(
        exact.loc,
        subject.case.covariance(exact),
        prior.mean.double(),
        prior.stddev.double(),
        subject.event_dim,
    )
    assert kl.shape == q.batch_shape
    subject.assert_close(kl, oracle)
    subject.assert_gradients_close(kl, q, oracle, exact)


def test_kl_to_normals_of_the_same_moments_is_what_correlations_are_worth(subject):
    q, exact = subject.q, subject.exact()
    covariance = subject.case.covariance(exact)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    oracle = (variance.log().sum(-1) - torch.linalg.slogdet(covariance).logabsdet) / 2
    subject.assert_close(
        kl_divergence(q, dist.Normal(q.mean, q.stddev).to_event(subject.event_dim)), oracle
    )


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "to_event"])
def test_kl_without_closed_form_is_refused(plain_subject, wrap):
    prior = dist.Laplace(torch.zeros(MATRIX), 1.0)
    with pytest.raises(NotImplementedError, match="No KL"):
        kl_divergence(plain_subject.q, prior.to_event(2) if wrap else prior)


# ---- the image under a linear map ----------------------------------------------------------------

LEADING = {
    "one x": lambda batch: (),
    "a batch of x": lambda batch: (7, *(1 for _ in batch)),
    "an x for each weight": lambda batch: (2, 7, *batch),
}


@pytest.fixture(params=LEADING.values(), ids=LEADING.keys())
def x(subject, request):
    return subject.randn(*request.param(subject.q.batch_shape), subject.size)


def image_oracle(subject, exact, x):
    """Return the dense mean and covariance of ``W x``."""
    x = x.detach().double()
    covariance = dense.image_covariance(x, subject.case.covariance(exact), subject.out)
    return dense.image_mean(x, exact.loc, subject.event_dim), covariance


def test_image_has_the_dense_moments(subject, x):
    mean, covariance = image_oracle(subject, subject.exact(), x)
    image = subject.q.image(x)
    assert image.batch_shape + image.event_shape == mean.shape
    assert image.event_shape == (subject.out,)
    subject.assert_close(image.mean, mean)
    subject.assert_close(image.variance, covariance.diagonal(dim1=-2, dim2=-1))
    subject.assert_close(image.covariance_matrix, covariance)


def test_image_has_the_dense_density(subject, x):
    q, exact = subject.with_leaves(), subject.exact()
    mean, covariance = image_oracle(subject, exact, x)
    y = subject.randn(*mean.shape)
    density = q.image(x).log_prob(y)
    oracle = dense.log_prob(y.double(), mean, covariance, 1)
    subject.assert_close(density, oracle)
    subject.assert_gradients_close(density, q, oracle, exact)


def test_draws_of_the_image_have_its_moments_and_are_independent_over_the_batch(subject):
    x = subject.randn(2, *(1 for _ in subject.q.batch_shape), subject.size)
    mean, covariance = image_oracle(subject, subject.exact(), x)
    draws = subject.q.image(x).rsample((20_000,))
    blocks = covariance.reshape(-1, subject.out, subject.out)
    assert_moments(draws, mean, torch.block_diag(*blocks))


@pytest.mark.parametrize("sample_shape", [(), (5,)], ids=name_of)
def test_draws_of_the_image_have_the_shape(subject, sample_shape):
    batch = subject.q.batch_shape
    image = subject.q.image(subject.randn(7, *(1 for _ in batch), subject.size))
    assert image.rsample(sample_shape).shape == (*sample_shape, 7, *batch, subject.out)


def test_an_input_of_zeros_has_finite_gradients(subject):
    q = subject.with_leaves()
    batch = subject.q.batch_shape
    x = subject.randn(2, *(1 for _ in batch), subject.size)
    x[0] = 0
    x.requires_grad_()
    draw = q.image(x).rsample()
    assert (draw[0].abs() < 1e-15).all()
    for gradient in torch.autograd.grad(draw.sum(), [*arguments(q), x]):
        assert torch.isfinite(gradient).all()


# ---- gradients of draws --------------------------------------------------------------------------


def independent_copies(q, count):
    """Return ``count`` copies as one batch, so that each has gradients of its own."""
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


def test_gradients_of_draws_are_unbiased(subject):
    copies = independent_copies(subject.q, 2000)
    assert_gradients_of_draws(
        subject,
        copies.rsample(),
        copies,
        lambda exact: (exact.loc.flatten(-subject.event_dim), subject.case.covariance(exact)),
    )


def test_gradients_of_draws_of_the_image_are_unbiased(subject):
    copies = independent_copies(subject.q, 2000)
    x = subject.randn(subject.size)
    assert_gradients_of_draws(
        subject,
        copies.image(x).rsample(),
        copies,
        lambda exact: image_oracle(subject, exact, x),
    )


# ---- batches -------------------------------------------------------------------------------------


def test_expand_equals_repeating_and_shares_memory(subject):
    q = subject.q
    expanded = q.expand((5, *q.batch_shape))
    assert type(expanded) is type(q)
    assert (expanded.batch_shape, expanded.event_shape) == ((5, *q.batch_shape), q.event_shape)
    for before, after in zip(arguments(q), arguments(expanded), strict=True):
        assert torch.equal(after, before.expand(5, *before.shape))
        assert after.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    covariance = subject.case.covariance(subject.exact())
    subject.assert_close(expanded.covariance_matrix, covariance.expand(5, *covariance.shape))


def test_expand_commutes_with_all_that_is_computed(subject):
    q = subject.q
    batch = (5, *q.batch_shape)
    expanded = q.expand(batch)
    prior = uniform_prior(batch + q.event_shape, subject.event_dim, subject.dtype)
    value = subject.randn(*batch, *q.event_shape)
    x = subject.randn(7, *(1 for _ in batch), subject.size)
    own_prior = uniform_prior(q.loc.shape, subject.event_dim, subject.dtype)
    kl, image = kl_divergence(q, own_prior), q.image(x)
    subject.assert_close(expanded.log_prob(value), q.log_prob(value).double())
    subject.assert_close(expanded.entropy(), q.entropy().double().expand(batch))
    subject.assert_close(kl_divergence(expanded, prior), kl.double().expand(batch))
    shape = (7, *batch, subject.out)
    subject.assert_close(expanded.image(x).mean, image.mean.double().expand(shape))
    subject.assert_close(expanded.image(x).variance, image.variance.double().expand(shape))


def test_expand_enlarges_batch_dimensions_of_size_one(plain_subject):
    q = plain_subject.q
    expanded = q.expand((2, 1)).expand((2, 3))
    assert expanded.rsample().shape == (2, 3, *MATRIX)
    plain_subject.assert_close(expanded.variance, q.variance.expand(2, 3, *MATRIX))


def test_draws_of_an_expanded_distribution_are_independent(plain_subject):
    first, second = plain_subject.q.expand((2,)).rsample()
    assert (first != second).all()


# ---- as an object --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))], ids=["copy", "pickle"]
)
def test_copies_are_equal_and_apart(subject, duplicate):
    q, twin = subject.q, duplicate(subject.q)
    value = q.rsample()
    assert (twin.batch_shape, twin.event_shape) == (q.batch_shape, q.event_shape)
    assert torch.equal(twin.log_prob(value), q.log_prob(value))
    twin.loc.add_(1.0)
    assert torch.equal(twin.mean, q.mean + 1)


def everything(q, prior, x):
    """Return all that a distribution computes."""
    image, value = q.image(x), q.rsample()
    return [
        *(q.mean, q.variance, q.stddev, q.covariance_matrix, q.variance_sum, q.entropy()),
        *(value, q.log_prob(value), kl_divergence(q, prior)),
        *(image.mean, image.variance, image.covariance_matrix, image.rsample()),
    ]


def test_everything_keeps_the_dtype(subject):
    q = subject.q
    prior = uniform_prior(q.loc.shape, subject.event_dim, subject.dtype)
    x = subject.randn(7, *(1 for _ in q.batch_shape), subject.size)
    assert {result.dtype for result in everything(q, prior, x)} == {subject.dtype}


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_everything_stays_on_its_device(plain_subject, device):
    """The device ``meta`` has shapes and no numbers, and is there on every machine."""
    q = with_arguments(plain_subject.q, lambda value: value.detach().to(device))
    q._validate_args = False  # looks at numbers
    prior = dist.Normal(torch.zeros((), device=device), 1.0, validate_args=False).expand(MATRIX)
    results = everything(q, prior, torch.ones(7, plain_subject.size, device=device))
    assert {result.device.type for result in results} == {device}


def test_a_draw_at_a_sample_site_is_an_ordinary_tensor(subject):
    value = pyro.sample("weight", subject.q)
    assert type(value) is torch.Tensor
    assert value.shape == subject.q.batch_shape + subject.q.event_shape


def test_a_plate_expands_it(plain_subject):
    with pyro.plate("members", 3):
        value = pyro.sample("weight", plain_subject.q)
    assert value.shape == (3, *MATRIX)
    assert (value[0] != value[1]).all()


# ---- what is refused -----------------------------------------------------------------------------


def test_log_prob_refuses_a_value_of_another_shape(subject):
    with pytest.raises(ValueError, match="event_shape"):
        subject.q.log_prob(subject.randn(*subject.q.batch_shape, *subject.q.event_shape, 2))


def test_log_prob_refuses_nan(plain_subject):
    with pytest.raises(ValueError, match="within the support"):
        plain_subject.q.log_prob(torch.full(MATRIX, float("nan")))


def test_image_refuses_an_input_of_another_size(subject):
    size = subject.size
    message = rf"`x` must have shape \(\*batch, in\) with in = {size}, but got \(7, {size + 1}\)"
    with pytest.raises(ValueError, match=message):
        subject.q.image(subject.randn(7, size + 1))


def test_image_refuses_a_single_number(plain_subject):
    with pytest.raises(ValueError, match=r"`x` must have shape \(\*batch, in\).*but got \(\)"):
        plain_subject.q.image(torch.tensor(1.0))


def test_image_refuses_another_dtype(subject):
    other = FLOAT32 if subject.dtype == FLOAT64 else FLOAT64
    message = rf"`x` must have the dtype of `loc`, {subject.dtype}, but got {other}.*`x.to\(loc\)`"
    with pytest.raises(ValueError, match=message):
        subject.q.image(subject.randn(subject.size).to(other))
