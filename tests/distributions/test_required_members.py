"""The contract at class definition, and what a class gets that defines the required members only."""

import pytest
import torch
from torch.distributions import constraints

from pyro_structvi.distributions import RowwiseNormal, WeightDistribution
from pyro_structvi.maps import DenseMap
from pyro_structvi.testing import check_distribution, random_weight
from pyro_structvi.weights.weight_distribution import GaussianWeight, IndependentWeight
from tests.distributions.cases import make_mean_field
from tests.unit_noise import assert_close

ARGUMENTS = {"arg_constraints": {"loc": constraints.real}}


def member(*_):
    """Stand for a member; it is never called."""


REQUIRED = {
    WeightDistribution: "arg_constraints variance covariance_matrix rsample image_under",
    GaussianWeight: "arg_constraints scale_noise whiten log_det_covariance output_variance",
    IndependentWeight: "arg_constraints stddev output_variance",
}


@pytest.mark.parametrize("base", REQUIRED)
def test_missing_members_are_named_at_the_definition(base):
    required = REQUIRED[base].split()
    for missing in ([name] for name in required):
        rest = [name for name in required if name not in missing]
        with pytest.raises(TypeError, match=rf"^Defined must define `{missing[0]}`; see `"):
            define(base, rest)
    names = ", ".join(f"`{name}`" for name in required)
    with pytest.raises(TypeError, match=f"^Defined must define {names}; see `{base.__name__}`"):
        define(base, [])
    define(base, required)


def define(base, names):
    members = {name: ARGUMENTS.get(name, member) for name in names}
    return type("Defined", (base,), members)


def test_a_class_that_overrides_all_users_of_a_member_does_not_need_it():
    for member_name, users in (
        ("scale_noise", ["rsample", "covariance_matrix"]),
        ("whiten", ["mahalanobis"]),
        ("output_variance", ["image_around"]),
        ("output_variance", ["image_under"]),
        ("output_variance", ["ways_to_apply"]),
    ):
        names = [name for name in REQUIRED[GaussianWeight].split() if name != member_name]
        define(GaussianWeight, names + users)
        for user in users:
            rest = [name for name in users if name != user]
            with pytest.raises(TypeError, match=f"`{member_name}`"):
                define(GaussianWeight, names + rest)


def test_a_class_without_outputs_draws_its_weights():
    """As the moments of its layers use the dense covariance, and only ``image`` is an error."""

    class Drawn(RowwiseNormal):
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


def test_members_of_a_base_between_count_and_an_abstract_class_may_lack_them():
    base = define(GaussianWeight, REQUIRED[GaussianWeight].split())
    assert issubclass(define(base, []), GaussianWeight)

    class Abstract(GaussianWeight, abstract=True):
        pass

    with pytest.raises(TypeError, match="`whiten`"):
        define(Abstract, [])


def test_a_matrix_has_a_row_for_each_output():
    q = make_mean_field((), (2, 2, 3), torch.float64)
    weight = torch.arange(24.0).reshape(2, 2, 2, 3)
    matrix = q.as_matrix(weight)
    assert matrix[1, 0].tolist() == [12.0, 13.0, 14.0, 15.0, 16.0, 17.0]
    assert torch.equal(q.as_weight(matrix), weight)
    vector = make_mean_field((), (4,), torch.float64)
    assert vector.as_matrix(torch.zeros(5, 4)).shape == (5, 4, 1)
