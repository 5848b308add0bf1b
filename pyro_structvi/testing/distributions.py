"""The contract of distributions over weights, and random distributions of a class."""

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.distributions import Normal, constraints, kl_divergence, transform_to

from pyro_structvi.testing import outputs, weights
from pyro_structvi.testing.contracts import (
    Contract,
    fixed_seed,
    fresh,
    is_defined,
    tensors_of,
    with_leaves,
)
from pyro_structvi.testing.noise import draw_with_noise
from pyro_structvi.testing.weights import KL, Moment, Subject, has_density, has_image
from pyro_structvi.weights.arguments import orthogonal
from pyro_structvi.weights.site_distributions import quantiles
from pyro_structvi.weights.weight_distribution import WeightDistribution


def check_distribution(
    q: WeightDistribution,
    *,
    covariance: Moment | None = None,
    mean: Moment | None = None,
    kl: KL | None = None,
    shared_covariance: Moment | None = None,
) -> None:
    r"""Check that a distribution over weights obeys the contract of ``WeightDistribution``.

    Draws :math:`\mu + A e` of normals are read off as exact functions of their noise, so that
    :math:`A A^\top` is the covariance without a sampling error. All other members, with their gradients,
    are compared with dense computations from it: moments, densities, quantiles, KL divergences,
    outputs of dense layers and convolutions, ``rows``, ``rearranged``, ``expand``, copies, dtypes, and
    use at a sample site. Draws that are not linear in normal noise are tested statistically, with a
    false alarm in 1e6 tests, and gradients by finite differences.

    Args:
        q: An instance with random arguments, at most some dozen elements, any batch shape. Dense layers
            check event shapes of two dimensions, and convolutions of more.
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
        contract = Contract(type(q).__name__)
        with contract.part("draws"):
            subject = Subject(q, covariance, mean, kl, shared_covariance)
        for check in CHECKS:
            with contract.part(check.__name__.removeprefix("_").removeprefix("check_")):
                check(subject)


def _check_shapes(s: Subject) -> None:
    q = s.given
    shape, length = tuple(q.batch_shape + q.event_shape), q.event_shape.numel()
    for sample_shape in ((), (5,), (2, 5)):
        whole = (*sample_shape, *shape)
        for name in ("rsample", "sample"):
            got = tuple(getattr(q, name)(torch.Size(sample_shape)).shape)
            s.equal(f"`{name}` has shape (*sample, *batch, *event)", got, whole)
        weight = torch.randn(whole, dtype=q.mean.dtype)
        matrix = q.as_matrix(weight)
        rows = (*sample_shape, *q.batch_shape, q.event_shape[0], length // q.event_shape[0])
        s.equal("`as_matrix` has shape (..., out, in)", tuple(matrix.shape), rows)
        s.close("`as_weight` inverts `as_matrix`", q.as_weight(matrix), weight)
    s.equal("`event_dim` counts the dimensions of the weight", q.event_dim, len(q.event_shape))
    s.equal("every real tensor is in `support`", bool(q.support.check(q.mean).all()), True)


def _check_expand(s: Subject) -> None:
    """Check that ``expand`` shares memory and commutes with all other members."""
    q = s.given
    if not _has_expand(q):
        return
    batch = (5, *q.batch_shape)
    expanded = q.expand(batch)
    s.equal("`expand` returns the class of the distribution", type(expanded), type(q))
    rule = "`expand` has the new batch shape and the old event shape"
    s.equal(rule, (tuple(expanded.batch_shape), expanded.event_shape), (batch, q.event_shape))
    own, others = tensors_of(q), tensors_of(expanded)
    s.equal("`expand` keeps all tensors", set(others), set(tensors_of(fresh(q))))
    for name, (after, _, _) in others.items():
        before = own[name][0]
        s.close(f"`expand` repeats `{name}`", after, before.expand(after.shape), False)
        s.equal(f"`expand` shares the memory of `{name}`", _is_shared(after, before), True)
    value, x = _arguments(q, ())
    found = _numbers(expanded, value.expand(5, *value.shape), x.unsqueeze(0))
    close = Contract(s.owner, dtype=q.mean.dtype).close
    for name, number in _numbers(q, value, x).items():
        close(f"`{name}` commutes with `expand`", found[name], number.expand(5, *number.shape))
    if not q.batch_shape:
        twice = q.expand((2, 1)).expand((2, 3)).variance
        rule = "`expand` enlarges batch dimensions of size one"
        close(rule, twice, q.variance.expand(2, 3, *q.event_shape))


def _arguments(q: Any, lead: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return a weight, and an input ``(*lead, *ones, in)``, in the dtype of a distribution."""
    value = torch.randn(q.batch_shape + q.event_shape, dtype=q.mean.dtype)
    ones = (1 for _ in q.batch_shape)
    return value, torch.randn(*lead, *ones, q.event_shape[1:].numel(), dtype=q.mean.dtype)


