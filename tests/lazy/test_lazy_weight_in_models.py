"""A lazy weight in a model: its bias, second uses, sites, inputs, counting, gradients."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine

from pyro_structvi.distributions import MeanFieldNormal
from pyro_structvi.lazy.counting import CountedWeight
from pyro_structvi.lazy.messenger import DelayDraws
from pyro_structvi.lazy.weight import LazyWeight, SiteUse
from tests import dense_oracles as dense
from tests.distributions.cases import CASES, VECTOR
from tests.lazy_weights import (
    CONVOLUTIONS,
    HANDLERS,
    IN,
    OUT,
    bias_normal,
    inside_model,
    is_ordinary,
    k_tied_normal,
    lazy,
    narrow_normal,
)
from tests.statistics import assert_mean, assert_moments

# ---- a lazy bias ---------------------------------------------------------------------------------


VECTOR_CASES = [case for case in CASES if VECTOR in case.event_shapes]


@pytest.mark.parametrize("bias_case", VECTOR_CASES, ids=lambda case: f"bias {case.name}")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_lazy_bias_adds_its_law_to_the_outputs(case, bias_case):
    """Weight and bias are drawn as outputs: exact for each example, independent over examples."""
    q, prior = case.make((), (OUT, IN), torch.float64), bias_case.make((), (OUT,), torch.float64)
    x = torch.randn(2, IN)
    weight, bias = lazy(q), lazy(prior, "bias")
    outputs = F.linear(x.repeat(20_000, 1), weight, bias).reshape(20_000, 2, OUT)
    assert not weight.is_drawn
    assert not bias.is_drawn
    weight_part = dense.image_covariance(x, case.covariance(q), OUT)
    covariance = weight_part + bias_case.covariance(prior)
    mean = dense.image_mean(x, q.loc, 2) + prior.loc
    assert_moments(outputs, mean, torch.block_diag(*covariance))


def layers_with_positions():
    """Return calls that show their bias, with the channels as the second dimension."""

    def linear(x, bias):
        return F.linear(x, lazy(narrow_normal(OUT, 2)), bias).movedim(-1, 1)

    def convolution(dim):
        def call(x, bias):
            kernel = lazy(narrow_normal(OUT, 2, *(1,) * dim))
            return CONVOLUTIONS[dim](x.movedim(-1, 1), kernel, bias)

        return call

    return {
        "linear": (linear, (6,)),
        "linear, two dimensions": (linear, (3, 2)),
        "conv1d": (convolution(1), (6,)),
        "conv2d": (convolution(2), (3, 2)),
        "conv3d": (convolution(3), (3, 2, 2)),
    }


LAYERS = layers_with_positions()


@pytest.mark.parametrize(("layer", "space"), LAYERS.values(), ids=LAYERS.keys())
def test_the_positions_of_an_example_share_the_draw_of_the_bias(layer, space):
    prior, count = bias_normal(), 10_000
    bias = lazy(prior, "bias")
    outputs = layer(torch.randn(count, *space, 2), bias).flatten(2)
    assert outputs.shape == (count, OUT, torch.Size(space).numel())
    assert not bias.is_drawn
    assert (outputs - outputs[..., :1]).abs().max() < 1e-7
    # Each example is one draw. Pairs of examples are independent.
    pairs = outputs[..., 0].reshape(count // 2, 2, OUT)
    covariance = torch.diag(prior.scale.square())
    assert_moments(pairs, prior.loc.expand(2, OUT), torch.block_diag(covariance, covariance))


@pytest.mark.parametrize("dim", CONVOLUTIONS)
def test_the_positions_of_an_unbatched_input_share_the_draw_of_the_bias(dim):
    kernel, bias = lazy(narrow_normal(OUT, 2, *(1,) * dim)), lazy(bias_normal(), "bias")
    outputs = CONVOLUTIONS[dim](torch.randn(2, *(3,) * dim), kernel, bias)
    assert outputs.shape == (OUT, *(3,) * dim)
    outputs = outputs.flatten(1)
    assert (outputs - outputs[:, :1]).abs().max() < 1e-7
    assert (outputs[:, 0] != bias.distribution.loc).all()
    assert not bias.is_drawn


def test_positions_get_weight_noise_of_their_own():
    q, x = k_tied_normal(), torch.randn(IN).expand(5, 2, IN)
    outputs = F.linear(x, lazy(q))
    assert (outputs[:, 0] != outputs[:, 1]).all()


# ---- a second use --------------------------------------------------------------------------------


def guide(q):
    """Return a guide of one site that puts its draw off."""
    q.site_use = SiteUse("layer.weight", count=1)
    return lambda *args: pyro.sample("layer.weight", q)


def replayed(model, q, *args):
    with DelayDraws():
        trace = poutine.trace(guide(q)).get_trace()
    return poutine.replay(model, trace=trace)(*args)


def sample_weight():
    return pyro.sample("layer.weight", dist.Normal(0.0, 1.0).expand((OUT, IN)).to_event(2))


SECOND_USES = {
    "another layer": F.linear,
    "a product": lambda x, w: x @ w.t(),
    "a print": lambda x, w: repr(w),
}


@pytest.mark.parametrize("second_use", SECOND_USES.values(), ids=SECOND_USES.keys())
def test_a_second_use_in_the_model_is_an_error_that_names_the_site(second_use):
    def model(x):
        weight = sample_weight()
        F.linear(x, weight)
        second_use(x, weight)

    message = r"the weight at site 'layer\.weight' more often .*guide\.initialize.*local_reparam"
    with pytest.raises(RuntimeError, match=message):
        replayed(model, k_tied_normal(), torch.randn(5, IN))


@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS.keys())
def test_a_second_use_is_an_error_however_the_weight_came_in(handler):
    weight = lazy(name="layer.weight")
    with handler():
        F.linear(torch.randn(5, IN), weight)
        with pytest.raises(RuntimeError, match=r"site 'layer\.weight'"):
            weight + 1


def test_a_second_use_of_a_bias_in_the_model_is_an_error():
    bias = lazy(bias_normal(), "layer.bias")
    with inside_model():
        F.linear(torch.randn(5, IN), lazy(), bias)
        with pytest.raises(RuntimeError, match=r"site 'layer\.bias'"):
            bias + 1
        with pytest.raises(RuntimeError, match=r"site 'layer\.bias'"):
            F.linear(torch.randn(5, IN), lazy(), bias)


def test_a_draw_after_the_model_is_allowed():
    """A log density of Pyro's own ELBOs, or a print, sees a weight independent of the outputs."""

    def model(x):
        weight = sample_weight()
        F.linear(x, weight)
        return weight

    weight = replayed(model, k_tied_normal(), torch.randn(5, IN))
    assert not weight.is_drawn
    assert (weight - weight).eq(0).all()
    assert weight.is_drawn


