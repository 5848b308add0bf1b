"""The contract of distributions over weights, and random distributions of a class."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi.testing import objects, outputs, weights
from pyro_structvi.testing.contracts import Contract, fixed_seed, fresh, with_leaves
from pyro_structvi.testing.subject import Moment, Oracle, Subject
from pyro_structvi.weights.arguments import orthogonal
from pyro_structvi.weights.weight_distribution import WeightDistribution

BEFORE = (objects.check_shapes, objects.check_expand)
AFTER = (objects.check_copies, objects.check_dtypes, objects.check_in_pyro)
OF_NUMBERS = (
    weights.check_moments,
    weights.check_draws,
    weights.check_gaussian,
    weights.check_densities,
    weights.check_kl,
    outputs.check_image,
    outputs.check_spread,
    outputs.check_rows,
    outputs.check_layers,
)


def check_distribution(
    q: WeightDistribution,
    *,
    covariance: Moment | None = None,
    mean: Moment | None = None,
    kl: Callable[[Any, Tensor, Tensor], Tensor] | None = None,
    shared_covariance: Moment | None = None,
) -> None:
    r"""Check that a distribution over weights obeys the contract of ``WeightDistribution``.

    Draws :math:`\mu + A e` of normals are read off as exact functions of their noise, so that
    :math:`A A^\top` is the covariance without a sampling error. All other members, with their gradients,
    are compared with dense computations from this covariance: moments, ``whiten`` and
    ``log_det_covariance``, densities, KL divergences from independent normals, images under dense maps
    and convolutions with biases and positions, ``expand``, copies, dtypes, and use at a sample site.
    Draws that are not linear in normal noise are tested statistically, with a false alarm in 1e6 tests.

    Args:
        q: An instance with random arguments, at most some dozen elements, any batch shape. Event
            shapes of two dimensions are checked with dense layers, of more with convolutions.
        covariance: A function of such a distribution to its dense covariance ``(*batch, D, D)`` by
            definition; by default the covariance of its draws.
        mean: Likewise its mean; by default the mean of its draws.
        kl: A function of a distribution, and of loc and scale of an independent normal prior, to the
            expected divergence; by default the divergence of dense normals.
        shared_covariance: A function to the part of the covariance whose noise all positions of an
            example share; by default the covariance between positions is not checked.

    Raises:
        AssertionError: If a rule is violated, with the rule, the expected value and the value got.

    Example:
        >>> import torch
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> check_distribution(MeanFieldNormal(torch.randn(4, 3), torch.rand(4, 3) + 0.1))
    """
    with fixed_seed():
        plain = Contract(type(q).__name__)
        for check in BEFORE:
            with plain.part(check.__name__.removeprefix("check_")):
                check(plain, q)
        exact, leaves = with_leaves(fresh(q), Tensor.double)
        contract = Contract(plain.owner, leaves)
        oracle = Oracle(covariance, mean, kl, shared_covariance)
        with contract.part("draws"):
            subject = Subject.of(contract, exact, oracle)
        for check_of in OF_NUMBERS:
            with contract.part(check_of.__name__.removeprefix("check_")):
                check_of(subject)
        for check in AFTER:
            with plain.part(check.__name__.removeprefix("check_")):
                check(plain, q)


Shape = tuple[int, ...]


def positive(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return positive numbers around 1/2."""
    return torch.exp(0.3 * torch.randn(shape, dtype=dtype) - 0.7)


def cholesky_factor(batch_shape: Shape, size: int, dtype: torch.dtype) -> Tensor:
    """Return lower triangular matrices ``(*batch_shape, size, size)`` with positive diagonals."""
    below = torch.randn(*batch_shape, size, size, dtype=dtype).tril(-1) / size**0.5
    factor: Tensor = below + torch.diag_embed(positive(*batch_shape, size, dtype=dtype))
    return factor


def random_weight(
    distribution: Any, **sizes: int
) -> Callable[[Shape, Shape, torch.dtype], WeightDistribution]:
    """Return a function of batch shape, event shape and dtype to random distributions of a class.

    Args:
        distribution: A class with arguments declared by ``Argument`` annotations.
        **sizes: The sizes of further letters in their shapes.

    Example:
        >>> import torch
        >>> from pyro_structvi.distributions import KTiedNormal
        >>> make = random_weight(KTiedNormal, k=2)
        >>> make((5,), (4, 3), torch.float32).row_scale.shape
        torch.Size([5, 4, 2])
    """

    def make(batch_shape: Shape, event_shape: Shape, dtype: torch.dtype) -> WeightDistribution:
        out, size = event_shape[0], torch.Size(event_shape[1:]).numel()
        known = {"out": out, "in": size, "D": out * size, **sizes}

        def length(letter: str) -> int:
            whole, _, part = letter.partition(" / ")
            return known[whole] // (known[part] if part else 1)

        arguments = [torch.randn(*batch_shape, *event_shape, dtype=dtype)]
        for argument in distribution._arguments.values():
            shape = (*batch_shape, *map(length, argument.letters))
            if argument.constraint is constraints.lower_cholesky:
                arguments.append(cholesky_factor(shape[:-2], shape[-1], dtype))
            elif argument.constraint is orthogonal:
                arguments.append(torch.linalg.qr(torch.randn(shape, dtype=dtype)).Q)
            elif argument.constraint is constraints.positive:
                arguments.append(positive(*shape, dtype=dtype))
            else:
                arguments.append(torch.randn(shape, dtype=dtype))
        q: WeightDistribution = distribution(*arguments)
        return q

    return make
