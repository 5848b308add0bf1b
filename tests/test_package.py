"""The package as a whole: what importing it does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pyro_structvi as ps


@pytest.mark.slow
def test_importing_needs_no_optional_package():
    """As ``.ci/run`` looks at the wheel."""
    code = (
        "import sys; from pyro_structvi import *; "
        "optional = {'arviz', 'botorch', 'jax', 'lightning', 'matplotlib', 'numpyro', 'scipy', "
        "'peft', 'scoringrules', 'sklearn', 'torchmetrics', 'transformers'}; "
        "assert not optional & set(sys.modules), optional & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("file", "pattern"),
    [("CITATION.cff", r"^version: (\S+)$"), ("README.md", r"^  version = {(\S+)},$")],
)
def test_a_citation_has_the_version_of_the_package(file, pattern):
    text = (Path(__file__).parents[1] / file).read_text()
    assert re.search(pattern, text, re.MULTILINE)[1] == ps.__version__


def test_public_names_exist():
    assert {name for name in ps.__all__ if getattr(ps, name) is None} == set()
    for name in ("diagnostics", "metrics", "plots", "reference"):
        assert getattr(ps, name).__name__ == f"pyro_structvi.{name}"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        ps.nothing  # noqa: B018
