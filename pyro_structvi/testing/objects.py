"""Rules for a distribution as an object: shapes, batches, copies, dtypes, sample sites."""

import copy
import pickle
import sys
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence

from pyro_structvi.testing.contracts import Contract, fresh, tensors_of, with_leaves


def check_shapes(contract: Contract, q: Any) -> None:
    """Check the shapes of moments, draws and matrices."""
    equal = contract.equal
    shape, length = tuple(q.batch_shape + q.event_shape), q.event_shape.numel()
    for name in ("mean", "variance", "stddev"):
        equal(f"`{name}` has shape (*batch, *event)", tuple(getattr(q, name).shape), shape)
    of_covariance = tuple(q.covariance_matrix.shape)
    rule = "`covariance_matrix` has shape (*batch, D, D)"
    equal(rule, of_covariance, (*q.batch_shape, length, length))
    equal("`variance_sum` has the batch shape", q.variance_sum.shape, q.batch_shape)
    for sample_shape in ((), (5,), (2, 5)):
        whole = (*sample_shape, *shape)
        for name in ("rsample", "sample"):
            got = tuple(getattr(q, name)(torch.Size(sample_shape)).shape)
            equal(f"`{name}` has shape (*sample, *batch, *event)", got, whole)
        weight = torch.randn(whole, dtype=q.mean.dtype)
        matrix = q.as_matrix(weight)
        rows = (*sample_shape, *q.batch_shape, q.event_shape[0], length // q.event_shape[0])
        equal("`as_matrix` has shape (..., out, in)", tuple(matrix.shape), rows)
        contract.close("`as_weight` inverts `as_matrix`", q.as_weight(matrix), weight)
    equal("`event_dim` counts the dimensions of the weight", q.event_dim, len(q.event_shape))
    equal("every real tensor is in `support`", bool(q.support.check(q.mean).all()), True)


def check_expand(contract: Contract, q: Any) -> None:
    """Check that ``expand`` shares memory and commutes with all other members."""
    batch = (5, *q.batch_shape)
    if not has_expand(q):
        return
    expanded = q.expand(batch)
    equal = contract.equal
    equal("`expand` returns the class of the distribution", type(expanded), type(q))
    rule = "`expand` has the new batch shape and the old event shape"
    shapes = tuple(expanded.batch_shape), expanded.event_shape
    equal(rule, shapes, (batch, q.event_shape))
    own, others = tensors_of(q), tensors_of(expanded)
    equal("`expand` keeps all tensors", set(others), set(tensors_of(fresh(q))))
    for name, (after, _, _) in others.items():
        before = own[name][0]
        contract.close(f"`expand` repeats `{name}`", after, before.expand(after.shape), False)
        equal(f"`expand` shares the memory of `{name}`", _is_shared(after, before), True)

    dtype, events = q.mean.dtype, q.event_shape
    x = torch.randn(7, *(1 for _ in batch), events[1:].numel(), dtype=dtype)
    image, of_expanded = q.image(x[:, 0]), expanded.image(x)
    pairs = {
        f"`{name}`": (getattr(expanded, name), getattr(q, name).expand(5, *getattr(q, name).shape))
        for name in ("mean", "covariance_matrix")
    }
    for name in ("mean", "variance"):
        value = getattr(image, name).unsqueeze(1)
        pairs[f"the {name} of `image`"] = (
            getattr(of_expanded, name),
            value.expand(7, 5, *value.shape[2:]),
        )
    if has_density(q):
        value = torch.randn(*batch, *events, dtype=dtype)
        prior = Independent(
            Normal(torch.tensor(0.3).to(q.mean), 0.7).expand(q.mean.shape), q.event_dim
        )
        divergence = kl_divergence(expanded, prior.expand(torch.Size(batch)))
        pairs |= {
            "`log_prob`": (expanded.log_prob(value), q.log_prob(value)),
            "`entropy`": (expanded.entropy(), q.entropy().expand(batch)),
            "the KL": (divergence, kl_divergence(q, prior).expand(batch)),
        }
    close = Contract(contract.owner, dtype=dtype).close
    for name, (got, expected) in pairs.items():
        close(f"{name} commutes with `expand`", got, expected)
    if not q.batch_shape:
        twice = q.expand((2, 1)).expand((2, 3)).variance
        rule = "`expand` enlarges batch dimensions of size one"
        close(rule, twice, q.variance.expand(2, 3, *events))


def _is_shared(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def has_density(q: Any) -> bool:
    """Whether a distribution has a density, an entropy and a KL divergence from normals."""
    try:
        q.log_prob(q.mean), q.entropy()
    except NotImplementedError:
        return False
    return True


def has_expand(q: Any) -> bool:
    """Whether a distribution can be expanded."""
    try:
        q.expand((2, *q.batch_shape))
    except NotImplementedError:
        return False
    return True


def check_copies(contract: Contract, q: Any) -> None:
    """Check deep copies, and pickles if the class can be imported."""
    copies = [copy.deepcopy(q)]
    if getattr(sys.modules.get(type(q).__module__), type(q).__qualname__, None) is type(q):
        copies.append(pickle.loads(pickle.dumps(q)))
    for twin in copies:
        own, others = tensors_of(q), tensors_of(twin)
        contract.equal("a copy has the tensors of the original", set(others), set(own))
        for name, (value, _, _) in others.items():
            contract.close(f"a copy has the same `{name}`", value, own[name][0], False)
            shared = _is_shared(value, own[name][0])
            contract.equal(f"a copy has separate memory for `{name}`", shared, False)
        rule = "a copy has the same covariance"
        contract.close(rule, twin.covariance_matrix, q.covariance_matrix)


def _numbers(q: Any, value: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Return all deterministic results of a distribution, by name."""
    names, image = ("mean", "variance", "covariance_matrix"), q.image(x)
    found = {name: getattr(q, name) for name in (*names, "stddev", "variance_sum")}
    found |= {f"image(x).{name}": getattr(image, name) for name in names}
    if has_density(q):
        prior = Normal(torch.tensor(0.3).to(value), torch.tensor(0.7).to(value), False)
        found |= {"log_prob": q.log_prob(value), "entropy": q.entropy()}
        found["KL"] = kl_divergence(q, prior.expand(q.batch_shape + q.event_shape))
    return found


def check_dtypes(contract: Contract, q: Any) -> None:
    """Check that results keep dtype and device, and that single precision is close to double."""
    exact, single = (with_leaves(fresh(q), change)[0] for change in (Tensor.double, Tensor.float))
    value = torch.randn(q.batch_shape + q.event_shape)
    x = torch.randn(7, *(1 for _ in q.batch_shape), q.event_shape[1:].numel())
    found = _numbers(single, value.float(), x.float())
    found |= {"rsample": single.rsample(), "image(x).rsample": single.image(x.float()).rsample()}
    for name, number in found.items():
        contract.equal(f"`{name}` keeps the dtype of the arguments", number.dtype, torch.float32)
    close = Contract(contract.owner, dtype=torch.float32).close
    for name, number in _numbers(exact, value, x).items():
        close(f"`{name}` in single precision is close to double", found[name], number, False)
    meta, _ = with_leaves(fresh(q), lambda tensor: tensor.to("meta"))
    meta._validate_args = False  # values are not there
    for name, number in _numbers(meta, *(v.to("meta", q.mean.dtype) for v in (value, x))).items():
        contract.equal(f"`{name}` stays on the device meta", number.device.type, "meta")


def check_in_pyro(contract: Contract, q: Any) -> None:
    """Check values at sample sites, and the wrappers of Pyro."""
    value = pyro.sample("weight", q)
    contract.equal("a value at a sample site is an ordinary tensor", type(value), Tensor)
    if not q.batch_shape and has_expand(q):
        with pyro.plate("members", 3):
            value = pyro.sample("weight", q)
        contract.equal("a plate expands", tuple(value.shape), (3, *q.event_shape))
    if q.batch_shape and has_density(q):
        value = q.sample()
        density, close = q.log_prob(value), contract.close
        close("`to_event` sums the density", q.to_event(1).log_prob(value), density.sum(-1))
        close("`mask` drops the density", q.mask(False).log_prob(value), 0 * density)
        repeated = q.expand_by([2]).log_prob(value)
        close("`expand_by` repeats", repeated, density.expand(2, *density.shape))
