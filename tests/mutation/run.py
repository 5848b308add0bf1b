"""Mutation testing: change the code in one place and see whether a test fails.

    python -m tests.mutation.run --mutants 120 --seed 0 --only distributions --json out.json

A process that has imported torch and Pyro, and nothing of the package, is forked for each mutant. The
child imports the package with one module changed, and runs the tests of that module until one fails.
Every test that killed a mutant is run once more without a change, where it must pass.
"""

import argparse
import collections
import contextlib
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from dataclasses import asdict

import pyro
import pyro.poutine
import pytest
import scipy.stats
import torch

from tests.mutation.mutants import operators, sample
from tests.mutation.targets import ROOT, modules, tests_of

IMPORTED_BEFORE_THE_FORK = (pyro, pyro.poutine, scipy.stats)
QUIET = ("-q", "-p", "no:cacheprovider")
TIMEOUT = 120  # CPU seconds for one mutant


class MutatedModule(importlib.machinery.SourceFileLoader):
    """The finder and loader of one module whose text is another one than its file's."""

    def __init__(self, path, source):
        name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        super().__init__(name, str(ROOT / path))
        self.source = source

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def get_code(self, fullname):
        return compile(self.source, self.path, "exec", dont_inherit=True)


class Failures:
    """A plugin of pytest that selects tests by file and name, and keeps the names of those that fail."""

    def __init__(self, patterns):
        self.patterns, self.failed = patterns, []

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if self._selects(*item.nodeid.split("::", 1))]

    def _selects(self, file, name):
        files = {path.partition("::")[0]: pattern for path, pattern in self.patterns.items()}
        return re.search(files[file], name) is not None

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed.append("import")


def run_tests(tests, mutant, answer, timeout):
    """Run tests in this process, to the first failure of a mutant; send exit status and failures."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (timeout, timeout + 1))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    if mutant is not None:
        sys.meta_path.insert(0, MutatedModule(mutant.module, mutant.source))
    plugin = Failures(tests)
    stop = [] if mutant is None else ["-x"]
    status = pytest.main([*QUIET, *stop, *tests], plugins=[plugin])
    answer.send((int(status), plugin.failed))
    os._exit(0)


def outcome(tests, mutant=None, timeout=TIMEOUT):
    """Return what a forked process found: a word, and the tests that failed."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=run_tests, args=(tests, mutant, there, timeout))
    child.start()
    there.close()
    answered = here.poll(5 * timeout)  # as other processes may be running
    try:
        status, failed = here.recv() if answered else (None, [])
    except EOFError:
        status, failed = pytest.ExitCode.TESTS_FAILED, ["crash"]
    with contextlib.suppress(ProcessLookupError):  # and what a test may have started
        os.killpg(child.pid, signal.SIGKILL)
    child.join()
    if status is None or child.exitcode == -signal.SIGXCPU:
        return "timeout", []
    if status == pytest.ExitCode.OK:
        return "survived", []
    if status == pytest.ExitCode.NO_TESTS_COLLECTED or (mutant is None and not failed):
        raise RuntimeError(f"pytest ended with status {status} for {mutant} and {tests}.")
    return "killed", failed or ["import"]  # a file of fixtures that cannot be imported


def run(mutants):
    """Test the mutants, and return a record of each."""
    records = []
    for mutant in mutants:
        start = time.perf_counter()
        word, failed = outcome(tests_of(mutant.module), mutant)
        seconds = round(time.perf_counter() - start, 1)
        records.append(asdict(mutant) | {"outcome": word, "tests": failed, "seconds": seconds})
        print(
            f"{word:9}{seconds:6.1f} s  {mutant.module}:{mutant.line} {mutant.operator}", flush=True
        )
        if word == "survived":
            records[-1]["diff"] = mutant.diff
            print(mutant.diff, flush=True)
    return records


def check_killers(records):
    """Call a record void if its test fails without a mutation too, and say so."""
    killers = {test for record in records for test in record["tests"]} - {"import", "crash"}
    tests = dict.fromkeys(sorted(killers), "")
    word, failed = outcome(tests, timeout=5 * TIMEOUT) if tests else ("survived", [])
    if word == "timeout":
        raise RuntimeError("The tests that killed mutants take too long without one.")
    for record in records:
        if set(record["tests"]) & set(failed):
            record["outcome"] = "void"
            print(f"Fails without a mutation: {record['tests'][0]}")


def print_table(records):
    counts = collections.defaultdict(collections.Counter)
    for record in records:
        counts[record["module"]][record["outcome"]] += 1
        counts["total"][record["outcome"]] += 1
    words = ("killed", "timeout", "survived", "void")
    print(f"{'module':58}", *(f"{word:>9}" for word in words))
    for module, count in sorted(counts.items(), key=lambda entry: entry[0] == "total"):
        print(f"{module:58}", *(f"{count[word]:9}" for word in words))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutants", type=int, default=120, help="how many, over all modules")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a regular expression for paths of modules")
    parser.add_argument("--json", help="where to write the records")
    options = parser.parse_args()
    torch.set_num_threads(1)
    operators()
    mutants = sample(modules(), options.mutants, options.seed)
    records = run([m for m in mutants if re.search(options.only, m.module)])
    check_killers(records)
    print_table(records)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(records, file, indent=1)


if __name__ == "__main__":
    main()
