"""When a weight is drawn, as what, and that the outputs it gives have the right law."""

import copy
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.replay_messenger import ReplayMessenger
from pyro.poutine.substitute_messenger import SubstituteMessenger

from pyro_structvi.distributions import KTiedNormal, MeanFieldNormal
from pyro_structvi.lazy_weight import CountedWeight, LazyWeight, SiteUse
from pyro_structvi.linear_maps import ConvolutionMap
from tests import dense_oracles as dense
from tests.distributions.cases import CASES
from tests.statistics import assert_mean, assert_moments

OUT, IN = 4, 3
KERNEL = (OUT, 2, 3, 2)
CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def k_tied_normal(shape=(OUT, IN)):
    """Return a k-tied Normal with random arguments that are leaves."""
    size = torch.Size(shape[1:]).numel()
    arguments = torch.randn(shape), torch.rand(shape[0], 2) + 0.1, torch.rand(size, 2) + 0.1
    return KTiedNormal(*(argument.requires_grad_() for argument in arguments))


def bias_normal():
    return MeanFieldNormal(torch.randn(OUT), torch.full((OUT,), 0.5))


def narrow_normal(*shape):
    """Return a weight of nearly zero, so that what a layer adds to it shows."""
    return MeanFieldNormal(torch.zeros(shape), torch.tensor(1e-9))


def lazy(distribution=None, name="weight", count=1, local_reparam=True):
    use = SiteUse(name, local_reparam=local_reparam, count=count)
    return LazyWeight(k_tied_normal() if distribution is None else distribution, use)


def convolution_weight(dim=2, **options):
    return lazy(k_tied_normal((OUT, 2, 3, 2, 2)[: dim + 2]), **options)


HANDLERS = {
    "replay": lambda: ReplayMessenger(trace=poutine.Trace()),
    "condition": lambda: ConditionMessenger(data={}),
    "substitute": lambda: SubstituteMessenger(data={}),
}


def inside_model():
    """Act as code of a model that the values of a guide were handed to."""
    return HANDLERS["replay"]()


def is_ordinary(tensor):
    return type(tensor) is torch.Tensor


# ---- what is known without a draw ----------------------------------------------------------------

METADATA = {
    "shape": (lambda w: w.shape, (OUT, IN)),
    "size": (lambda w: w.size(), (OUT, IN)),
    "size of a dimension": (lambda w: w.size(-1), IN),
    "len": (len, OUT),
    "ndim": (lambda w: w.ndim, 2),
    "dim": (lambda w: w.dim(), 2),
    "numel": (lambda w: w.numel(), OUT * IN),
    "nelement": (lambda w: w.nelement(), OUT * IN),
    "dtype": (lambda w: w.dtype, torch.float64),
    "device": (lambda w: w.device, torch.device("cpu")),
    "layout": (lambda w: w.layout, torch.strided),
    "is_floating_point": (lambda w: w.is_floating_point(), True),
    "is_complex": (lambda w: w.is_complex(), False),
    "is_cuda": (lambda w: w.is_cuda, False),
    "is_sparse": (lambda w: w.is_sparse, False),
    "is_quantized": (lambda w: w.is_quantized, False),
    "isinstance": (lambda w: isinstance(w, torch.Tensor), True),
    "is_tensor": (torch.is_tensor, True),
    "hash": (lambda w: hash(w) == id(w), True),
}


@pytest.mark.parametrize(("ask", "answer"), METADATA.values(), ids=METADATA.keys())
def test_metadata_is_known_without_a_draw(ask, answer):
    weight = lazy()
    assert ask(weight) == answer
    assert not weight.is_drawn


def test_it_has_the_dtype_of_its_distribution():
    scale = torch.ones(2, 3, dtype=torch.float32)
    assert lazy(MeanFieldNormal(torch.zeros_like(scale), scale)).dtype == torch.float32


# ---- outputs instead of a draw -------------------------------------------------------------------

LINEAR_CALLS = {
    "positional": lambda x, w, b: F.linear(x, w, b),
    "bias by keyword": lambda x, w, b: F.linear(x, w, bias=b),
    "all by keyword": lambda x, w, b: F.linear(bias=b, weight=w, input=x),
    "without bias": lambda x, w, b: F.linear(x, w),
    "by a module": lambda x, w, b: torch.func.functional_call(
        torch.nn.Linear(IN, OUT), {"weight": w, "bias": b}, x
    ),
}


