"""Steps in the units of prior and posterior: their size, clipping, states and results."""

import math

import pyro
import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.distributions import GaussianWeight
from pyro_structvi.extend import SitePosterior
from pyro_structvi.families import LowRank
from pyro_structvi.infer import CosineDecay, training
from pyro_structvi.weights.weight_distribution import IndependentWeight
from tests.guide_cases import GUIDES, POINTS, once
from tests.models import make_regressor, regression_data


def gradients(guide, model, seed):
    torch.manual_seed(seed)
    x, y = regression_data()
    guide.zero_grad()
    ps.StructuredELBO().differentiable_loss(model, guide, x, y).backward()


def make(make_guide):
    model = make_regressor()
    guide = make_guide(model)
    guide.initialize(*regression_data())
    return model, guide


def posteriors(guide):
    return [each for each in guide.modules() if isinstance(each, SitePosterior)]


def rates_of(optimizer):
    return {
        value: group["lr"] * group["unit"]
        for group in optimizer.param_groups
        for value in group["params"]
    }


def snapshot(guide):
    return {name: value.detach().clone() for name, value in guide.named_parameters()}


# ---- one step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", once(GUIDES | POINTS))
def test_a_step_is_adam_in_units_and_in_the_posteriors_own_coordinates(name):
    """Against torch's Adam with these rates, and Adam for the noise's gradient by dense algebra."""
    lr, share = 0.02, 3.0
    model, guide = make((GUIDES | POINTS)[name])
    trained = {name: value for name, value in guide.named_parameters() if value.requires_grad}
    units = {
        id(value): each.family.unit(each.site, key, value)
        for each in posteriors(guide)
        for key, value in each.named_parameters()
    }
    plain = {name: value.detach().clone() for name, value in trained.items()}
    groups = [
        {"params": [plain[name]], "lr": lr * units[id(value)]} for name, value in trained.items()
    ]
    reference = torch.optim.Adam(groups, betas=(0.9, 0.99), eps=1e-12)
    optimizer = ps.StructuredAdam(trained.values(), guide, lr=lr, posterior_lr=share)
    averages = {}
    for number in (1, 2, 3):
        gradients(guide, model, number)
        for key, value in trained.items():
            plain[key].grad = value.grad
        moves = {}
        for path, loc, q in correlated_means_of(guide):
            a = columns(q)
            g = a.mT @ loc.grad.flatten()
            first, second = averages.get(path, (0.0, 0.0))
            first, second = 0.9 * first + 0.1 * g, 0.99 * second + 0.01 * g**2
            averages[path] = first, second
            own = (first / (1 - 0.9**number)) / ((second / (1 - 0.99**number)).sqrt() + 1e-12)
            moves[path] = share * lr * (a @ own).reshape(loc.shape)
        reference.step()
        for key, move in moves.items():
            plain[key] -= move.detach()
        optimizer.step()
        for key, value in trained.items():
            torch.testing.assert_close(value, plain[key], rtol=1e-9, atol=1e-12)
    if name in {"matrix normal", "inducing weights, full, not joined"}:
        assert averages


def correlated_means_of(guide):
    """Yield the name of each mean whose elements vary together, the mean, and its distribution."""
    for path, posterior in guide.named_modules():
        if not isinstance(posterior, SitePosterior) or has_few_directions(posterior.family):
            continue
        normals = {"loc": posterior, "inducing_loc": lambda each=posterior: each().inducing}
        for name in [name for name in normals if hasattr(posterior, name)]:
            q = normals[name]()
            if isinstance(q, GaussianWeight) and not isinstance(q, IndependentWeight):
                yield f"{path}.{name}", getattr(posterior, name), q


def has_few_directions(family):
    return isinstance(family, LowRank) and family.diagonal == "constant"


def columns(q):
    noises = torch.eye(math.prod(q.noise_shape)).reshape(-1, *q.noise_shape)
    return torch.stack([q.scale_noise(each).flatten() for each in noises], -1)


