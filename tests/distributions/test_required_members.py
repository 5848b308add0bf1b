"""The contract at class definition, and what a class gets that defines the required members only."""

import pytest
import torch
from torch.distributions import constraints

from pyro_structvi.distributions import WeightDistribution
from pyro_structvi.maps import BiasColumnMap, ConvolutionMap, DenseMap
from pyro_structvi.weights.outputs import NormalOutputs
from pyro_structvi.weights.weight_distribution import GaussianWeight, IndependentWeight
from tests import dense_oracles as dense
from tests.distributions.cases import make_mean_field
from tests.unit_noise import assert_draws

ARGUMENTS = {"arg_constraints": {"loc": constraints.real}}


def member(*_):
    """Stand for a member; it is never called."""


REQUIRED = {
    WeightDistribution: "arg_constraints variance covariance_matrix rsample image_under",
    GaussianWeight: "arg_constraints scale_noise whiten log_det_covariance output_variance",
    IndependentWeight: "arg_constraints stddev output_variance",
}
MEMBERS = [(base, name) for base, names in REQUIRED.items() for name in names.split()]


def define(base, names):
    """Define a subclass with stand-ins for some members."""
    members = {name: ARGUMENTS.get(name, member) for name in names}
    return type("Defined", (base,), members)


@pytest.mark.parametrize(("base", "missing"), MEMBERS)
def test_a_missing_member_is_named_at_the_definition(base, missing):
    names = [name for name in REQUIRED[base].split() if name != missing]
    with pytest.raises(
        TypeError, match=rf"^Defined must define `{missing}`; see `{base.__name__}`"
    ):
        define(base, names)


@pytest.mark.parametrize("base", REQUIRED)
def test_all_missing_members_are_named_in_order(base):
    names = ", ".join(f"`{name}`" for name in REQUIRED[base].split())
    with pytest.raises(TypeError, match=f"^Defined must define {names}; see `{base.__name__}`"):
        define(base, [])
    define(base, REQUIRED[base].split())


@pytest.mark.parametrize(
    ("member_name", "users"),
    [
        ("scale_noise", ["rsample", "covariance_matrix"]),
        ("whiten", ["mahalanobis"]),
        ("output_variance", ["image_around"]),
        ("output_variance", ["image_under"]),
    ],
)
def test_a_class_that_overrides_all_users_of_a_member_does_not_need_it(member_name, users):
    names = [name for name in REQUIRED[GaussianWeight].split() if name != member_name]
    define(GaussianWeight, names + users)
    for user in users:
        rest = [name for name in users if name != user]
        with pytest.raises(TypeError, match=f"`{member_name}`"):
            define(GaussianWeight, names + rest)


def test_members_of_a_base_between_count():
    base = define(GaussianWeight, REQUIRED[GaussianWeight].split())
    assert issubclass(define(base, []), GaussianWeight)


def test_an_abstract_class_may_lack_members_and_its_subclasses_may_not():
    class Abstract(GaussianWeight, abstract=True):
        pass

    with pytest.raises(TypeError, match="`whiten`"):
        define(Abstract, [])


# ---- what is provided ----------------------------------------------------------------------------


class Shifted(GaussianWeight):
    """Elements ``scale * (e_d + e_0)`` with one further number ``e_0`` that all of them share."""

    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}  # noqa: RUF012

    def __init__(self, loc, scale):
        super().__init__({"loc": loc, "scale": scale}, 2, None)

    @property
    def noise_shape(self):
        return torch.Size([self.event_shape.numel() + 1])

    def scale_noise(self, noise):
        own = noise[..., 1:].reshape(*noise.shape[:-1], *self.event_shape)
        return self.scale * (own + noise[..., :1, None])

    def mahalanobis(self, difference):
        flat = (difference / self.scale).flatten(-2)
        size = self.event_shape.numel()
        return flat.square().sum(-1) - flat.sum(-1).square() / (size + 1)

    @property
    def log_det_covariance(self):
        size = self.event_shape.numel()
        return (2 * size * self.scale.log()).squeeze((-2, -1)) + torch.tensor(size + 1.0).log()

    def image_around(self, mean, linear_map, x, bias_variance):
        scale = self.scale.squeeze((-2, -1)).unsqueeze(-1)
        variance = (scale * linear_map(x, torch.ones(self.event_shape))).square()
        variance = variance + scale.square() * linear_map(x.square(), torch.ones(self.event_shape))
        return NormalOutputs(linear_map, mean, variance + bias_variance)


