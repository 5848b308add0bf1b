"""When a site's draw is delayed, and what is refused after outputs were drawn in a weight's place."""

import copy
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine

from pyro_structvi.weights.lazy import DelayDraws, LazyWeight
from pyro_structvi.weights.site_role import SiteRole, SiteUse
from tests import dense_oracles as dense
from tests.exact_means import exact_mean
from tests.lazy_weights import IN, OUT, bias_normal, is_ordinary, k_tied_normal, lazy
from tests.unit_noise import assert_close

# ---- a second use --------------------------------------------------------------------------------


def guide(q):
    """Return a guide of one site whose draw may be delayed."""
    infer = SiteRole(use=SiteUse("layer.weight", count=1)).as_infer()
    return lambda *args: pyro.sample("layer.weight", q, infer=infer)


def replayed(model, q, *args):
    with DelayDraws():
        trace = poutine.trace(guide(q)).get_trace()
    return poutine.replay(model, trace=trace)(*args)


def sample_weight():
    return pyro.sample("layer.weight", dist.Normal(0.0, 1.0).expand((OUT, IN)).to_event(2))


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


@pytest.mark.parametrize("use", SECOND_USES.values(), ids=SECOND_USES.keys())
def test_a_second_use_is_an_error_that_names_the_site(use):
    """Without any handler around: what matters is the weight, not the way it came in."""
    weight = lazy(name="layer.weight")
    F.linear(torch.randn(5, IN), weight)
    with pytest.raises(RuntimeError, match=MESSAGE):
        use(weight)
    assert not weight.is_drawn


def test_a_second_use_of_a_replayed_weight_is_an_error():
    with pytest.raises(RuntimeError, match=MESSAGE):
        replayed(
            lambda: F.linear(torch.ones(5, IN), w := sample_weight()) + w.sum(), k_tied_normal()
        )


def test_a_second_use_of_a_bias_is_an_error():
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


# ---- at a site -----------------------------------------------------------------------------------


def test_a_counted_site_gives_a_lazy_weight_only_where_the_objective_says_so():
    q = k_tied_normal()
    assert is_ordinary(guide(q)())
    with DelayDraws():
        value = guide(q)()
    assert type(value) is LazyWeight
    assert not value.is_drawn
    assert value.distribution is q
    assert value.use.name == "layer.weight"


def test_other_sites_are_drawn_under_the_handler():
    role = SiteRole(use=SiteUse("site", count=1)).as_infer()
    given = torch.zeros(OUT, IN)
    with DelayDraws():
        assert is_ordinary(pyro.sample("of no role", k_tied_normal()))
        assert is_ordinary(pyro.sample("of pyro", dist.Normal(torch.zeros(2), 1.0), infer=role))
        assert pyro.sample("with a value", k_tied_normal(), obs=given, infer=role) is given


def test_a_site_in_a_plate_is_drawn():
    q = k_tied_normal()
    with DelayDraws(), pyro.plate("members", 3):
        value = guide(q)()
    assert is_ordinary(value)
    assert value.shape == (3, OUT, IN)


@pytest.mark.parametrize("elbo", [pyro.infer.Trace_ELBO, pyro.infer.TraceMeanField_ELBO])
def test_the_elbos_of_pyro_draw_it_and_have_the_closed_forms_mean(elbo):
    q, x, y = k_tied_normal(), torch.randn(5, IN), torch.randn(5, OUT)

    def model():
        mean = F.linear(x, sample_weight())
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(2), obs=y)

    covariance = dense.k_tied_covariance(q.row_scale, q.column_scale)
    variance = dense.image_covariance(x, covariance, OUT).diagonal(dim1=-2, dim2=-1)
    squared_error = (y - dense.image_mean(x, q.loc, 2)).square() + variance
    kl = dense.kl_to_independent_normals(q.loc, covariance, torch.zeros(()), torch.ones(()), 2)
    expected = (squared_error + math.log(2 * math.pi)).sum() / 2 + kl
    assert_close(exact_mean(lambda: elbo().differentiable_loss(model, guide(q))), expected.detach())