@pytest.mark.parametrize("call", LINEAR_CALLS.values(), ids=LINEAR_CALLS.keys())
@pytest.mark.parametrize("lead", [(), (5,), (5, 2)])
def test_a_linear_layer_gets_outputs(call, lead):
    weight = lazy()
    outputs = call(torch.randn(*lead, IN), weight, torch.randn(OUT))
    assert is_ordinary(outputs)
    assert outputs.shape == (*lead, OUT)
    assert not weight.is_drawn


@pytest.mark.parametrize("dim", CONVOLUTIONS)
@pytest.mark.parametrize("lead", [(), (5,)], ids=["unbatched", "batched"])
@pytest.mark.parametrize("keywords", [False, True])
def test_a_convolution_gets_outputs(dim, lead, keywords):
    weight, x, bias = convolution_weight(dim), torch.randn(*lead, 2, *(5,) * dim), torch.zeros(OUT)
    if keywords:
        outputs = CONVOLUTIONS[dim](bias=bias, padding=1, weight=weight, input=x)
    else:
        outputs = CONVOLUTIONS[dim](x, weight, bias, 1, 1)
    expected = CONVOLUTIONS[dim](x, torch.zeros(weight.shape), bias, 1, 1)
    assert is_ordinary(outputs)
    assert outputs.shape == expected.shape
    assert not weight.is_drawn


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_of_a_linear_layer_have_the_exact_law(case):
    """The same three examples 20 000 times: independent draws, and of different examples too."""
    q, x, bias = case.make((), (OUT, IN), torch.float64), torch.randn(3, IN), torch.randn(OUT)
    outputs = F.linear(x.repeat(20_000, 1), lazy(q), bias).reshape(20_000, 3, OUT)
    covariance = dense.image_covariance(x, case.covariance(q), OUT)
    mean = dense.image_mean(x, q.loc, 2) + bias
    assert_moments(outputs, mean, torch.block_diag(*covariance))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_of_a_convolution_have_their_exact_variances(case):
    """Positions are independent here, which is the stated approximation; margins are exact."""
    q, x = case.make((), KERNEL, torch.float64), torch.randn(1, 2, 4, 3)
    outputs = F.conv2d(x.repeat(20_000, 1, 1, 1), lazy(q))
    mean, variance = dense.convolution_moments(x, q.loc, case.covariance(q))
    assert_moments(outputs, mean[0], torch.diag(variance.flatten()))


# ---- one draw, kept ------------------------------------------------------------------------------

ORDINARY = {
    "clone": lambda w: w.clone(),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "deepcopy": lambda w: copy.deepcopy(w.detach()),
    "copy": copy.copy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "t()": lambda w: w.t().t(),
    "mT": lambda w: w.mT.mT,
    "indexing": lambda w: w[:],
    "view": lambda w: w.view(-1).view(OUT, IN),
    "reshape": lambda w: w.reshape(-1).reshape(OUT, IN),
    "matmul": lambda w: w @ torch.eye(IN),
    "matmul from the right": lambda w: torch.eye(OUT) @ w,
    "einsum": lambda w: torch.einsum("oi->oi", w),
    "add": lambda w: w + 0,
    "iteration": lambda w: torch.stack(list(w)),
    "stack": lambda w: torch.stack([w, w])[1],
    "cat": lambda w: torch.cat((w, w))[OUT:],
    "where": lambda w: torch.where(torch.ones(OUT, IN) > 0, input=w, other=torch.zeros(())),
    "to a dtype": lambda w: w.to(torch.float64),
    "numpy": lambda w: torch.from_numpy(w.detach().numpy()),
    "draw": lambda w: w.draw(),
    "list": lambda w: torch.tensor(w.tolist()),
}


@pytest.mark.parametrize("use", ORDINARY.values(), ids=ORDINARY.keys())
def test_any_other_use_sees_one_ordinary_draw(use):
    weight = lazy()
    seen = use(weight)
    assert is_ordinary(seen)
    assert weight.is_drawn
    assert torch.equal(seen, weight.draw())


def test_deepcopy_of_a_weight_without_gradient_is_its_draw():
    weight = lazy(MeanFieldNormal(torch.zeros(OUT, IN), torch.tensor(1.0)))
    twin = copy.deepcopy(weight)
    assert is_ordinary(twin)
    assert torch.equal(twin, weight.draw())


def test_draws_agree_within_one_call():
    weight = lazy()
    assert (weight - weight).eq(0).all()
    first, second = torch.stack([weight, weight])
    assert torch.equal(first, second)


