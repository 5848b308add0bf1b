"""The package as a whole: what importing it does."""

import subprocess
import sys

import pytest

import pyro_structvi as ps


@pytest.mark.slow
def test_importing_needs_no_optional_package():
    """As ``.ci/run`` looks at the wheel."""
    code = (
        "import sys; import pyro_structvi; "
        "optional = {'arviz', 'jax', 'matplotlib', 'numpyro', 'scipy', 'scoringrules', 'sklearn', "
        "'torchmetrics'}; "
        "assert not optional & set(sys.modules), optional & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["diagnostics", "metrics", "plots", "reference"])
def test_optional_submodules_are_attributes(name):
    assert getattr(ps, name).__name__ == f"pyro_structvi.{name}"


def test_unknown_attributes_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        ps.nothing  # noqa: B018


@pytest.mark.parametrize("name", ps.__all__)
def test_public_names_exist(name):
    assert getattr(ps, name) is not None
