"""The distributions that the tests of the contract run over."""

import pytest

from tests.distributions.cases import CASES, MATRIX
from tests.distributions.subject import FLOAT64, Subject, settings


@pytest.fixture(params=settings())
def subject(request):
    case, batch_shape, event_shape, dtype = request.param
    return Subject(case, case.make(batch_shape, event_shape, dtype))


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def plain_subject(request):
    """One weight matrix for each structure, for what does not depend on shapes."""
    return Subject(request.param, request.param.make((), MATRIX, FLOAT64))
