"""The places of a module that can be mutated, and a sample of them that a seed repeats."""

import difflib
import random
from dataclasses import dataclass
from functools import cache

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider

from tests.mutation.targets import ROOT

REPLACED_BINARY = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "Pow_Mul", "FloorDiv_Mul", "Mod_Mul")
REPLACED_COMPARISON = (
    *("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is"),
    *("Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt"),
)
REPLACED_UNARY = ("Delete_USub", "Delete_Not", "Delete_Invert")
ELEMENTWISE = {
    *("abs", "clamp", "clamp_min", "clone", "detach", "double", "exp", "log"),
    *("neg", "reciprocal", "rsqrt", "sqrt", "square", "tril"),
}


class RemoveElementwiseCall(Operator):
    """Leave out what keeps a tensor's shape: ``x.square()`` or ``x.mT`` becomes ``x``."""

    def mutation_positions(self, node):
        for start, stop in _removable(node):
            yield node.children[start].start_pos, node.children[stop - 1].end_pos

    def mutate(self, node, index):
        start, stop = list(_removable(node))[index]
        del node.children[start:stop]
        return node

    @classmethod
    def examples(cls):
        return ()


def _removable(node):
    """Yield the ranges of children that are ``.mT``, or a call that keeps the shape."""
    if node.type not in {"atom_expr", "power"}:
        return
    for index, child in enumerate(node.children):
        if child.type == "trailer" and child.children[0].value == ".":
            after = node.children[index + 1 : index + 2]
            called = (
                bool(after) and after[0].type == "trailer" and after[0].children[0].value == "("
            )
            name = child.children[1].value
            if name == "mT" or (name in ELEMENTWISE and called and _is_tensor(node, index)):
                yield index, index + 1 + called


def _is_tensor(node, index):
    """Say whether a method's owner is a value, and not a module of functions."""
    return index > 1 or node.children[0].get_code().strip() not in {"torch", "math", "F"}


@cache
def operators():
    """Return the operators by name: each replacement is of the same kind as what it replaces."""
    provider = OperatorProvider()
    names = [
        *(f"ReplaceBinaryOperator_{name}" for name in REPLACED_BINARY),
        *(f"ReplaceComparisonOperator_{name}" for name in REPLACED_COMPARISON),
        *(f"ReplaceUnaryOperator_{name}" for name in REPLACED_UNARY),
        *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"),
        *("ReplaceAndWithOr", "ReplaceOrWithAnd", "NumberReplacer", "ZeroIterationForLoop"),
        *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
    ]
    chosen = {name: provider[name]() for name in names}
    return chosen | {"RemoveElementwiseCall": RemoveElementwiseCall()}


@dataclass(frozen=True)
class Mutant:
    """One change of one module: the given occurrence of what the operator changes."""

    module: str
    line: int
    column: int
    operator: str
    occurrence: int

    @property
    def source(self):
        """The text of the mutated module."""
        text = (ROOT / self.module).read_text()
        return mutate_code(text, operators()[self.operator], self.occurrence)

    @property
    def diff(self):
        before, after = (ROOT / self.module).read_text().splitlines(), self.source.splitlines()
        lines = difflib.unified_diff(before, after, self.module, self.module, n=0, lineterm="")
        return "\n".join(list(lines)[2:])


@cache
def places(module):
    """Return the mutants of a module, grouped by where they are."""
    found = {}
    nodes = list(ast_nodes(get_ast((ROOT / module).read_text())))
    for name, operator in operators().items():
        spots = ((node, start) for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, (node, place) in enumerate(spots):
            if not _is_negative_number(node):  # the number is a place already
                found.setdefault(place, []).append(Mutant(module, *place, name, occurrence))
    return [found[place] for place in sorted(found)]


def _is_negative_number(node):
    return node.type == "factor" and node.children[1].type == "number"


def sample(modules, count, seed):
    """Return about ``count`` mutants: each module's share is that of its places, and one at least."""
    total = sum(len(places(module)) for module in modules)
    chosen = []
    for module in modules:
        found = places(module)
        share = min(len(found), max(1, round(count * len(found) / total))) if found else 0
        generator = random.Random(f"{seed} {module}")
        here = generator.sample(range(len(found)), share)
        chosen += [generator.choice(found[index]) for index in sorted(here)]
    return chosen