@pytest.fixture
def shifted():
    return Shifted(torch.randn(2, 4, 3), torch.rand(2, 1, 1) + 0.5)


def test_draws_and_moments_follow_from_the_scaling_of_noise(shifted):
    identity, ones = torch.eye(12), torch.ones(12, 12)
    covariance = shifted.scale.square() * (identity + ones)
    torch.testing.assert_close(shifted.covariance_matrix, covariance)
    torch.testing.assert_close(shifted.variance, 2 * shifted.scale.square().expand(2, 4, 3))
    torch.testing.assert_close(shifted.variance_sum, 24 * shifted.scale.square().flatten())
    assert_draws(shifted.rsample, shifted.loc, covariance)


def test_density_and_entropy_follow_from_distance_and_determinant(shifted):
    covariance, value = shifted.covariance_matrix, torch.randn(5, 2, 4, 3)
    torch.testing.assert_close(
        shifted.log_prob(value), dense.log_prob(value, shifted.loc, covariance, 2)
    )
    torch.testing.assert_close(shifted.entropy(), dense.entropy(covariance))


def test_a_bias_adds_its_mean_and_hands_over_its_variance(shifted):
    x, bias = torch.randn(7, 2, 3), make_mean_field((), (4,), torch.float64)
    outputs = shifted.image_under(DenseMap(), x, bias)
    assert outputs.batch_shape == (7, 2)  # weights of a batch have no positions
    of_weight = dense.image_covariance(x, shifted.covariance_matrix, 4)
    torch.testing.assert_close(outputs.mean, dense.image_mean(x, shifted.loc, 2) + bias.loc)
    torch.testing.assert_close(
        outputs.variance, of_weight.diagonal(dim1=-2, dim2=-1) + bias.variance
    )


def test_it_expands_and_is_applied_as_outputs_or_drawn(shifted):
    expanded = shifted.expand((3, 2))
    torch.testing.assert_close(expanded.covariance_matrix[1], shifted.covariance_matrix)
    assert shifted.ways_to_apply(DenseMap(), torch.randn(5, 3)) == ("outputs", "weight")
    assert shifted.rows(torch.tensor([[0]])) is None


# ---- public helpers ------------------------------------------------------------------------------


@pytest.mark.parametrize("linear_map", [DenseMap(), DenseMap(positions=False)])
def test_only_a_batch_of_weights_takes_positions_from_a_map(linear_map):
    alone, batch = (make_mean_field(shape, (4, 3), torch.float64) for shape in ((), (2,)))
    assert alone.map_for_batch(linear_map) == linear_map
    assert batch.map_for_batch(linear_map) == DenseMap(positions=False)
    joined = BiasColumnMap(linear_map)
    assert batch.map_for_batch(joined) == BiasColumnMap(DenseMap(positions=False))


def test_a_convolution_keeps_its_positions():
    convolution = ConvolutionMap(torch.conv1d, (3, 2))
    assert make_mean_field((2,), (4, 3, 2), torch.float64).map_for_batch(convolution) == convolution


def test_a_matrix_has_a_row_for_each_output():
    q = make_mean_field((), (2, 2, 3), torch.float64)
    weight = torch.arange(24.0).reshape(2, 2, 2, 3)
    matrix = q.as_matrix(weight)
    assert matrix[1, 0].tolist() == [12.0, 13.0, 14.0, 15.0, 16.0, 17.0]
    assert torch.equal(q.as_weight(matrix), weight)
    vector = make_mean_field((), (4,), torch.float64)
    assert vector.as_matrix(torch.zeros(5, 4)).shape == (5, 4, 1)
