"""What holds after every test of figures."""

import matplotlib.pyplot
import pytest


@pytest.fixture(autouse=True)
def no_window_is_left():
    yield
    assert matplotlib.pyplot.get_fignums() == []