def test_units_are_those_of_the_prior_and_of_the_fan_in():
    net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    model = ps.Regressor(ps.bayesianize(net, ps.FanIn(1.0, 0.7)), 10, 0.3)
    guide = ps.FullCovarianceGuide(model, join_bias=False)
    optimizer = ps.StructuredAdam(guide.parameters(), guide, lr=1.0)
    rates = rates_of(optimizer)
    found = {name: rates[value] for name, value in guide.named_parameters()}
    assert found == pytest.approx({
        "posteriors.net/0/weight.loc": 1.0,
        "posteriors.net/0/weight.log_diagonal": 1.0,
        "posteriors.net/0/weight.lower": 1.0,  # none, since rows are of one element
        "posteriors.net/0/weight.across": 1 / 50,
        "posteriors.net/0/bias.loc": 0.7,
        "posteriors.net/0/bias.log_diagonal": 1.0,
        "posteriors.net/0/bias.lower": 3 / 50,
        "posteriors.net/2/weight.loc": 50**-0.5,
        "posteriors.net/2/weight.log_diagonal": 1.0,
        "posteriors.net/2/weight.lower": 3 / 50,
        "posteriors.net/2/bias.loc": 0.7,
        "posteriors.net/2/bias.log_diagonal": 1.0,
        "posteriors.net/2/bias.lower": 1.0,
    })


@pytest.mark.parametrize(
    ("fan_in", "prior", "expected"),
    [
        (25, 1.0, 0.4),
        (25, 0.1, 0.1),
        (50, 1.0, 2 / 50**0.5),
        (200, 1.0, 0.05 * 2**0.5),
        (200, 0.01, 0.01),
    ],
)
def test_units_of_weights_fall_with_the_fan_in(fan_in, prior, expected):
    """As its root, the size of initial weights; of wide layers as the fan-in itself."""
    model = ps.Regressor(ps.bayesianize(nn.Linear(fan_in, 1), prior), 10, 0.3)
    sites = {each.site.name: each.site.unit for each in posteriors(ps.MeanFieldGuide(model))}
    assert sites == pytest.approx({"net.weight": expected, "net.bias": prior})


@pytest.mark.parametrize(
    "make_layer",
    [
        lambda: nn.Conv2d(64, 2, 3),
        lambda: nn.ConvTranspose2d(64, 2, 3),
        lambda: nn.Conv1d(256, 4, 9, groups=4),
    ],
)
@pytest.mark.parametrize("join_bias", [False, True])
def test_the_inputs_of_a_convolution_are_its_channels(make_layer, join_bias):
    """Each has 64 for an output, and 9 taps."""
    model = ps.Classifier(ps.bayesianize(make_layer(), 1.0), 10)
    guide = ps.MatrixNormalGuide(model, join_bias=join_bias)
    assert guide["net.weight"].site.unit == pytest.approx(2 / 576**0.5 * (50 / 64) ** 0.5)


@pytest.mark.parametrize(
    ("prior", "size", "expected"),
    [(0.5, 64, 1.0), (1.0, 64, 0.5), (2.0, 64, 0.25), (4.0, 4, 0.125 * 20**0.5), (1.0, 4, 1.0)],
)
def test_inducing_weights_move_a_weight_by_its_own_unit(prior, size, expected):
    """Of a weight with fan-in 16 that is 1/2; 4 x 4 numbers move 20 times as many elements."""
    model = ps.Classifier(ps.bayesianize(nn.Linear(16, 20, bias=False), prior=prior), num_data=5)
    (posterior,) = posteriors(ps.InducingWeightGuide(model, (size, size)))
    unit = posterior.family.unit(posterior.site, "inducing_loc", posterior.inducing_loc)
    assert unit == pytest.approx(expected)


def test_short_rows_of_a_factor_move_by_the_root_of_their_length():
    model = ps.Regressor(ps.bayesianize(nn.Linear(3, 2), prior=1.0), 10, 0.3)
    guide = ps.RowwiseGuide(model, join_bias=True)
    rates = rates_of(ps.StructuredAdam(guide.parameters(), guide, lr=1.0))
    found = [rates[value] for name, value in guide.named_parameters() if name.endswith("lower")]
    assert found == pytest.approx([0.5])  # of three inputs and a bias


@pytest.mark.parametrize("share", [1e-3, 1e3])
def test_the_move_along_the_posterior_is_at_most_as_large_as_adams_own(share):
    """A first step of Adam is the gradient's sign; a larger one is cut to the mean's own rate."""
    lr, locs = 0.02, []
    for posterior_lr in (share, 0.0):
        torch.manual_seed(0)
        model, guide = make(lambda model: ps.AutoLowRankLRT(model, 2, "full"))
        gradients(guide, model, 1)
        posterior = posteriors(guide)[0]
        a = columns(posterior()).detach()
        wanted = -share * lr * (a @ (a.mT @ posterior.loc.grad.flatten()).sign())
        optimizer = ps.StructuredAdam(guide.parameters(), guide, lr=lr, posterior_lr=posterior_lr)
        optimizer.step()
        locs.append(posterior.loc.detach().flatten())
        limit = rates_of(optimizer)[posterior.loc]
    is_cut = wanted.square().mean().sqrt() > limit
    assert bool(is_cut) == (share == 1e3)
    if is_cut:
        wanted *= limit / wanted.square().mean().sqrt()
    torch.testing.assert_close(locs[0] - locs[1], wanted, rtol=1e-7, atol=1e-12)


