import jax
import pytest


@pytest.fixture(scope="module")
def little_compiling():
    """Let JAX compile with few optimizations, which is most of the time of tests without chains."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)