@pytest.mark.parametrize("show", [repr, str, lambda w: f"{w}", lambda w: f"{w.sum():.3f}"])
def test_it_prints_as_its_draw(show):
    weight = lazy()
    assert show(weight) == show(weight.draw())


def test_writing_into_it_changes_the_draw():
    weight = lazy(MeanFieldNormal(torch.zeros(OUT, IN), torch.tensor(1.0)))
    weight[0] = 7.0
    assert weight.draw()[0].eq(7).all()
    assert weight.mul_(2)[0].eq(14).all()


def test_new_weights_have_new_draws():
    q = k_tied_normal()
    assert (lazy(q) != lazy(q).draw()).all()


def test_draws_have_the_law_of_the_distribution():
    q = k_tied_normal()
    draws = torch.stack([lazy(q).detach() for _ in range(4000)])
    covariance = dense.k_tied_covariance(q.row_scale, q.column_scale)
    assert_moments(draws, q.loc, covariance)


def test_it_has_the_value_of_its_draw_where_torch_function_is_switched_off():
    weight = lazy()
    with torch._C.DisableTorchFunctionSubclass():
        seen = weight + 0
    assert is_ordinary(seen)
    assert torch.equal(seen, weight.draw())


# ---- what makes a linear map draw ----------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"count": None}, {"count": 0}, {"count": 2}, {"local_reparam": False}],
    ids=["not counted", "not used", "used twice", "switched off"],
)
def test_a_weight_that_may_not_give_outputs_is_drawn(options):
    x, bias = torch.randn(5, IN), torch.randn(OUT)
    weight = lazy(**options)
    outputs = F.linear(x, weight, bias)
    assert weight.is_drawn
    assert torch.equal(outputs, F.linear(x, weight.draw(), bias))
    kernel, image = convolution_weight(**options), torch.randn(5, 2, 4, 4)
    outputs = F.conv2d(image, kernel, padding=1)
    assert torch.equal(outputs, F.conv2d(image, kernel.draw(), padding=1))


@pytest.mark.parametrize("lead", [(), (5,)])
def test_exact_gives_outputs_where_an_example_has_one_position(lead):
    weight = lazy(local_reparam="exact")
    F.linear(torch.randn(*lead, IN), weight)
    assert not weight.is_drawn


def test_exact_draws_where_an_example_has_several_positions():
    weight, x = lazy(local_reparam="exact"), torch.randn(5, 2, IN)
    assert torch.equal(F.linear(x, weight), F.linear(x, weight.draw()))


@pytest.mark.parametrize("dim", CONVOLUTIONS)
def test_exact_draws_for_a_convolution(dim):
    weight = convolution_weight(dim, local_reparam="exact")
    x = torch.randn(5, 2, *(4,) * dim)
    convolution = CONVOLUTIONS[dim]
    assert torch.equal(convolution(x, weight), convolution(x, weight.draw()))


def test_exact_draws_a_bias_of_a_layer_with_positions_as_well():
    weight, bias = lazy(local_reparam="exact"), lazy(bias_normal(), "bias", local_reparam="exact")
    x = torch.randn(5, 2, IN)
    assert torch.equal(F.linear(x, weight, bias), F.linear(x, weight.draw(), bias.draw()))


def test_a_lazy_input_is_drawn():
    """A weight as the *input* of a layer, as in a product of two weights."""
    lazy_input, plain = lazy(), torch.randn(2, IN)
    assert torch.equal(F.linear(lazy_input, plain), F.linear(lazy_input.draw(), plain))


def test_a_lazy_input_draws_a_lazy_weight():
    lazy_input, weight = lazy(), lazy()
    expected = F.linear(lazy_input, weight)
    assert torch.equal(expected, F.linear(lazy_input.draw(), weight.draw()))


def test_a_lazy_bias_of_an_ordinary_weight_is_drawn():
    bias, x, plain = lazy(bias_normal(), "bias"), torch.randn(5, IN), torch.randn(OUT, IN)
    assert torch.equal(F.linear(x, plain, bias), F.linear(x, plain, bias.draw()))


@pytest.mark.parametrize("options", [{"count": 2}, {"local_reparam": False}])
def test_a_bias_that_may_not_give_outputs_is_drawn(options):
    weight, bias = lazy(narrow_normal(OUT, IN)), lazy(bias_normal(), "bias", **options)
    outputs = F.linear(torch.randn(5, IN), weight, bias)
    assert bias.is_drawn
    assert not weight.is_drawn
    torch.testing.assert_close(outputs, bias.draw().expand(5, OUT), rtol=0, atol=1e-6)


