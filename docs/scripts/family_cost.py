"""How many lines of code the family of ``docs/write_your_own_family.md`` adds to the package.

    python docs/scripts/family_cost.py

Blanks, comments and docstrings do not count, nor the entry in the registry of structures. The code of
the page is formatted as the package is.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

PAGE = Path(__file__).parents[1] / "write_your_own_family.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
# Two lines in the `__init__.py` of distributions and of families and in the file of guides each; one of
# the family's file, which imports the distribution.
IMPORTS_AND_EXPORTS = 7


def formatted(code):
    """Return code as ruff formats it in lines of 100 characters."""
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length=100"]
    command += ["--config", "format.skip-magic-trailing-comma=true", "-"]
    return subprocess.run(command, input=code, capture_output=True, text=True, check=True).stdout


def lines_of_code(code):
    """Return how many lines hold code."""
    docstrings = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    spans = [(token.start[0], token.end[0]) for token in tokens if token.type not in NO_CODE]
    return len({line for start, end in spans[:-1] for line in range(start, end + 1)} - docstrings)


def class_alone(code):
    """Return the definition of a class without the imports above it."""
    return code[code.index("class ") :]


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    blocks = [formatted(block) for block in BLOCK.findall(PAGE.read_text())]
    (distribution,) = (block for block in blocks if "(GaussianWeight)" in block)
    (family,) = (block for block in blocks if "(MatrixFamily)" in block)
    (guide,) = (block for block in blocks if "(StructuredGuide)" in block)
    costs = {
        "distribution": lines_of_code(distribution),
        "family": lines_of_code(family),
        "guide": lines_of_code(class_alone(guide)),
        "imports and exports": IMPORTS_AND_EXPORTS,
    }
    for name, cost in {**costs, "together": sum(costs.values())}.items():
        print(f"{name:20}{cost:4}")


if __name__ == "__main__":
    main()