def _numbers(q: Any, value: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Return all deterministic results of a distribution, by name."""
    names = ("mean", "variance", "covariance_matrix")
    found = {name: getattr(q, name) for name in (*names, "stddev", "variance_sum")}
    if has_image(q):
        image = q.image(x)
        found |= {f"image(x).{name}": getattr(image, name) for name in names}
    if has_density(q):
        prior = Normal(torch.tensor(0.3).to(value), torch.tensor(0.7).to(value), False)
        prior = prior.expand(q.batch_shape + q.event_shape)
        found |= {"log_prob": q.log_prob(value), "entropy": q.entropy()}
        if is_defined(lambda: kl_divergence(q, prior)):
            found["KL"] = kl_divergence(q, prior)
    return found


def _is_shared(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _has_expand(q: Any) -> bool:
    return is_defined(lambda: q.expand((2, *q.batch_shape)))


def _check_gradients(s: Subject) -> None:
    """Compare the gradients of a distribution without dense moments with finite differences."""
    if s.is_normal or not s.leaves:
        return
    value, x = _arguments(s.q, (3,))
    # The probe stays within the support, such as that of lower triangular factors.
    ways = [leaf.along(torch.randn_like(leaf.value)) for leaf in s.leaves]

    def numbers(size: float) -> dict[str, Tensor]:
        steps = iter(ways)
        q = s.q
        if size:
            q, _ = with_leaves(fresh(s.given), lambda own: own.double() + size * next(steps))
        torch.manual_seed(1)
        return _numbers(q, value, x) | {"rsample": q.rsample()}

    s.slopes(numbers, ways)


def _check_copies(s: Subject) -> None:
    """Check deep copies, and pickles if the class can be imported."""
    q, own = s.given, tensors_of(s.given)
    copies = [copy.deepcopy(q)]
    if getattr(sys.modules.get(type(q).__module__), type(q).__qualname__, None) is type(q):
        copies.append(pickle.loads(pickle.dumps(q)))
    for others in map(tensors_of, copies):
        s.equal("a copy has the tensors of the original", set(others), set(own))
        for name, (value, _, _) in others.items():
            s.close(f"a copy has the same `{name}`", value, own[name][0], False)
            shared = _is_shared(value, own[name][0])
            s.equal(f"a copy has separate memory for `{name}`", shared, False)


def _check_dtypes(s: Subject) -> None:
    """Check that results keep dtype and device, and that single precision is close to double."""
    q = s.given
    exact, single = (with_leaves(fresh(q), change)[0] for change in (Tensor.double, Tensor.float))
    value, x = _arguments(exact, (7,))
    with s.part("single precision: a new tensor has dtype and device of the arguments"):
        found = _numbers(single, value.float(), x.float())
        found |= {"rsample": single.rsample()} | _outputs_and_draws(s, single)
        if has_image(single):
            found["image(x).rsample"] = single.image(x.float()).rsample()
        if is_defined(lambda: quantiles(single, torch.tensor([0.3]))):
            found["quantiles"] = quantiles(single, torch.tensor([0.3], dtype=torch.float32))
        if not q.batch_shape:
            found["spread(S)"] = single.spread(torch.eye(x.shape[-1], dtype=torch.float32))
            if len(q.event_shape) == 2 and (rows := single.rows(torch.tensor([[0]]))) is not None:
                found["rows(index).rsample"] = rows.rsample()
    for name, number in found.items():
        s.equal(f"`{name}` keeps the dtype of the arguments", number.dtype, torch.float32)
    close = Contract(s.owner, dtype=torch.float32).close
    for name, number in (_numbers(exact, value, x) | _outputs_and_draws(s, exact)).items():
        close(f"`{name}` in single precision is close to double", found[name], number)
    meta, _ = with_leaves(fresh(q), lambda tensor: tensor.to("meta"))
    meta._validate_args = False  # values are not there
    try:
        on_meta = _numbers(meta, *(v.to("meta", q.mean.dtype) for v in (value, x)))
    except RuntimeError as error:
        if "cannot be called on meta tensors" in str(error):  # as torch's variance of Student's t
            return
        raise
    for name, number in on_meta.items():
        s.equal(f"`{name}` stays on the device meta", number.device.type, "meta")


def _outputs_and_draws(s: Subject, q: Any) -> dict[str, Tensor]:
    """Return outputs of the first layer of the weight, and normal draws of given noise, by name."""
    found, draws = {}, {"rsample": q.rsample}
    layer = None if q.batch_shape else next(outputs.layers_for(tuple(q.event_shape)), None)
    if layer is not None:
        x = torch.linspace(-1.5, 2.0, torch.Size(layer.x_shape).numel()).reshape(layer.x_shape)
        x = x.to(q.mean.dtype)
        if "outputs" in q.ways_to_apply(layer.linear_map, x):
            image = q.image_under(layer.linear_map, x)
            found[f"variance of {layer.name}"] = image.variance
            draws[f"rsample of {layer.name}"] = image.rsample
    for name, draw in draws.items() if s.is_normal else ():
        _, size = draw_with_noise(draw, None)
        found[name], _ = draw_with_noise(draw, torch.linspace(-1.5, 2.0, size))
    return found


def _check_in_pyro(s: Subject) -> None:
    """Check values at sample sites, and the wrappers of Pyro."""
    q = s.given
    value = pyro.sample("weight", q)
    s.equal("a value at a sample site is an ordinary tensor", type(value), Tensor)
    if not q.batch_shape and _has_expand(q):
        with pyro.plate("members", 3):
            value = pyro.sample("weight", q)
        s.equal("a plate expands", tuple(value.shape), (3, *q.event_shape))
    if q.batch_shape and has_density(q):
        value = q.sample()
        density = q.log_prob(value)
        s.close("`to_event` sums the density", q.to_event(1).log_prob(value), density.sum(-1))
        s.close("`mask` drops the density", q.mask(False).log_prob(value), 0 * density)
        repeated = q.expand_by([2]).log_prob(value)
        s.close("`expand_by` repeats", repeated, density.expand(2, *density.shape))


CHECKS = (
    *(_check_shapes, _check_expand, _check_gradients),
    *(weights.check_moments, weights.check_draws, weights.check_gaussian),
    *(weights.check_densities, weights.check_kl, weights.check_quantiles),
    *(outputs.check_image, outputs.check_spread, outputs.check_rows, outputs.check_rearranged),
    *(outputs.check_layers, _check_copies, _check_dtypes, _check_in_pyro),
)


# ---- random distributions ------------------------------------------------------------------------

Shape = tuple[int, ...]


def positive(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return positive numbers around 1/2."""
    return torch.exp(0.3 * torch.randn(shape, dtype=dtype) - 0.7)


def cholesky_factor(batch_shape: Shape, size: int, dtype: torch.dtype) -> Tensor:
    """Return lower triangular matrices ``(*batch_shape, size, size)`` with positive diagonals."""
    below = torch.randn(*batch_shape, size, size, dtype=dtype).tril(-1) / size**0.5
    return below + torch.diag_embed(positive(*batch_shape, size, dtype=dtype))


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
            missing = {whole, part or whole} - known.keys()
            if missing:
                raise ValueError(
                    f"`sizes` must have the size of each letter in a shape, but {sorted(missing)} are "
                    f"missing. Write `random_weight({distribution.__name__}, {min(missing)}=2)`."
                )
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
                onto = transform_to(argument.constraint)
                free = torch.randn(onto.inverse_shape(torch.Size(shape)), dtype=dtype)
                arguments.append(onto(free))
        return distribution(*arguments)

    return make
