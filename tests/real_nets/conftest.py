"""In these tests a batch stands for many examples, so that the likelihood leads."""

import pytest


def pytest_collection_modifyitems(items):
    mark = pytest.mark.filterwarnings("ignore::pyro_structvi.infer.data_warnings.NumDataWarning")
    for item in items:
        if "real_nets" in item.nodeid:
            item.add_marker(mark)
