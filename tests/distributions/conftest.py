"""The distributions that the tests of the contract run over."""

import pytest

from tests.distributions.cases import CASES, MATRIX
from tests.distributions.subject import FLOAT32, FLOAT64, Subject, settings


@pytest.fixture(params=list(settings()))
def subject(request):
    """Every structure, in the shapes that it tells apart."""
    case, batch_shape, event_shape = request.param
    return Subject(case, case.make(batch_shape, event_shape, FLOAT64))


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def plain_subject(request):
    """One weight matrix for each structure, for what does not depend on shapes."""
    return Subject(request.param, request.param.make((), MATRIX, FLOAT64))


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def single_subject(request):
    """Two weight matrices in single precision, for what depends on the dtype."""
    return Subject(request.param, request.param.make((2,), MATRIX, FLOAT32))
