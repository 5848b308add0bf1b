"""Linear maps of random inputs by random weights: exact, by enumerating two-point draws of both."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.distributions import FullNormal, MatrixNormal, MeanFieldNormal, RowwiseNormal
from pyro_structvi.moments import RandomTensor, Settings
from pyro_structvi.moments import linear as linear_module
from pyro_structvi.moments.integration import likelihood_at_nodes
from pyro_structvi.moments.linear import RandomWeight
from tests.distributions.cases import CASES
from tests.moments.signs import assert_exact, part_of, random_input

FLOAT64 = torch.float64
# Others of their classes differ in rank, in the form of a scale, or in the law of inducing weights.
ALIKE = {
    "mean field by logarithms",
    "1-tied",
    "3-tied",
    "low rank 1, isotropic",
    "low rank 3, isotropic",
    "given inducing weights",
    "inducing weights, diagonal",
    "inducing weights, matrix normal, a bias",
}
ONE_OF_CLASS = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=pytest.mark.slow if case.name in ALIKE else ())
        for case in CASES
    ],
)


def dense_part(case, q):
    """Return mean and covariance of a weight by the definition of its structure."""
    return case.mean(q).detach(), case.covariance(q).detach()


def independent(*shape):
    q = MeanFieldNormal(torch.randn(shape), torch.rand(shape) + 0.2)
    return q, (q.loc, torch.diag(q.scale.flatten().square()))


def joint_parts(q, shape, full=False):
    """Return the weight and the bias of a joint distribution."""
    weight = RandomWeight(q, Settings(full), "weight", torch.Size(shape))
    return weight, RandomWeight(q, Settings(full), "bias", torch.Size(shape[:1]))


def assert_examples_exact(found, function, x, *parts):
    """Compare the outputs of each example; ``function`` takes a batch of one."""
    for index in range(len(x)):
        one = slice(index, index + 1)
        covariance = None if found.covariance is None else found.covariance[one]
        example = RandomTensor(found.loc[one], found.variance[one], found.settings, covariance)
        loc, own = part_of(x, index)
        assert_exact(example, function, (loc.unsqueeze(0), own), *parts)


@ONE_OF_CLASS
def test_a_dense_layer_with_a_known_random_or_joint_bias(case):
    for full in (False, True):
        settings, known_bias = Settings(full), torch.randn(2)
        q, x = case.make((), (2, 3), FLOAT64), random_input(2, 3, full=full)
        found = F.linear(x, RandomWeight(q, settings), known_bias)
        assert (found.covariance is not None) == full
        part = dense_part(case, q)
        assert_examples_exact(found, lambda x, w, b=known_bias: F.linear(x, w, b), x, part)

        x, known = random_input(2, 2, full=full), torch.randn(1, 2)
        found = F.linear(x, *joint_parts(q, (2, 2), full))
        assert_examples_exact(found, lambda x, w: F.linear(x, w[:, :-1], w[:, -1]), x, part)
        found = F.linear(known, *joint_parts(q, (2, 2), full=True))
        assert_exact(found, lambda w, x=known: F.linear(x, w[:, :-1], w[:, -1]), part)

        q, (bias, bias_part) = case.make((), (2, 2), FLOAT64), independent(2)
        found = F.linear(x[:1], RandomWeight(q, settings), RandomWeight(bias, settings))
        assert_examples_exact(found, F.linear, x[:1], dense_part(case, q), bias_part)


@pytest.mark.parametrize("full", [False, True], ids=["diagonal", "full"])
def test_a_known_layer_of_a_random_input_or_with_a_random_bias(full):
    x, weight, known_bias = random_input(2, 3, full=full), torch.randn(2, 3), torch.randn(2)
    for bias in (None, known_bias):
        found = F.linear(x, weight, bias)
        assert_examples_exact(found, lambda x, b=bias: F.linear(x, weight, b), x)
    (bias, bias_part), x = independent(2), torch.randn(1, 3)
    found = F.linear(x, weight, RandomWeight(bias, Settings(full)))
    assert_exact(found, lambda b: F.linear(x, weight, b), bias_part)


# ---- weights in another order of their dimensions ------------------------------------------------

ARRANGED = (
    (lambda x, w: x @ w, (3, 2)),
    (lambda x, w: torch.addmm(torch.ones(2), x, w), (3, 2)),
    (lambda x, w: torch.einsum("bi,io->bo", x, w), (3, 2)),
    (lambda x, w: x @ w.T, (2, 3)),
    (lambda x, w: F.linear(x, w.flip(0)), (2, 3)),
    (lambda x, w: F.linear(x, w[:, [2, 0, 1]]), (2, 3)),
    (lambda x, w: x @ (w.unflatten(0, (2, 2))[1] / 2).T * 3, (4, 3)),
    (lambda x, w: F.linear(x, -w * torch.arange(3.0)), (2, 3)),
)


@ONE_OF_CLASS
def test_calls_that_take_a_weight_in_another_order(case):
    """Every call for an independent and a correlated weight, and some for each structure."""
    for function, shape in ARRANGED if case.name in ("2-tied", "full") else ARRANGED[::6]:
        for full in (False, True):
            q, x = case.make((), shape, FLOAT64), random_input(1, 3, full=full)
            found = function(x, RandomWeight(q, Settings(full)))
            loc, covariance = dense_part(case, q)
            assert (found.covariance is not None) == full
            assert_examples_exact(found, function, x, (loc, covariance))
    q, x = case.make((), (2, 3), FLOAT64), random_input(1, 2)
    weight, _ = joint_parts(q, (2, 2))
    assert_examples_exact(x @ weight, lambda x, w: x @ w[:, :-1], x, dense_part(case, q))


VECTORS = (
    torch.matmul,
    torch.mv,
    lambda x, v: x @ (2 * v),
    lambda x, v: torch.einsum("bi,i->b", x, v),
    lambda x, v: (x * v).sum(-1),
    lambda x, v: F.linear(x, v[None], torch.ones(1)).squeeze(-1),
)


@pytest.mark.parametrize("number", range(len(VECTORS)))
def test_a_product_with_a_vector_is_a_dense_layer_with_one_output(number):
    """Where the factors are multiplied first, their products count as independent."""
    function, root = VECTORS[number], torch.randn(3, 3).tril()
    q = FullNormal(torch.randn(3), root, validate_args=False)
    part, weight = (q.loc, root @ root.mT), RandomWeight(q, Settings(True))
    x, known, h = torch.randn(2, 3), torch.randn(3), random_input(2, 3, full=True)
    calls = (
        ((x, weight), lambda v: function(x, v), [part]),
        ((h, known), lambda h: function(h, known), [part_of(h)]),
        ((h, weight), function, [part_of(h), part]),
    )
    for given, exact, parts in calls[: 2 if number == 4 else 3]:
        found = function(*given)
        assert_exact(RandomTensor(found.loc, found.variance, Settings()), exact, *parts)


def test_a_joint_bias_or_a_weight_that_is_no_longer_its_partner_is_refused():
    q = MatrixNormal(torch.randn(2, 4), torch.rand(2, 2).tril(), torch.rand(4, 4).tril())
    weight, bias = joint_parts(q, (2, 3))
    for parts in ((2 * weight, bias), (weight, 2 * bias), (weight.flip(0), bias.flip(0))):
        with pytest.raises(NotImplementedError, match="after another function of one of them"):
            F.linear(torch.randn(1, 3), *parts)
    for full in (False, True):
        weight, bias = joint_parts(q, (2, 3), full=full)
        with pytest.raises(NotImplementedError, match="where the bias is added after the layer"):
            F.linear(torch.randn(1, 3), weight).add_(bias)
        with pytest.raises(NotImplementedError, match="where the bias is added after the layer"):
            bias + torch.einsum("bi,oi->bo", torch.randn(1, 3), weight)


def test_a_stack_of_weights_has_independent_elements():
    (q, part), x = independent(2, 2, 2), random_input(2, 1, 2)
    found = torch.bmm(x, RandomWeight(q, Settings()))
    assert_exact(found, torch.bmm, part_of(x), part)


def sums_of_scaled(a, h):
    return (a.unsqueeze(-1) * h).sum(1)


def sums_of_products(a, h):
    return (a * h).sum(-1)


STACKS = (
    (lambda a, h: torch.einsum("be,beo->bo", a, h), sums_of_scaled, (3, 2), (3, 2, 4)),
    (lambda a, h: torch.bmm(a.unsqueeze(1), h).squeeze(1), sums_of_scaled, (3, 2), (3, 2, 4)),
    (lambda a, h: torch.einsum("boi,bi->bo", h, a), sums_of_products, (2, 1, 2), (2, 2, 2)),
    (lambda a, h: torch.einsum("bei,bei->be", a, h), sums_of_products, (3, 2, 4), (3, 2, 4)),
    (lambda a, h: torch.einsum("bi,bi->b", a, h), sums_of_products, (3, 2), (3, 2)),
)


@pytest.mark.parametrize("full", [False, True], ids=["diagonal", "full"])
@pytest.mark.parametrize("number", range(len(STACKS)))
def test_a_product_of_an_example_and_its_own_weights_is_a_sum_of_products(number, full):
    """With the covariances of vectors, so that it is exact for these."""
    function, by_sums, *shapes = STACKS[number]
    a, h = (
        random_input(*shape, full=full)
        if len(shape) == 2
        else RandomTensor(torch.randn(shape), torch.rand(shape), Settings(full))
        for shape in shapes
    )
    for first in (a, torch.randn(shapes[0])):
        given = first.squeeze(1) if number == 2 else first
        found, expected = function(given, h), by_sums(first, h)
        torch.testing.assert_close(found.loc, expected.loc, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(found.variance, expected.variance, rtol=1e-13, atol=1e-13)
    if shapes == [(3, 2), (3, 2)]:
        plain = function(a, h)
        plain = RandomTensor(plain.loc, plain.variance, Settings())
        assert_exact(plain, function, part_of(a), part_of(h))


def test_a_large_weight_in_another_order_is_refused(monkeypatch):
    """Unless the structure survives it, or it is transposed twice."""
    monkeypatch.setattr(linear_module, "LARGEST", 5)
    q, x = MatrixNormal(torch.randn(2, 3), torch.eye(2), torch.eye(3)), torch.randn(1, 3)
    found, expected = (f(x, RandomWeight(q, Settings())) for f in (ARRANGED[3][0], F.linear))
    torch.testing.assert_close(found.variance, expected.variance)
    assert (random_input(1, 2) @ RandomWeight(q, Settings())).shape == (1, 3)
    message = r"MatrixNormal of 6 elements .* another function"
    with pytest.raises(NotImplementedError, match=message):
        F.linear(x, 2 * RandomWeight(q, Settings()))
    q = RowwiseNormal(torch.randn(3, 2), torch.eye(2).expand(3, 2, 2))
    message = "A RowwiseNormal of 6 elements meets a call that takes its dimensions in another"
    with pytest.raises(NotImplementedError, match=message):
        torch.einsum("bi,io->bo", random_input(1, 3), RandomWeight(q, Settings()))
    weight, bias = joint_parts(FullNormal(torch.randn(2, 3), torch.eye(6)), (2, 2))
    with pytest.raises(NotImplementedError, match="A weight and bias with a joint posterior meet"):
        torch.addmm(bias, random_input(1, 2), weight)
    weights = RandomWeight(FullNormal(torch.randn(2, 2, 2), torch.eye(8)), Settings())
    message = "A stack of weights that are correlated has no moments"
    with pytest.raises(NotImplementedError, match=message):
        torch.bmm(random_input(2, 1, 2), weights)


# ---- convolutions and look-ups -------------------------------------------------------------------

CONVOLUTIONS = (
    (F.conv1d, (2, 1, 2), {"padding": 1, "stride": 2}, (1, 1, 3)),
    (F.conv1d, (2, 1, 2), {"groups": 2}, (1, 2, 2)),
    (F.conv_transpose1d, (1, 2, 2), {"stride": 2}, (1, 1, 3)),
)


@ONE_OF_CLASS
def test_a_convolution_of_a_random_input(case):
    for function, shape, options, size in CONVOLUTIONS:
        q, x, (bias, bias_part) = case.make((), shape, FLOAT64), random_input(*size), independent(2)
        found = function(x, RandomWeight(q, Settings()), RandomWeight(bias, Settings()), **options)
        parts = part_of(x), dense_part(case, q), bias_part

        def exact(x, w, b, function=function, options=options):
            return function(x, w, b, **options)

        assert_exact(found, exact, *parts)
        if function is F.conv1d:
            q = case.make((), (2, 3), FLOAT64)
            found = function(x, *joint_parts(q, shape), **options)

            def joint(x, w, exact=exact, shape=shape):
                return exact(x, w[:, :-1].reshape(shape), w[:, -1])

            assert_exact(found, joint, part_of(x), dense_part(case, q))


def test_rows_that_are_looked_up():
    case, look_up = CASES[-1], partial(F.embedding, torch.tensor([[0, 3], [2, 2]]))
    q = case.make((), (4, 3), FLOAT64)
    assert_exact(look_up(RandomWeight(q, Settings())), look_up, dense_part(case, q))


SIZE = 5


# ---- the covariance between outputs --------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 7], ids=["few outputs", "more outputs than examples"])
def test_the_covariance_that_is_formed_on_demand_is_the_one_that_is_kept(size):
    """For a weight of independent elements, for which it is exact."""
    q = MeanFieldNormal(torch.randn(size, 3), torch.rand(size, 3) + 0.2)
    bias = FullNormal(torch.randn(size), torch.randn(size, size).tril(-1) + torch.eye(size))
    loc, variance = torch.randn(2, 3), torch.rand(2, 3)

    def outputs(settings):
        x = RandomTensor(loc, variance, settings)
        return F.linear(x, RandomWeight(q, settings), RandomWeight(bias, settings))

    formed, kept = outputs(Settings()).form_covariance(), outputs(Settings(True)).covariance
    torch.testing.assert_close(formed, kept)


def test_pairs_at_nodes_have_their_covariance():
    """Of a mean and the output for its noise."""
    covariance = torch.tensor([[[1.0, -0.5], [-0.5, 2.0]]])
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    output = RandomTensor(torch.tensor([[0.3, 4.0]]), variance, Settings(True), covariance)
    model = ps.Regressor(ps.bayesianize(nn.Linear(3, 2), 1.0), SIZE, noise="heteroscedastic")
    at = likelihood_at_nodes(model, output, {})
    base = at.likelihood.base_dist
    pair = torch.cat([base.loc, base.scale.expm1().log()], -1).squeeze(1) - output.loc
    found = pair.mT @ (at.weights.unsqueeze(-1) * pair)
    torch.testing.assert_close(found, covariance[0], rtol=1e-6, atol=1e-8)


def test_an_output_that_is_changed_in_place_loses_its_covariance_and_a_weight_is_refused():
    """Terms of a sum are independent, and have no covariance in common."""
    q = MatrixNormal(torch.randn(2, 3), torch.eye(2), torch.eye(3))
    found = F.linear(torch.randn(SIZE, 3), RandomWeight(q, Settings()))
    assert found.form_covariance is not None
    found += torch.randn(SIZE, 2)
    assert found.form_covariance is None
    with pytest.raises(NotImplementedError, match="changed in place has no moments"):
        RandomWeight(q, Settings()).mul_(2.0)


def test_more_logits_than_there_are_nodes_for_are_refused():
    output = RandomTensor(torch.zeros(1, 30_000), torch.ones(1, 30_000), Settings())
    model = ps.Classifier(ps.bayesianize(nn.Linear(3, 2), prior=1.0), SIZE)
    with pytest.raises(NotImplementedError, match="up to 21,201 logits"):
        likelihood_at_nodes(model, output, {})


def test_a_weight_in_two_orders():
    q = MatrixNormal(torch.randn(3, 3), torch.rand(3, 3).tril(), torch.rand(3, 3).tril())
    x, weight = random_input(2, 3), RandomWeight(q, Settings())
    for function in (F.linear, torch.matmul):
        found, expected = function(x, weight), function(x, RandomWeight(q, Settings()))
        torch.testing.assert_close(found.variance, expected.variance)


def test_views():
    """Expanded variances of a random bias; a view of the same shape is exported as no operation."""
    bias, _ = independent(2)
    found = F.conv1d(torch.randn(3, 1, 4), torch.randn(2, 1, 2), RandomWeight(bias, Settings()))
    expected = bias.variance.unsqueeze(-1).expand(3, 2, 3).flatten(1)
    torch.testing.assert_close(found.view(3, 6).variance, expected)
    x = random_input(2, 3, full=True)
    assert x.flatten(1) is x.view(2, 3) is x.reshape(2, -1) is x
    assert x.flip(1) is not x