def test_parameters_of_no_posterior_have_the_size_of_their_start():
    _, guide = make(ps.MAPGuide)
    weight, bias = nn.Parameter(torch.full((3, 2), 0.25)), nn.Parameter(torch.full((3,), 5.0))
    zeros = nn.Parameter(torch.zeros(2, 2))
    rates = rates_of(ps.StructuredAdam([weight, bias, zeros], guide, lr=2.0))
    assert [rates[each] for each in (weight, bias, zeros)] == pytest.approx([0.5, 0.2, 0.2])
    with pytest.raises(TypeError, match="`parameters` must be"):
        ps.StructuredAdam([{"params": [*guide.parameters()]}], guide)


def deep_guide(make_guide, num_weights, num_points=0, width=56):
    """A guide of a model with these numbers of random weights and of points, and its parameters."""
    layers = [
        nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(num_weights)
    ]
    net = ps.bayesianize(nn.Sequential(*layers), prior=0.25, normalization=False)
    points = nn.Sequential(*[nn.Linear(width, width) for _ in range(num_points)])
    for value in points.parameters():
        nn.init.constant_(value, 0.5)
    model = ps.Regressor(nn.Sequential(net, nn.Linear(width, 5), nn.Linear(5, 4), points), 10, 0.3)
    model.net[1:3].requires_grad_(False)
    guide = make_guide(model)
    trained = [*guide.named_parameters(), *model.named_parameters()]
    return guide, [(name, value) for name, value in trained if value.requires_grad]


@pytest.mark.parametrize(
    ("num_weights", "num_points", "width", "share"),
    [
        *((1, 0, 56, 1.0), (4, 0, 56, 1.0), (3, 1, 56, 1.0), (5, 0, 56, 0.8)),
        *((16, 0, 56, 0.25), (6, 10, 56, 0.25), (16, 0, 50, 1.0), (64, 0, 56, 0.0625)),
    ],
)
def test_rates_fall_with_the_number_of_wide_weights(num_weights, num_points, width, share):
    """Rates of scales fall faster."""
    guide, named = deep_guide(ps.MeanFieldGuide, num_weights, num_points, width)
    rates = rates_of(ps.StructuredAdam([value for _, value in named], guide, lr=1.0))
    for name, value in named:
        if "posteriors" in name:
            of_scale = max(0.005, share**3)
            expected = of_scale if name.endswith("log_scale") else share * 0.25
        else:
            expected = share * (0.5 if value.dim() > 1 else 0.1)
        assert rates[value] == pytest.approx(expected), name


def test_wide_points_are_those_with_a_large_fan_in():
    """A row of an embedding is one input; a ``Conv1D`` of GPT-2 has the weight ``(in, out)``."""
    table, transposed = nn.Embedding(5, 60), nn.Linear(60, 4)
    transposed.weight, transposed.nf = nn.Parameter(torch.ones(60, 4)), 4
    wide = [nn.Linear(60, 60) for _ in range(7)]
    points = nn.Sequential(table, transposed, *wide)
    for each in points:
        nn.init.constant_(each.weight, 0.5)
    model = ps.Regressor(nn.Sequential(ps.bayesianize(nn.Linear(4, 1)), points), 10, 0.3)
    guide = ps.MeanFieldGuide(model)
    rates = rates_of(ps.StructuredAdam([*guide.parameters(), *model.parameters()], guide, lr=1.0))
    assert {rates[each.weight] for each in points} == {0.25}  # half of their unit, of eight


@pytest.mark.parametrize(
    "make_guide",
    [
        lambda model: ps.MixtureGuide(model, ps.MeanFieldGuide, 4),
        lambda model: ps.EnsembleGuide(model, size=4),
        lambda model: ps.EnsembleGuide(model, size=4, vectorize=False),
    ],
)
def test_members_are_not_layers(make_guide):
    guide, _ = deep_guide(make_guide, 4)
    rates = rates_of(ps.StructuredAdam(guide.parameters(), guide, lr=1.0))
    assert {rates[value] for name, value in guide.named_parameters() if ".loc" in name} <= {0.25}
    assert max(rates.values()) >= 0.25


