"""State that every test starts from, and which tests run where."""

import gc
import os
import zlib

import pytest

# torch and Pyro are imported where they are used: a process that only starts others needs neither.

SLOW_SAMPLE_SIZE = 5


def pytest_addoption(parser):
    group = parser.getgroup("pyro_structvi")
    group.addoption("--slow", action="store_true", help="run the slow tests too")
    group.addoption("--nets", choices=["all", "sample"], help="run the nets of other libraries")
    group.addoption(
        "--slow-sample",
        action="store_true",
        help=f"run a fixed sample of the slow tests, about one in {SLOW_SAMPLE_SIZE}",
    )


def pytest_configure(config):
    """Compute with one thread unless told otherwise: at these sizes, more of them only wait."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # the tests run in other processes
    import torch

    gc.disable()  # collecting ten thousand tests makes much and drops nothing
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            # Each seed for a device that has not started waits in a queue, with a formatted stack.
            device.manual_seed_all = lambda seed: None


def pytest_collection_modifyitems(config, items):
    for item in items:
        reason = _reason_to_skip(item, config)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session):
    """Collect garbage from here on, seldom, and without what is there by now: modules and tests."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def _reason_to_skip(item, config):
    import torch

    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return "no CUDA here"
    if item.get_closest_marker("nets"):
        chosen = config.getoption("--nets")
        if chosen == "sample" and not item.get_closest_marker("nets_sample"):
            return "not in the sample of nets"
        return None if chosen else "a net of another library; run with --nets all"
    if not item.get_closest_marker("slow") or config.getoption("--slow"):
        return None
    if not config.getoption("--slow-sample"):
        return "slow; run with --slow"
    return None if in_slow_sample(item.nodeid) else "not in the sample of slow tests"


def in_slow_sample(nodeid):
    """Say whether a test is in the sample: by its name, so that every process agrees."""
    return zlib.crc32(nodeid.encode()) % SLOW_SAMPLE_SIZE == 0


@pytest.fixture(scope="session", autouse=True)
def float64_by_default():
    """Compute in float64, in fixtures of every scope as well."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def fresh_state(float64_by_default):
    """Start each test from the same seeds, an empty param store, validation and float64."""
    import pyro
    import torch

    pyro.set_rng_seed(0)  # torch, numpy and random
    pyro.clear_param_store()
    pyro.enable_validation(True)
    yield
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def factorizations(monkeypatch):
    """Return a list that grows with each factorization."""
    from pyro_structvi.structures.inducing import outputs

    made, original = [], outputs.stable_cholesky

    def counted(matrix):
        made.append(matrix.shape)
        return original(matrix)

    monkeypatch.setattr(outputs, "stable_cholesky", counted)
    return made