def test_a_bias_is_drawn_where_its_weight_is():
    weight, bias, x = lazy(count=2), lazy(bias_normal(), "bias"), torch.randn(5, IN)
    assert torch.equal(F.linear(x, weight, bias), F.linear(x, weight.draw(), bias.draw()))


@pytest.mark.parametrize("size", [IN, 1])
def test_a_vector_in_the_place_of_a_matrix_is_drawn(size):
    """F.linear takes a vector too, as a layer of one output without a dimension for it."""
    weight, x = lazy(MeanFieldNormal(torch.zeros(size), torch.tensor(1.0))), torch.randn(5, size)
    outputs = F.linear(x, weight)
    assert outputs.shape == (5,)
    assert torch.equal(outputs, F.linear(x, weight.draw()))


class DenseOnly(MeanFieldNormal):
    """A structure without an image under convolutions."""

    def image_under(self, linear_map, x, bias=None):
        if isinstance(linear_map, ConvolutionMap):
            return None
        return super().image_under(linear_map, x, bias)


def dense_only_weight():
    return lazy(DenseOnly(torch.randn(KERNEL), torch.tensor(0.5)))


def test_a_structure_without_an_image_is_drawn():
    weight, x = dense_only_weight(), torch.randn(5, 2, 4, 4)
    assert torch.equal(F.conv2d(x, weight), F.conv2d(x, weight.draw()))


def test_a_structure_without_an_image_is_drawn_with_its_bias_inside_a_model():
    weight, bias, x = dense_only_weight(), lazy(bias_normal(), "bias"), torch.randn(5, 2, 4, 4)
    with inside_model():
        outputs = F.conv2d(x, weight, bias)
    assert torch.equal(outputs, F.conv2d(x, weight.draw(), bias.draw()))


def test_a_weight_that_was_drawn_stays_that_weight_in_a_linear_map():
    weight, x = lazy(), torch.randn(5, IN)
    norm = weight.norm()
    outputs = F.linear(x, weight)
    assert torch.equal(norm, weight.draw().norm())
    assert torch.equal(outputs, F.linear(x, weight.draw()))


def test_a_bias_that_was_drawn_stays_that_bias_in_a_linear_map():
    weight, bias = lazy(narrow_normal(OUT, IN)), lazy(bias_normal(), "bias")
    drawn = bias.clone()
    outputs = F.linear(torch.randn(5, IN), weight, bias)
    torch.testing.assert_close(outputs, drawn.expand(5, OUT), rtol=0, atol=1e-6)


# ---- a lazy bias ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_lazy_bias_adds_its_law_to_the_outputs(case):
    """Weight and bias are drawn as outputs: exact for each example, independent over examples."""
    q, prior, x = case.make((), (OUT, IN), torch.float64), bias_normal(), torch.randn(2, IN)
    weight, bias = lazy(q), lazy(prior, "bias")
    outputs = F.linear(x.repeat(20_000, 1), weight, bias).reshape(20_000, 2, OUT)
    assert not weight.is_drawn
    assert not bias.is_drawn
    weight_part = dense.image_covariance(x, case.covariance(q), OUT)
    covariance = weight_part + torch.diag(prior.scale.square())
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
    return poutine.replay(model, trace=poutine.trace(guide(q)).get_trace())(*args)


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
    value = guide(q)()
    assert type(value) is LazyWeight
    assert not value.is_drawn
    assert value.distribution is q


def test_a_marked_distribution_still_draws_samples_of_a_shape():
    q = k_tied_normal()
    q.site_use = SiteUse("weight", count=1)
    assert is_ordinary(q((2,)))
    assert is_ordinary(q.rsample())


def test_a_marked_distribution_draws_in_a_plate():
    q = k_tied_normal()
    with pyro.plate("members", 3):
        value = guide(q)()
    assert is_ordinary(value)
    assert value.shape == (3, OUT, IN)


@pytest.mark.parametrize("elbo", [pyro.infer.Trace_ELBO, pyro.infer.TraceMeanField_ELBO])
def test_the_elbos_of_pyro_draw_it_for_densities_and_stay_unbiased(elbo):
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
    model(CountedWeight(torch.randn(OUT, IN), use))
    assert use.count == count


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
