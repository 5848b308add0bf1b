"""The package as a whole: imports, private parts, lengths and names of files, versions."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import pyro_structvi as ps
from tests.mutation import targets

PACKAGE = Path(__file__).parents[1] / "pyro_structvi"
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 520  # lines of a file
OPTIONAL = {"botorch", "lightning", "reference", "sklearn", "metrics", "plots", "diagnostics"}

# Each part may import those before it.
ORDER = [
    *("_checks", "_torch", "_pyro", "_nested"),
    *("linalg", "maps", "weights", "nn", "sites", "structures", "moments"),
    *("posterior", "infer", "distributions", "families", "guides", "extend"),
    *("botorch", "lightning", "transformers", "reference", "sklearn"),
    *("metrics", "plots", "diagnostics", "testing"),
]

PRIVATE_FILES = {"_pyro.py", "_torch.py"}
PRIVATE = re.compile(
    r"_PYRO_STACK|_PYRO_PARAM_STORE|\b_pyro_\w+|_functorch|\btorch\._\w+|_make_wrapper_subclass"
    r"|(?<!self)\._(parameters|buffers|modules|forward_hooks|forward_pre_hooks|flat_weights\w*)\b"
    r"|from (pyro|torch)\b.* import _\w+|\.(_pytree|_python_dispatch)\b|aten\._\w+|\._schema\b"
)
# Names by which Pyro's handlers call a messenger are no reach into Pyro.
HANDLER = re.compile(r"def _pyro_(post_)?(sample|param)\b|super\(\)\._pyro_\w+")


def name_of(file):
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def part_of(module):
    return module.split(".")[1] if "." in module else ""


@cache
def imports():
    """Return the modules that each module imports, anywhere in it, those for types included."""
    modules = {name_of(file) for file in FILES}
    found = defaultdict(set)
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
            elif isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            else:
                continue
            found[name_of(file)] |= {name for name in names if name in modules} - {name_of(file)}
    return found


def test_imports_run_in_one_direction():
    assert {part_of(name_of(file)) for file in FILES} <= {"", *ORDER}
    parts = {
        (module, other): (part_of(module), part_of(other))
        for module in imports()
        for other in imports()[module]
    }
    assert len(parts) > 100
    wrong = [
        pair
        for pair, (own, other) in parts.items()
        if own and other and ORDER.index(other) > ORDER.index(own)
    ]
    assert wrong == []


def test_no_circles():
    # A package's own list of names is no file that anything in the package needs.
    lists = {name_of(file) for file in FILES if file.name == "__init__.py"}
    TopologicalSorter({module: own - lists for module, own in imports().items()}).prepare()


def test_private_parts_of_pyro_and_torch_are_in_files_of_their_own():
    lines = [
        (name_of(file), HANDLER.sub("", line.split("#")[0]).strip())
        for file in FILES
        if file.name not in PRIVATE_FILES
        for line in file.read_text().splitlines()
    ]
    assert [(name, line) for name, line in lines if PRIVATE.search(line)] == []


def test_files_are_short_enough_to_be_read():
    files = {*FILES, *Path(__file__).parent.rglob("*.py")}
    assert len(files) > 200
    lengths = {str(file): len(file.read_text().splitlines()) for file in files}
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_no_module_is_shadowed_by_a_function_of_its_name():
    shadowed = []
    for file in FILES:
        name, package = name_of(file), name_of(file.parent)
        if file.stem == "__init__" or file.parent.name in OPTIONAL:
            continue
        value = vars(importlib.import_module(package)).get(file.stem)
        if value is not None and not inspect.ismodule(value):
            shadowed.append(name)
    assert shadowed == []


def test_few_modules_lie_at_the_root():
    """Other than those named after the package that they serve."""
    loose = {file.stem for file in PACKAGE.glob("*.py")} - {"__init__"}
    assert len(loose - {"botorch", "lightning", "sklearn", "transformers"}) <= 9


def test_every_folder_is_a_package_and_every_file_is_kept():
    """A file that git ignores stands here and is missing from a clone and from the wheel."""
    folders = {file.parent for file in FILES}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
    files = "\n".join(str(file) for file in FILES)
    command = ["git", "check-ignore", "--no-index", "--stdin"]
    ignored = subprocess.run(command, input=files, cwd=PACKAGE, capture_output=True, text=True)
    assert (ignored.stdout, ignored.stderr) == ("", "")


def test_mutated_modules_exist_and_have_tests():
    assert all([*targets.ROOT.glob(pattern)] for pattern in targets.MUTATED)
    modules = targets.modules()
    assert {*targets.TESTS} <= {Path(m).stem for m in modules} | {
        str(Path(m).parent).removeprefix("pyro_structvi/") for m in modules
    }
    assert all(targets.tests_of(module) for module in modules)


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


def test_citations_have_the_version_of_the_package():
    for file, pattern in (
        ("CITATION.cff", r"^version: (\S+)$"),
        ("README.md", r"^  version = {(\S+)},$"),
    ):
        text = (PACKAGE.parent / file).read_text()
        assert re.search(pattern, text, re.MULTILINE)[1] == ps.__version__


def test_public_names_exist():
    assert {name for name in ps.__all__ if getattr(ps, name) is None} == set()
    for name in ("diagnostics", "metrics", "plots", "reference"):
        assert getattr(ps, name).__name__ == f"pyro_structvi.{name}"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        ps.nothing  # noqa: B018