def test_moves_along_the_posterior_fall_with_the_number_of_wide_weights():
    guide, _ = deep_guide(ps.MatrixNormalGuide, 16)
    optimizer = ps.StructuredAdam(guide.parameters(), guide, posterior_lr=3.0, warm_up=100)
    assert {group["posterior_lr"] for group in optimizer.param_groups} == {0.75}
    assert {group["warm_up"] for group in optimizer.param_groups} == {0}, "no factor waits"


# ---- what waits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make_guide", [ps.RowwiseGuide, ps.FullCovarianceGuide, ps.AutoLowRankLRT])
def test_correlations_move_slowly_first(make_guide):
    """By the square of the share of the steps; all else moves as without."""
    model, guide = make(make_guide)
    waiting, plain = (
        ps.StructuredAdam(guide.parameters(), guide, posterior_lr=0, warm_up=steps)
        for steps in (4, 0)
    )
    for number in range(6):
        gradients(guide, model, number)
        before, moves = snapshot(guide), []
        for optimizer in (plain, waiting):
            with torch.no_grad():
                for name, value in guide.named_parameters():
                    value.copy_(before[name])
            optimizer.step()
            moves.append({name: value - before[name] for name, value in snapshot(guide).items()})
        for name, move in moves[1].items():
            waits = name.endswith((".lower", ".across", ".factors"))
            share = min(1.0, (number + 1) / 4) ** 2 if waits else 1.0
            torch.testing.assert_close(move, share * moves[0][name], rtol=1e-9, atol=1e-14)


def test_a_fit_waits_for_a_share_of_its_steps(monkeypatch):
    made = []

    class Noted(ps.StructuredAdam):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(training, "StructuredAdam", Noted)
    model, guide = make(ps.RowwiseGuide)
    ps.fit(model, guide, regression_data(), num_steps=20, progress=False)
    assert {group["warm_up"] for group in made[0].param_groups} == {0, 3}


# ---- clipping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_guide", [ps.MeanFieldGuide, ps.RowwiseGuide])
def test_gradients_far_above_their_usual_norm_are_divided_by_the_excess(make_guide):
    """Against the same steps without clipping, of gradients that were divided by hand."""
    factors, clip, usual, ones = [1.0, 1.5, 1.0, 1e4, 2.0, 300.0, 1.0], 2.0, 0.0, 0.0
    own, other = make(make_guide), make(make_guide)
    other[0].load_state_dict(own[0].state_dict())
    other[1].load_state_dict(own[1].state_dict())
    clipping, plain = (
        ps.StructuredAdam(guide.parameters(), guide, clip=bound)
        for (_, guide), bound in ((own, clip), (other, None))
    )
    divided = []
    for number, factor in enumerate(factors):
        for model, guide in (own, other):
            gradients(guide, model, number)
            for value in guide.parameters():
                value.grad *= factor
        square = sum(float(value.grad.square().sum()) for value in own[1].parameters())
        limit = clip**2 * usual / ones if ones else math.inf
        divided.append(max(1.0, math.sqrt(square / limit)))
        usual, ones = 0.99 * usual + 0.01 * min(square, limit), 0.99 * ones + 0.01
        for value in other[1].parameters():
            value.grad /= torch.tensor(divided[-1]).float()  # as a scale of gradients is
        clipping.step()
        plain.step()
        for name, value in snapshot(own[1]).items():
            torch.testing.assert_close(value, snapshot(other[1])[name], rtol=1e-9, atol=1e-12)
    assert [each > 10 for each in divided] == [factor > 10 for factor in factors]


def test_a_first_gradient_of_zero_does_not_clip_the_others_to_it():
    model, guide = make(ps.MeanFieldGuide)
    optimizer = ps.StructuredAdam(guide.parameters(), guide)
    for number, factor in enumerate((0.0, 1.0)):
        gradients(guide, model, number)
        for value in guide.parameters():
            value.grad *= factor
        before = snapshot(guide)
        optimizer.step()
        moved = [not torch.equal(value, before[name]) for name, value in snapshot(guide).items()]
        assert all(moved) == any(moved) == bool(factor)


