"""Rules of a contract with expected and found values, and copies of objects with other tensors."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.testing import assert_close

from pyro_structvi.testing.noise import assert_mean
from pyro_structvi.weights.arguments import orthogonal

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
STEP = 1e-5  # of finite differences


@dataclass(frozen=True)
class Leaf:
    """A tensor of a distribution as a leaf of the graph."""

    name: str
    value: Tensor
    support: Any

    def along(self, gradient: Tensor) -> Tensor:
        """Return the part of a gradient along the values that the support allows."""
        if self.support is constraints.lower_cholesky:
            return gradient.tril()
        if self.support is orthogonal:
            product = self.value.detach().mT @ gradient
            return product - product.mT
        # The elements of an expanded tensor are one value.
        expanded = [dim for dim, stride in enumerate(self.value.stride()) if not stride]
        return gradient.sum(expanded) if expanded else gradient


class Contract:
    """Comparisons of a class ``owner`` that raise an ``AssertionError`` with rule, expected and got.

    The gradients of ``leaves`` are compared too. Tolerances depend on ``dtype``.
    """

    def __init__(
        self, owner: str, leaves: tuple[Leaf, ...] = (), dtype: torch.dtype = torch.float64
    ) -> None:
        self.owner, self.leaves, self.tolerance = owner, leaves, TOLERANCE[dtype]

    def fail(self, rule: str, expected: Any, got: Any) -> NoReturn:
        """Raise the error of a violated rule."""
        raise AssertionError(f"{self.owner}: {rule}.\nExpected: {expected}\nGot: {got}")

    def equal(self, rule: str, got: Any, expected: Any) -> None:
        """Raise unless two values are equal."""
        if got != expected:
            self.fail(rule, expected, got)

    def close(self, rule: str, got: Tensor, expected: Tensor, gradients: bool = True) -> None:
        """Raise unless two tensors, and their gradients, agree to rounding.

        Small entries are compared on the scale of the largest entry.
        """
        one, other = got.detach().double(), expected.detach().double()
        largest = max(1.0, float(other.abs().max())) if other.numel() else 1.0
        rtol, atol = self.tolerance, self.tolerance * largest
        # A tenth of the time of `assert_close`, whose words only a failure needs.
        alike = one.shape == other.shape and one.device == other.device
        if not (alike and torch.allclose(one, other, rtol=rtol, atol=atol)):
            try:
                assert_close(one, other, rtol=rtol, atol=atol)
            except AssertionError as error:
                entries = f"with entries up to {largest:.3g}"
                self.fail(rule, f"the tensor of the definition, {entries}", error)
        if gradients and self.leaves and expected.requires_grad:
            values, probe = [leaf.value for leaf in self.leaves], torch.randn_like(expected)
            got = got + 0 * values[0].sum()  # with a gradient in any case
            own, exact = (
                torch.autograd.grad(total, values, probe, retain_graph=True, materialize_grads=True)
                for total in (got, expected)
            )
            for leaf, mine, right in zip(self.leaves, own, exact, strict=True):
                name = f"{rule}; gradient with respect to `{leaf.name}`"
                if not mine.any():
                    name += ", which is zero, as of a result that is detached"
                Contract(self.owner).close(name, leaf.along(mine), leaf.along(right))

    def slopes(self, numbers: Callable[[float], dict[str, Tensor]], ways: Sequence[Tensor]) -> None:
        """Compare gradients with finite differences of results at the leaves plus a step along ways."""
        values = [leaf.value for leaf in self.leaves]
        ahead, behind = numbers(STEP), numbers(-STEP)
        for name, number in numbers(0.0).items():
            probe = torch.randn_like(number)
            with_graph = number + 0 * values[0].sum()
            found = torch.autograd.grad(
                with_graph, values, probe, retain_graph=True, materialize_grads=True
            )
            slope = torch.stack([(a * b).sum() for a, b in zip(ways, found, strict=True)]).sum()
            expected = (probe * (ahead[name] - behind[name])).sum() / (2 * STEP)
            rule = f"the gradient of `{name}` is its derivative"
            Contract(self.owner, dtype=torch.float32).close(rule, slope, expected)

    def mean_of(self, rule: str, draws: Tensor, expected: Tensor) -> None:
        """Raise unless independent numbers ``(n, ...)`` have a mean, up to their standard error."""
        try:
            assert_mean(draws, expected)
        except AssertionError as error:
            self.fail(rule, "no significant error", error)

    def with_leaf(self, name: str, value: Tensor) -> Self:
        """Return a copy that compares the gradient of a further tensor."""
        other = copy.copy(self)
        other.leaves = (*self.leaves, Leaf(name, value, None))
        return other

    def refuses(self, rule: str, call: Callable[[], Any], start: str) -> None:
        """Raise unless a call raises a ``ValueError`` or ``TypeError`` whose message starts so."""
        try:
            found = call()
        except (ValueError, TypeError) as error:
            if str(error).startswith(start):
                return
            found = repr(error)
        self.fail(rule, f"an error that starts with {start}", found)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the name of the part to errors of the checked class itself."""
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            error.add_note(f"raised by {self.owner} in the check of {name}")
            raise


def tensors_of(owner: Any) -> dict[str, tuple[Tensor, Any, str]]:
    """Return the floating-point tensors of an object and of its parts: tensor, owner and attribute."""
    found: dict[str, tuple[Tensor, Any, str]] = {}
    seen: set[int] = set()

    def collect(part: Any, path: str) -> None:
        seen.add(id(part))
        for name, value in vars(part).items():
            if id(value) in seen:
                continue
            if isinstance(value, Tensor):
                if value.is_floating_point():
                    seen.add(id(value))
                    found[f"{path}{name}"] = value, part, name
            elif isinstance(value, Distribution) or (
                hasattr(value, "__dict__") and not callable(value)
            ):
                collect(value, f"{path}{name.lstrip('_')}.")

    collect(owner, "")
    return found


def with_leaves(
    owner: Any, change: Callable[[Tensor], Tensor] = Tensor.clone
) -> tuple[Any, tuple[Leaf, ...]]:
    """Return a copy of a distribution with changed tensors as leaves of a new graph, and the leaves."""
    memo: dict[int, Any] = {}
    leaves = []
    for path, (value, part, name) in tensors_of(owner).items():
        memo[id(value)] = leaf = change(value.detach()).requires_grad_()
        leaves.append(Leaf(path, leaf, getattr(part, "arg_constraints", {}).get(name)))
    return copy.deepcopy(owner, memo), tuple(leaves)


def is_defined(call: Callable[[], Any]) -> bool:
    """Whether a call raises no ``NotImplementedError``, or Pyro's error of a flow without an inverse."""
    try:
        call()
    except (NotImplementedError, KeyError):
        return False
    return True


def fresh(q: Any) -> Any:
    """Return a copy of a distribution on the same tensors, without intermediate results."""
    return q.expand(q.batch_shape) if is_defined(lambda: q.expand(q.batch_shape)) else q


@contextmanager
def fixed_seed(default: torch.dtype = torch.float64) -> Iterator[None]:
    """Run with one seed and a default dtype, and leave both as they were."""
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.set_default_dtype(default)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
