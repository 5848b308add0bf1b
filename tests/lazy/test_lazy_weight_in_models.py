"""A lazy weight in a model: inputs that do not fit, counting its uses, gradients."""

import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.distributions import MeanFieldNormal
from pyro_structvi.weights.placeholders import CountedWeight
from pyro_structvi.weights.site_role import SiteUse
from tests.lazy_weights import IN, OUT, is_ordinary, k_tied_normal, lazy


@pytest.mark.parametrize(
    ("kind", "own", "other"),
    [
        ("dtype", "torch.float64", torch.float32),
        ("dtype", "torch.float64", torch.int64),
        ("device", "'cpu'", "meta"),
    ],
)
def test_an_input_of_another_dtype_or_device_is_explained(kind, own, other):
    expected = own.strip("'")
    message = rf"weight at site 'layer\.weight' must have {kind} {expected}, but got {other}\..*"
    with pytest.raises(ValueError, match=rf"{message}`x\.to\({own}\)`"):
        F.linear(torch.ones(5, IN, **{kind: other}), lazy(name="layer.weight"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_takes_inputs_of_either_dtype(dtype):
    loc = torch.ones(OUT, IN, dtype=torch.float32)
    weight = lazy(MeanFieldNormal(loc, loc / 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = F.linear(torch.ones(20_000, IN, dtype=dtype), weight)
    assert outputs.dtype == torch.bfloat16
    assert not weight.is_drawn
    # Mean 3 and variance 0.75, within what eight bits of mantissa and 80 000 draws allow.
    assert outputs.double().mean().item() == pytest.approx(3.0, abs=0.03)
    assert outputs.double().var().item() == pytest.approx(0.75, rel=0.05)


X = torch.ones(5, IN).double()
COUNTS = {
    "none": (lambda w: (w.shape, w.dtype, len(w)), 0),
    "a layer": (lambda w: F.linear(X, w), 1),
    "a layer by keyword": (lambda w: F.linear(input=X, weight=w), 1),
    "two layers": (lambda w: [F.linear(X, w) for _ in range(2)], 2),
    "twice in one call": (lambda w: w @ w.t(), 2),
    "a list": (lambda w: torch.stack([w, w, w]), 3),
    "differentiated": (lambda w: torch.enable_grad()(F.linear)(X, w), 2),
    "mapped": (lambda w: torch.vmap(lambda row: F.linear(row, w))(X), 2),
}


def test_uses_are_counted():
    for name, (model, count) in COUNTS.items():
        use = SiteUse("weight")
        with torch.no_grad():  # as in the run that counts
            model(CountedWeight(torch.randn(OUT, IN), use))
        assert use.count == count, name


def test_a_counted_weight_acts_as_its_value():
    value, x = torch.randn(OUT, IN), torch.randn(5, IN)
    weight = CountedWeight(value, SiteUse("weight"))
    assert (weight.shape, weight.dtype, weight.device) == (value.shape, value.dtype, value.device)
    assert torch.equal(F.linear(x, weight), F.linear(x, value))
    assert is_ordinary(weight + 0)


def test_a_draw_first_seen_without_gradients_has_them_all_the_same():
    """A log of a norm under ``no_grad`` must not cut the parameters off."""
    q = k_tied_normal()
    weight = lazy(q)
    with torch.no_grad():
        weight.norm()
        assert not (lazy(q) + 0).requires_grad
    loss = (torch.randn(5, IN) @ weight.t()).sum()
    assert loss.requires_grad
    assert torch.autograd.grad(loss, q.loc)[0].ne(0).all()
