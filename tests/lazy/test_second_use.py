"""When a site's draw is delayed, and what is refused after outputs were drawn in a weight's place."""

import copy
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.weights.lazy import DelayDraws, LazyWeight
from pyro_structvi.weights.site_role import SiteRole, SiteUse
from tests.lazy_weights import IN, OUT, bias_normal, is_ordinary, k_tied_normal, lazy


def guide(q):
    """Return a guide of one site whose draw may be delayed."""
    infer = SiteRole(use=SiteUse("layer.weight", count=1)).as_infer()
    return lambda *args: pyro.sample("layer.weight", q, infer=infer)


SECOND_USES = {
    "another layer": lambda w: F.linear(torch.ones(5, IN), w),
    "a bias": lambda w: F.linear(torch.ones(5, IN), torch.ones(OUT, IN), w[:, 0]),
    "a product": lambda w: torch.ones(5, IN) @ w.t(),
    "a norm without gradients": lambda w: torch.no_grad()(torch.linalg.vector_norm)(w),
    "a copy": lambda w: copy.deepcopy(w),
    "a pickle": lambda w: pickle.dumps(w),
    "a detached copy": lambda w: w.detach(),
    "a write": lambda w: w.mul_(2),
    "numbers": lambda w: w.tolist(),
    "a draw": lambda w: w.draw(),
}
MESSAGE = r"the weight at site 'layer\.weight' more often .*guide\.initialize.*local_reparam"


def test_a_second_use_is_an_error_that_names_the_site():
    """Without any handler around: what matters is the weight, not the way it came in."""
    for use in SECOND_USES.values():
        weight = lazy(name="layer.weight")
        F.linear(torch.randn(5, IN), weight)
        with pytest.raises(RuntimeError, match=MESSAGE):
            use(weight)
        assert not weight.is_drawn
    bias = lazy(bias_normal(), "layer.bias")
    F.linear(torch.randn(5, IN), lazy(), bias)
    with pytest.raises(RuntimeError, match=r"site 'layer\.bias'"):
        bias + 1
    with pytest.raises(RuntimeError, match=r"site 'layer\.bias'"):
        F.linear(torch.randn(5, IN), lazy(), bias)


def test_a_density_may_see_a_weight_independent_of_the_outputs():
    weight = lazy(q := k_tied_normal(), name="layer.weight")
    F.linear(torch.randn(5, IN), weight)
    value = weight.draw_for_density()
    assert torch.equal(value, weight.draw_for_density())
    assert value.shape == q.event_shape
    with pytest.raises(RuntimeError, match=MESSAGE):  # the model still may not
        weight.draw()


def test_only_a_counted_site_gives_a_lazy_weight_where_the_objective_says_so():
    q, given = k_tied_normal(), torch.zeros(OUT, IN)
    role = SiteRole(use=SiteUse("site", count=1)).as_infer()
    assert is_ordinary(guide(q)())
    with DelayDraws():
        value = guide(q)()
        assert is_ordinary(pyro.sample("of no role", k_tied_normal()))
        assert is_ordinary(pyro.sample("of pyro", dist.Normal(torch.zeros(2), 1.0), infer=role))
        assert pyro.sample("with a value", k_tied_normal(), obs=given, infer=role) is given
        with pyro.plate("members", 3):
            members = guide(q)()
    assert type(value) is LazyWeight
    assert not value.is_drawn
    assert value.distribution is q
    assert value.use.name == "layer.weight"
    assert is_ordinary(members)
    assert members.shape == (3, OUT, IN)