def test_a_step_that_is_skipped_leaves_the_usual_norm():
    model, guide = make(ps.MeanFieldGuide)
    optimizer = ps.StructuredAdam(guide.parameters(), guide)
    gradients(guide, model, 0)
    optimizer.step()
    [norm] = [state["norm"] for state in optimizer.state.values() if "norm" in state]
    before = norm.clone()
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()).float(), None
    optimizer.step()
    assert torch.equal(norm, before)
    optimizer.found_inf = torch.zeros(()).float()
    optimizer.step()
    assert not torch.equal(norm, before)


# ---- as an optimizer of torch --------------------------------------------------------------------


def test_parameters_without_a_gradient_stay_and_a_closure_is_called_with_gradients():
    model, guide = make(GUIDES["rowwise, joined"])
    first = posteriors(guide)[0]

    def closure():
        gradients(guide, model, 0)
        first.loc.grad = None
        return 3.0

    before = snapshot(first)
    assert ps.StructuredAdam(guide.parameters(), guide).step(closure) == 3.0
    assert torch.equal(first.loc, before["loc"])
    assert not torch.equal(first.lower, before["lower"])


# ---- in a fit ------------------------------------------------------------------------------------


def test_fit_takes_it_with_a_rate_that_falls_to_zero():
    def fit(is_made):
        def optimizer(parameters, lr):
            return ps.StructuredAdam(parameters, guide, lr=lr)

        pyro.set_rng_seed(0)
        model, guide = make(ps.RowwiseGuide)
        options = {"num_steps": 5, "compiled": False, "progress": False}
        options |= {"lr": 0.1, "optimizer": optimizer} if is_made else {}
        return ps.fit(model, guide, regression_data(), **options).lr, snapshot(guide)

    rates, found = fit(is_made=False)
    assert rates == pytest.approx([0.1 * CosineDecay(5)(step) for step in range(5)])
    _, expected = fit(is_made=True)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_a_longer_run_goes_on_with_its_own_cosine(tmp_path):
    def fit(num_steps, **options):
        model, guide = make(ps.MeanFieldGuide)
        checkpoint = ps.Checkpoint(tmp_path / "run.pt", resume=True)
        options |= {"num_steps": num_steps, "checkpoint": checkpoint, "progress": False}
        return ps.fit(model, guide, regression_data(), **options).lr

    fit(4)
    rates = [CosineDecay(4)(step) for step in range(4)] + [CosineDecay(6)(4), CosineDecay(6)(5)]
    assert fit(6) == pytest.approx([0.1 * rate for rate in rates])
    with pytest.raises(ValueError, match=r"at step 0 is 0.2 here, and 0.1 in"):
        fit(6, lr=0.2)
    with pytest.raises(ValueError, match=r"`lr` is 'a function' here, and 'a number or None' in"):
        fit(6, lr=CosineDecay(6, 0.1))
    model, guide = make(ps.MeanFieldGuide)
    options = {"optimizer": torch.optim.Adam, "kl_weight": 1.0, "progress": False}
    lr = ps.fit(model, guide, regression_data(), num_steps=1, **options).lr
    assert lr == [1e-3], "an optimizer's own"


def test_scaled_gradients_are_divided_by_their_scale():
    """As mixed precision scales them, by another factor in each step."""

    def train(scales):
        torch.manual_seed(0)
        model, guide = make(ps.RowwiseGuide)
        optimizer = ps.StructuredAdam(guide.parameters(), guide)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scales is not None)
        for number in range(3):
            torch.manual_seed(number)
            optimizer.zero_grad()
            loss = ps.StructuredELBO().differentiable_loss(model, guide, *regression_data())
            scaler.scale(1e3 * loss if number == 2 else loss).backward()  # which is clipped
            scaler.step(optimizer)
            scaler.update(None if scales is None else scales[number])
        return snapshot(guide)

    torch.testing.assert_close(train([64.0, 8192.0, 1.0]), train(None), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make_guide", [ps.RowwiseGuide, ps.InducingWeightGuide])
def test_frozen_means_stay_where_they_are(make_guide):
    model, guide = make(make_guide)
    frozen = {name: value for name, value in guide.named_parameters() if name.endswith("loc")}
    for value in frozen.values():
        value.requires_grad_(False)
    before = snapshot(guide)
    ps.fit(model, guide, regression_data(), num_steps=3, progress=False)
    moved = {
        name for name, value in snapshot(guide).items() if not torch.equal(value, before[name])
    }
    assert moved
    assert not moved & frozen.keys()