def test_a_model_that_draws_may_use_the_weight_again():
    def model(x):
        weight = sample_weight()
        return x @ weight.t(), weight.sum(), weight

    product, total, weight = replayed(model, k_tied_normal(), x := torch.randn(5, IN))
    assert torch.equal(product, x @ weight.draw().t())
    assert torch.equal(total, weight.draw().sum())


# ---- at a site -----------------------------------------------------------------------------------


def test_a_site_that_a_guide_marked_gives_a_lazy_weight():
    q = k_tied_normal()
    assert is_ordinary(guide(q)())  # only an objective that says so lets it wait
    with DelayDraws():
        value = guide(q)()
    assert type(value) is LazyWeight
    assert not value.is_drawn
    assert value.distribution is q


def test_a_marked_distribution_still_draws_samples_of_a_shape():
    q = k_tied_normal()
    q.site_use = SiteUse("weight", count=1)
    with DelayDraws():
        assert is_ordinary(q((2,)))
        assert is_ordinary(q.rsample())


def test_a_marked_distribution_draws_in_a_plate():
    q = k_tied_normal()
    with pyro.plate("members", 3), DelayDraws():
        value = guide(q)()
    assert is_ordinary(value)
    assert value.shape == (3, OUT, IN)


@pytest.mark.parametrize("elbo", [pyro.infer.Trace_ELBO, pyro.infer.TraceMeanField_ELBO])
def test_the_elbos_of_pyro_draw_it_and_stay_unbiased(elbo):
    q, x, y = k_tied_normal(), torch.randn(5, IN), torch.randn(5, OUT)

    def model():
        mean = F.linear(x, sample_weight())
        pyro.sample("y", dist.Normal(mean, 1.0).to_event(2), obs=y)

    losses = [elbo().differentiable_loss(model, guide(q)).detach() for _ in range(500)]
    covariance = dense.k_tied_covariance(q.row_scale, q.column_scale)
    variance = dense.image_covariance(x, covariance, OUT).diagonal(dim1=-2, dim2=-1)
    squared_error = (y - dense.image_mean(x, q.loc, 2)).square() + variance
    kl = dense.kl_to_independent_normals(q.loc, covariance, torch.zeros(()), torch.ones(()), 2)
    expected = (squared_error + math.log(2 * math.pi)).sum() / 2 + kl
    assert_mean(torch.stack(losses).unsqueeze(-1), expected)


# ---- inputs that do not fit ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_an_input_of_another_dtype_is_explained(dtype):
    message = (
        rf"weight at site 'layer\.weight' must have dtype torch\.float64, but got {dtype}\..*"
        r"`x\.to\(torch\.float64\)`"
    )
    with pytest.raises(ValueError, match=message):
        F.linear(torch.ones(5, IN, dtype=dtype), lazy(name="layer.weight"))


def test_an_input_on_another_device_is_explained():
    message = r"site 'layer\.weight' must have device cpu, but got meta\. .*`x\.to\('cpu'\)`"
    with pytest.raises(ValueError, match=message):
        F.linear(torch.ones(5, IN, device="meta"), lazy(name="layer.weight"))


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


