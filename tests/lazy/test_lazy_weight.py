"""A lazy weight: what it knows, what it answers, what it keeps, and how its uses are counted."""

import copy
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F

from pyro_structvi import MeanFieldGuide, Regressor, StructuredELBO, bayesianize
from pyro_structvi.distributions import MeanFieldNormal
from pyro_structvi.sites.finding import CountedWeight
from pyro_structvi.weights.lazy import DelayDraws, LazyWeight
from pyro_structvi.weights.site_role import SiteRole, SiteUse
from tests import dense_oracles as dense
from tests.distributions.cases import CASES, make_full
from tests.lazy_weights import (
    IN,
    KERNEL,
    OUT,
    bias_normal,
    convolution_weight,
    is_ordinary,
    k_tied_normal,
    lazy,
    narrow_normal,
)
from tests.unit_noise import assert_draws

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


def test_metadata_is_known_without_a_draw():
    weight = lazy()
    for name, (ask, answer) in METADATA.items():
        assert ask(weight) == answer, name
        assert not weight.is_drawn, name


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
def test_a_linear_layer_gets_outputs(call):
    settings = [((), True), ((5,), True), ((5, 2), True), ((), "exact"), ((5,), "exact")]
    for lead, local_reparam in settings:
        weight = lazy(local_reparam=local_reparam)
        outputs = call(torch.randn(*lead, IN), weight, torch.randn(OUT))
        assert is_ordinary(outputs)
        assert outputs.shape == (*lead, OUT)
        assert not weight.is_drawn


