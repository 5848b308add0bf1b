"""Rules of a contract with expected and found values, and copies of objects with other tensors."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from pyro_structvi.infer.elbo import StructuredELBO
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.weights.arguments import orthogonal

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
Projected = tuple[str, Tensor, Tensor]  # a rule, and projections of the values got and expected


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
        return gradient


class Contract:
    """Comparisons of a class ``owner`` that raise an ``AssertionError`` with rule, expected and got.

    The gradients of ``leaves`` are compared too, of a part together. Tolerances depend on ``dtype``.
    """

    def __init__(
        self, owner: str, leaves: tuple[Leaf, ...] = (), dtype: torch.dtype = torch.float64
    ) -> None:
        self.owner, self.leaves, self.tolerance = owner, leaves, TOLERANCE[dtype]
        self._part: list[Projected] | None = None  # comparisons of the present part

    def fail(self, rule: str, expected: Any, got: Any) -> None:
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
        self.equal(f"{rule} (shape)", tuple(got.shape), tuple(expected.shape))
        one, other = got.detach().double(), expected.detach().double()
        if other.numel():
            largest = max(1.0, other.abs().max().item())
            error = (one - other).abs() - self.tolerance * other.abs()
            error = torch.where(error.isfinite(), error, torch.inf).flatten()
            worst = int(error.argmax())
            if error[worst] > self.tolerance * largest:
                where = tuple(int(i) for i in torch.unravel_index(error.argmax(), other.shape))
                place = f"at entry {where} of shape {tuple(other.shape)}"
                expected_value, value = (each.flatten()[worst] for each in (other, one))
                self.fail(rule, f"{expected_value:.8g} {place}", f"{value:.8g}")
        if gradients and self.leaves and expected.requires_grad:
            probe = torch.randn_like(expected)
            projected = rule, (probe * got).sum(), (probe * expected).sum()
            if self._part is None:
                self._compare_gradients(*projected)
            else:
                self._part.append(projected)

    def _compare_gradients(self, rule: str, got: Tensor, expected: Tensor) -> None:
        plain = Contract(self.owner)
        gradients = zip(self.leaves, self._gradients(got), self._gradients(expected), strict=True)
        for leaf, mine, exact in gradients:
            name = f"{rule}; gradient with respect to `{leaf.name}`"
            plain.close(name, leaf.along(mine), leaf.along(exact))

    def _gradients(self, value: Tensor) -> tuple[Tensor, ...]:
        leaves = [leaf.value for leaf in self.leaves]
        total = value + sum(0 * leaf.sum() for leaf in leaves)
        return torch.autograd.grad(total, leaves, retain_graph=True)

    def refuses(self, rule: str, call: Callable[[], Any], start: str) -> None:
        """Raise unless a call raises a ``ValueError`` or ``TypeError`` whose message starts so."""
        try:
            result = call()
        except (ValueError, TypeError) as error:
            if not str(error).startswith(start):
                self.fail(rule, f"an error that starts with {start}", repr(error))
            return
        self.fail(rule, f"an error that starts with {start}", result)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Compare the gradients of the part, and add its name to errors of the checked class itself."""
        self._part = []
        try:
            yield
            self._compare_part(self._part)
        except AssertionError:
            raise
        except Exception as error:
            error.add_note(f"raised by {self.owner} in the check of {name}")
            raise
        finally:
            self._part = None

    def _compare_part(self, compared: list[Projected]) -> None:
        """Compare the sums of all gradients, and each by itself where the sums differ."""
        if not compared:
            return
        _, got, expected = zip(*compared, strict=True)
        try:
            self._compare_gradients("the sum", torch.stack(got).sum(), torch.stack(expected).sum())
        except AssertionError:
            for each in compared:
                self._compare_gradients(*each)


def tensors_of(owner: Any) -> dict[str, tuple[Tensor, Any, str]]:
    """Return the floating-point tensors of an object and of its parts: tensor, owner and attribute."""
    found: dict[str, tuple[Tensor, Any, str]] = {}
    _collect(owner, "", found, set())
    return found


def _collect(
    owner: Any, path: str, found: dict[str, tuple[Tensor, Any, str]], seen: set[int]
) -> None:
    if id(owner) in seen:
        return
    seen.add(id(owner))
    for name, value in vars(owner).items():
        if isinstance(value, Tensor):
            if value.is_floating_point() and id(value) not in seen:
                found[f"{path}{name}"] = value, owner, name
                seen.add(id(value))
        elif isinstance(value, Distribution) or (
            hasattr(value, "__dict__") and not callable(value)
        ):
            _collect(value, f"{path}{name.lstrip('_')}.", found, seen)


def with_leaves(
    owner: Any, change: Callable[[Tensor], Tensor] = Tensor.clone
) -> tuple[Any, tuple[Leaf, ...]]:
    """Return a copy of a distribution with changed tensors as leaves of a new graph, and the leaves."""
    memo: dict[int, Any] = {}
    leaves = []
    for path, (value, part, name) in tensors_of(owner).items():
        leaf = change(value.detach()).requires_grad_()
        memo[id(value)] = leaf
        support = getattr(part, "arg_constraints", {}).get(name)
        leaves.append(Leaf(path, leaf, support))
    return copy.deepcopy(owner, memo), tuple(leaves)


def fresh(q: Any) -> Any:
    """Return a copy of a distribution on the same tensors, without intermediate results."""
    try:
        return q.expand(q.batch_shape)
    except NotImplementedError:
        return q


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


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names under which two mappings of tensors differ."""
    return [
        name
        for name in {**one, **other}
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]


def draws(guide: StructuredGuide) -> dict[str, Tensor]:
    """Return draws with a fixed seed, and the medians."""
    torch.manual_seed(1)
    return {**guide.draw(local=True), **{f"{k} (median)": v for k, v in guide.median().items()}}


def elbo_gradients(
    contract: Contract, guide: StructuredGuide, model: Any, data: Any, num_particles: int
) -> dict[str, Tensor]:
    """Return the gradients of the ELBO by the names of parameters, and check that they are finite."""
    loss = StructuredELBO(num_particles=num_particles).differentiable_loss(model, guide, *data)
    names, values = zip(*guide.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, values, allow_unused=True)
    for name, gradient in zip(names, found, strict=True):
        finite = gradient is not None and bool(gradient.isfinite().all())
        contract.equal(f"the ELBO has a finite gradient for `{name}`", finite, True)
    return dict(zip(names, found, strict=True))