# ---- counting uses -------------------------------------------------------------------------------

COUNTS = {
    "none": (lambda w: (w.shape, w.dtype, len(w)), 0),
    "a layer": (lambda w: F.linear(torch.ones(5, IN), w), 1),
    "a layer by keyword": (lambda w: F.linear(input=torch.ones(5, IN), weight=w), 1),
    "two layers": (lambda w: [F.linear(torch.ones(5, IN), w) for _ in range(2)], 2),
    "twice in one call": (lambda w: w @ w.t(), 2),
    "a list": (lambda w: torch.stack([w, w, w]), 3),
    "a layer and a print": (lambda w: (F.linear(torch.ones(5, IN), w), repr(w)), 2),
}


@pytest.mark.parametrize(("model", "count"), COUNTS.values(), ids=COUNTS.keys())
def test_uses_are_counted(model, count):
    use = SiteUse("weight")
    with torch.no_grad():  # as in the run that counts
        model(CountedWeight(torch.randn(OUT, IN), use))
    assert use.count == count


def test_a_use_that_is_differentiated_or_mapped_counts_twice():
    x = torch.ones(5, IN)
    for model in (
        lambda w: torch.enable_grad()(F.linear)(x, w),
        lambda w: torch.vmap(lambda row: F.linear(row, w))(x),
    ):
        use = SiteUse("weight")
        with torch.no_grad():
            model(CountedWeight(torch.randn(OUT, IN), use))
        assert use.count == 2


def test_a_counted_weight_acts_as_its_value():
    value, x = torch.randn(OUT, IN), torch.randn(5, IN)
    weight = CountedWeight(value, SiteUse("weight"))
    assert (weight.shape, weight.dtype, weight.device) == (value.shape, value.dtype, value.device)
    assert torch.equal(F.linear(x, weight), F.linear(x, value))
    assert is_ordinary(weight + 0)


def test_counting_starts_anew():
    use = SiteUse("weight", count=5)
    CountedWeight(torch.zeros(2), use)
    assert use.count == 0


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2], ids=["outputs", "draw"])
def test_gradients_reach_the_parameters(count):
    q = k_tied_normal()
    loss = F.linear(torch.randn(5, IN), lazy(q, count=count)).square().sum()
    for gradient in torch.autograd.grad(loss, [q.loc, q.row_scale, q.column_scale]):
        assert gradient.ne(0).all()


@pytest.mark.parametrize("count", [1, 2], ids=["outputs", "draw"])
def test_gradients_reach_the_input(count):
    x = torch.randn(5, IN, requires_grad=True)
    F.linear(x, lazy(count=count)).sum().backward()
    assert x.grad.ne(0).all()


def test_a_draw_first_seen_without_gradients_has_them_all_the_same():
    """A log of a norm under ``no_grad`` must not cut the parameters off."""
    q = k_tied_normal()
    weight = lazy(q)
    with torch.no_grad():
        weight.norm()
    loss = (torch.randn(5, IN) @ weight.t()).sum()
    assert loss.requires_grad
    assert torch.autograd.grad(loss, q.loc)[0].ne(0).all()


def test_a_weight_made_without_gradients_has_none():
    q = k_tied_normal()
    with torch.no_grad():
        weight = lazy(q)
        assert not (weight + 0).requires_grad


def quadratic_gradients(count, draws=2000):
    """Return draws of the gradient of a quadratic loss on a batch of 64, and its expectation."""
    torch.manual_seed(0)  # the same batch and parameters for every count
    x, y = torch.randn(64, IN), torch.randn(64, OUT)
    loc, scale = torch.randn(OUT, IN), torch.rand(OUT, IN) + 0.2
    parameters = [loc.requires_grad_(), scale.requires_grad_()]
    expected_loss = ((x @ loc.mT - y).square() + x.square() @ scale.square().mT).mean()
    expected = torch.autograd.grad(expected_loss, parameters)
    sampled = []
    for _ in range(draws):
        outputs = F.linear(x, lazy(MeanFieldNormal(loc, scale), count=count))
        sampled.append(torch.stack(torch.autograd.grad((outputs - y).square().mean(), parameters)))
    return torch.stack(sampled), torch.stack(expected)


@pytest.mark.parametrize("count", [1, 2], ids=["outputs", "draw"])
def test_both_gradient_estimators_are_unbiased(count):
    assert_mean(*quadratic_gradients(count))


def test_gradients_by_outputs_have_less_variance():
    """Noise of its own for each example of a batch of 64 averages out; a drawn weight's does not.

    The ratios of variances are about 12 for loc and 20 for scale here, and 2000 draws estimate
    them to within some 10 %.
    """
    by_outputs, by_draws = (quadratic_gradients(count)[0].var(0) for count in (1, 2))
    ratios = by_draws.sum((-2, -1)) / by_outputs.sum((-2, -1))
    assert (ratios > 5).all()