ORDINARY = {
    "clone": lambda w: w.clone(),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "deepcopy": lambda w: copy.deepcopy(w.detach()),
    "copy": copy.copy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "indexing": lambda w: w[:],
    "view": lambda w: w.view(-1).view(OUT, IN),
    "reshape": lambda w: w.reshape(-1).reshape(OUT, IN),
    "matmul": lambda w: w @ torch.eye(IN),
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


def switched_off(weight):
    with torch._C.DisableTorchFunctionSubclass():
        return weight + 0


def test_any_other_use_sees_one_ordinary_draw():
    for name, use in (ORDINARY | {"torch function switched off": switched_off}).items():
        weight = lazy()
        seen = use(weight)
        assert is_ordinary(seen), name
        assert weight.is_drawn, name
        assert torch.equal(seen, weight.draw()), name
    number = lazy(MeanFieldNormal(torch.tensor(1.0), torch.tensor(0.5)))
    assert f"{number:.3f}" == f"{number.draw().item():.3f}"
    weight = lazy(MeanFieldNormal(torch.zeros(OUT, IN), torch.tensor(1.0)))
    weight[0] = 7.0
    assert weight.draw()[0].eq(7).all()
    assert weight.mul_(2)[0].eq(14).all()


def test_printing_shows_its_state_and_draws_nothing():
    weight = lazy()
    assert repr(weight) == str(weight) == f"{weight}"
    assert not weight.is_drawn
    assert repr(weight) == "LazyWeight(site='weight', shape=(4, 3), not drawn yet)"
    F.linear(torch.ones(IN), weight)
    assert repr(weight) == "LazyWeight(site='weight', shape=(4, 3), its outputs were drawn)"
    assert not weight.is_drawn
    drawn = lazy(weight.distribution)
    assert repr(drawn.draw()) == repr(drawn) == str(drawn) == f"{drawn}"


def linear(*lead):
    x, bias = torch.randn(*lead, IN).double(), torch.randn(OUT).double()
    return lambda w: F.linear(x, w, bias)


def conv2d():
    x = torch.randn(5, 2, 4, 4).double()
    return lambda w: F.conv2d(x, w, padding=1)


def vector(size):
    return lazy(MeanFieldNormal(torch.zeros(size), torch.tensor(1.0)))


# The weight, the call, and whether the weight is sampled before.
DRAWN = {
    "not counted": (lambda: lazy(count=None), linear(5), False),
    "not used": (lambda: lazy(count=0), linear(5), False),
    "used twice": (lambda: lazy(count=2), linear(5), False),
    "switched off": (lambda: lazy(local_reparam=False), linear(5), False),
    "several positions": (lambda: lazy(local_reparam="exact"), linear(5, 2), False),
    "a convolution": (lambda: convolution_weight(local_reparam="exact"), conv2d(), False),
    "no image": (lambda: lazy(make_full((), KERNEL, torch.float64)), conv2d(), False),
    "a vector": (lambda: vector(IN), lambda w: F.linear(torch.ones(5, IN), w), False),
    "a vector of one": (lambda: vector(1), lambda w: F.linear(torch.ones(5, 1), w), False),
    "an input": (lazy, lambda w: F.linear(w, torch.eye(2, IN)), False),
    "drawn before": (lazy, linear(5), True),
}


def test_a_linear_map_draws_the_weight():
    for name, (make, call, is_drawn) in DRAWN.items():
        weight = make()
        before = weight.clone() if is_drawn else None
        outputs = call(weight)
        assert weight.is_drawn, name
        assert torch.equal(outputs, call(weight.draw())), name
        assert before is None or torch.equal(before, weight.draw())


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_bias_that_outputs_share_is_drawn(shape):
    weight, bias = lazy(narrow_normal(OUT, IN)), lazy(narrow_normal(*shape), "bias")
    x = torch.randn(5, IN)
    assert torch.equal(F.linear(x, weight, bias), F.linear(x, weight.draw(), bias.draw()))


def test_a_bias_is_drawn_with_its_weight_or_of_an_ordinary_one():
    for weight, exact in ((lazy(local_reparam="exact"), "exact"), (torch.randn(OUT, IN), True)):
        bias, x = lazy(bias_normal(), "bias", local_reparam=exact), torch.randn(5, 2, IN)
        outputs = F.linear(x, weight, bias)
        plain = weight if isinstance(exact, bool) else weight.draw()
        assert torch.equal(outputs, F.linear(x, plain, bias.draw()))


@pytest.mark.parametrize("options", [{"count": 2}, {"local_reparam": False}, {}])
def test_a_bias_that_may_not_give_outputs_or_was_drawn_before_is_drawn(options):
    weight, bias = lazy(narrow_normal(OUT, IN)), lazy(bias_normal(), "bias", **options)
    before = None if options else bias.clone()
    outputs = F.linear(torch.randn(5, IN), weight, bias)
    assert bias.is_drawn
    assert not weight.is_drawn
    assert before is None or torch.equal(before, bias.draw())
    torch.testing.assert_close(outputs, bias.draw().expand(5, OUT), rtol=0, atol=1e-6)


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
    value, x = torch.randn(OUT, IN), torch.randn(5, IN)
    weight = CountedWeight(value, SiteUse("weight"))
    assert (weight.shape, weight.dtype, weight.device) == (value.shape, value.dtype, value.device)
    assert torch.equal(F.linear(x, weight), F.linear(x, value))
    assert is_ordinary(weight + 0)


@pytest.mark.parametrize(
    "use_in_density",
    [
        lambda w: (dist.Normal(torch.ones(OUT, IN), 1.0), w),
        lambda w: (dist.Cauchy(torch.zeros(OUT, IN), 1.0).expand_by([]), w.t().t()),
        lambda w: (
            dist.TransformedDistribution(
                dist.Normal(torch.zeros(OUT, IN), 1.0), [dist.transforms.AffineTransform(w, 1.0)]
            ),
            torch.ones(OUT, IN),
        ),
    ],
)
def test_a_use_by_a_density_counts(use_in_density):
    def model():
        weight = pyro.sample("weight", dist.Normal(torch.zeros(OUT, IN), 1.0).to_event(2))
        pyro.factor("layer", -F.linear(torch.ones(5, IN), weight).square().sum())
        likelihood, value = use_in_density(weight)
        pyro.sample("obs", likelihood.to_event(2), obs=value)

    losses = []
    for local_reparam in (True, False):
        torch.manual_seed(0)
        guide = MeanFieldGuide(model, init_scale=0.5, local_reparam=local_reparam)
        losses.append(StructuredELBO().loss(model, guide))
    assert guide.uses["weight"].count > 1
    assert losses[0] == losses[1]


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


# ---- delayed draws, and refused second uses ------------------------------------------------------


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


# ---- a lazy bias ---------------------------------------------------------------------------------


BY_NAME = {case.name: case for case in CASES}
NAMES = [
    *(("2-tied", bias) for bias in ("mean field", "low rank 2", "full")),
    *((name, bias) for name in ("full", "inducing weights, full") for bias in ("2-tied", "full")),
]
PAIRS = [(BY_NAME[name], BY_NAME[bias]) for name, bias in NAMES]


@pytest.mark.parametrize(
    ("case", "bias_case"), PAIRS, ids=[f"{case.name}, bias {bias.name}" for case, bias in PAIRS]
)
def test_a_lazy_bias_adds_its_distribution_to_the_outputs(case, bias_case):
    """Weight and bias are drawn as outputs: exact for each example, independent over examples."""
    q, prior = case.make((), (OUT, IN), torch.float64), bias_case.make((), (OUT,), torch.float64)
    x = torch.randn(2, IN)
    weight_part = dense.image_covariance(x, case.covariance(q), OUT)
    assert_draws(
        lambda: F.linear(x, lazy(q), lazy(prior, "bias")),
        dense.image_mean(x, q.loc, 2) + prior.loc,
        weight_part + bias_case.covariance(prior),
    )


def dense_layer(x, bias):
    """Show a bias, with the channels as the second dimension."""
    return F.linear(x, lazy(narrow_normal(OUT, 2)), bias).movedim(-1, 1)


def convolution_layer(x, bias):
    return F.conv2d(x.movedim(-1, 1), lazy(narrow_normal(OUT, 2, 1, 1)), bias)


def unbatched(x, bias):
    image = x[0].movedim(-1, 0)
    return F.conv2d(image, lazy(narrow_normal(OUT, 2, 1, 1)), bias).unsqueeze(0)


@pytest.mark.parametrize("layer", [dense_layer, convolution_layer, unbatched])
def test_the_positions_of_an_example_share_the_draw_of_the_bias(layer):
    prior, x = bias_normal(), torch.randn(2, 3, 2, 2)
    variance, count = torch.diag(prior.scale.square()), 1 if layer is unbatched else 2
    assert_draws(
        lambda: layer(x, lazy(prior, "bias")).flatten(2),
        prior.loc.unsqueeze(-1),
        torch.kron(variance, torch.ones(6, 6)).expand(count, -1, -1),
    )
    layer(x, bias := lazy(prior, "bias"))
    assert not bias.is_drawn


WRITES = {
    "data in place": lambda weight: weight.data.mul_(0.5),
    "other data": lambda weight: setattr(weight, "data", weight.data / 2),
    "without gradients": lambda weight: torch.no_grad()(weight.clamp_)(max=-9.0),
    "a part": lambda weight: weight.data[0].zero_(),
    "a transpose": lambda weight: weight.data.T.copy_(torch.ones(3, 2)),
    "detached": lambda weight: weight.detach().fill_(2.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_net_that_writes_into_its_weight_is_refused(write):
    class Writing(torch.nn.Linear):
        def forward(self, x):
            WRITES[write](self.weight)
            return super().forward(x)

    model = Regressor(bayesianize(torch.nn.Sequential(Writing(3, 2))), noise_scale=0.1, num_data=4)
    with pytest.raises(ValueError, match=r"writes into the value of the site 'net.0.weight'"):
        MeanFieldGuide(model)(torch.ones(4, 3), torch.ones(4, 2))


def test_a_net_may_read_the_data_of_its_weight():
    class Reading(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x / self.weight.data.abs().max())

    model = Regressor(bayesianize(torch.nn.Sequential(Reading(3, 2))), noise_scale=0.1, num_data=4)
    MeanFieldGuide(model)(torch.ones(4, 3), torch.ones(4, 2))
