"""The tests with the oldest and with the newest dependencies, by nox: `make test-versions`."""

import os
import re
import tomllib
from pathlib import Path

import nox

nox.options.reuse_existing_virtualenvs = True
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


@nox.session(python=PYTHONS[0])
def oldest(session: nox.Session) -> None:
    """Test with the oldest Python and the lower bounds in pyproject.toml."""
    constraints = Path(session.create_tmp()) / "oldest.txt"
    constraints.write_text("\n".join(lower_bounds()))
    session.install("--editable", ".[test]", "--constraint", str(constraints))
    # Old packages warn of what the packages below them no longer advise.
    run_tests(session, "-W", "default::DeprecationWarning", "-W", "default::FutureWarning")


@nox.session(python=PYTHONS)
def newest(session: nox.Session) -> None:
    """Test with the newest versions that pip finds."""
    session.install("--upgrade", "--editable", ".[test]")
    run_tests(session)


@nox.session(python=PYTHONS[-1])
def nightly(session: nox.Session) -> None:
    """Test with the nightly build of torch, from the index in `NIGHTLY_INDEX`."""
    session.install("--editable", ".[test]")
    options = ["--pre", "--upgrade", "--index-url", os.environ["NIGHTLY_INDEX"]]
    session.install(*options, "torch", "torchvision")
    run_tests(session)


def run_tests(session: nox.Session, *options: str) -> None:
    """List the versions, and run the tests; arguments behind ``--`` are those of pytest."""
    session.run("pip", "list", "--format", "freeze")
    env = {"OMP_NUM_THREADS": "1"}
    session.run("pytest", "--numprocesses", "2", *options, *session.posargs, env=env)


def lower_bounds() -> list[str]:
    """Return the requirements of the extra `test` at their lower bounds."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found = list(project["dependencies"])
    todo, seen = ["test"], set()
    while todo:
        for requirement in extras[todo.pop()]:
            nested = re.fullmatch(r"pyro-structvi\[(.+)\]", requirement)
            names = nested[1].split(",") if nested else []
            todo += [name for name in names if name not in seen]
            seen.update(names)
            found += [] if nested else [requirement]
    return sorted({requirement.replace(">=", "==") for requirement in found})
