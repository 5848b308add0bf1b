"""Required members of a class, and what a class gets that defines the required members only."""

import pytest
import torch

from pyro_structvi.distributions import RowwiseNormal, WeightDistribution
from pyro_structvi.maps import DenseMap
from pyro_structvi.testing import check_distribution, random_weight
from pyro_structvi.weights.weight_distribution import GaussianWeight, IndependentWeight
from tests.distributions.cases import make_mean_field
from tests.unit_noise import assert_close

REQUIRED = {
    WeightDistribution: "covariance_matrix rsample variance",
    GaussianWeight: "log_det_covariance",
    IndependentWeight: "stddev",
}


@pytest.mark.parametrize("base", REQUIRED)
def test_a_class_without_a_required_member_has_no_instances(base):
    names = REQUIRED[base].split()
    for missing in names:
        members = {name: property(lambda q: q.loc) for name in names if name != missing}
        with pytest.raises(
            TypeError, match=f"^Can't instantiate abstract class Defined.*{missing}"
        ):
            type("Defined", (base,), members)({"loc": torch.zeros(2)}, 1)


def test_a_class_without_outputs_draws_its_weights():
    """As the moments of its layers use the dense covariance, and only ``image`` is an error."""

    class Drawn(RowwiseNormal):
        variance = GaussianWeight.variance
        output_variance, image_under = (
            GaussianWeight.output_variance,
            WeightDistribution.image_under,
        )

        def ways_to_apply(self, linear_map, x):
            return ("weight",)

    q = random_weight(Drawn)((), (4, 3), torch.float64)
    check_distribution(q)
    x, loc = torch.randn(5, 3), torch.zeros(5, 4)
    expected = RowwiseNormal(q.loc, q.scale_tril).image(x).variance
    assert_close(q.image_variance(DenseMap(), x, loc), expected)
    with pytest.raises(NotImplementedError, match=r"^Drawn has no distribution of outputs"):
        q.image(x)


def test_errors_name_what_an_author_leaves_out():
    size = property(lambda q: q.loc.sum(-1))
    normal = type("Mine", (GaussianWeight,), {"log_det_covariance": size, "arg_constraints": {}})
    with pytest.raises(ValueError, match=r"^`event_dim` must be .* but Mine .* `Argument`"):
        normal({"loc": torch.zeros(2)})
    q = normal({"loc": torch.zeros(2)}, 1)
    q.arg_constraints = {"loc": None}
    for name, call in (("scale_noise", q.rsample), ("whiten", lambda: q.log_prob(q.loc))):
        with pytest.raises(NotImplementedError, match=f"^Mine has no `{name}`. Define it"):
            call()


def test_a_matrix_has_a_row_for_each_output():
    q = make_mean_field((), (2, 2, 3), torch.float64)
    weight = torch.arange(24.0).reshape(2, 2, 2, 3)
    matrix = q.as_matrix(weight)
    assert matrix[1, 0].tolist() == [12.0, 13.0, 14.0, 15.0, 16.0, 17.0]
    assert torch.equal(q.as_weight(matrix), weight)
    vector = make_mean_field((), (4,), torch.float64)
    assert vector.as_matrix(torch.zeros(5, 4)).shape == (5, 4, 1)
