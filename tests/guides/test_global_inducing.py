"""GlobalInducingGuide: each layer given the ones before, against dense Bayesian linear regressions.

With inputs X, targets V, precisions L and prior scales s the weight of a layer is the posterior of the
regression of V on X. If inducing points and targets are the data, with the precision of the likelihood,
the last layer has the exact posterior given all other layers, and the ELBO is their evidence.
"""

import copy
import itertools
import math
import pickle
from functools import partial

import pyro
import pyro.poutine as poutine
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import Trace_ELBO
from torch import nn
from torch.distributions import MultivariateNormal

import pyro_structvi as ps
from pyro_structvi.families import (
    InducingWeights,
    MatrixNormalFamily,
    MeanField,
    Members,
    PointEstimate,
)
from pyro_structvi.guides import NewParametersWarning
from pyro_structvi.structures.global_inducing.family import NormalGivenInputs
from tests.guides.inducing_guides import assert_same_draws, randomize
from tests.infer.compiled_steps import assert_same
from tests.models import local_latent_function
from tests.particle_noise import draws_in_a_loop, draws_together

NOISE = 0.3
scramble = partial(randomize, scale=0.3)


def make_net(*sizes):
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))[:-1]


def regressor(net, prior=0.8, **options):
    return ps.Regressor(ps.bayesianize(net, prior, **options), 20, NOISE)


def make_model(*sizes):
    return regressor(make_net(*sizes))


def data_of(inputs):
    return torch.randn(20, inputs), torch.randn(20, 1)


def train_once(model, guide, *data):
    """Give every parameter a gradient, and check that it is finite."""
    ps.StructuredELBO().differentiable_loss(model, guide, *data).backward()
    gradients = {name: parameter.grad for name, parameter in guide.named_parameters()}
    assert {
        name for name, own in gradients.items() if own is None or not own.isfinite().all()
    } == set()


def dense_regression(rows, target, precision, scale):
    """Return the mean ``(in, out)`` and the covariance of a regression's weights.

    With a precision for each output, covariances are ``(out, in, in)``.
    """
    if precision.dim() == 2:
        columns = zip(target.T, precision.T, strict=True)
        parts = [dense_regression(rows, y.unsqueeze(-1), own, scale) for y, own in columns]
        return torch.cat([mean for mean, _ in parts], -1), torch.stack([cov for _, cov in parts])
    covariance = torch.linalg.inv(
        torch.diag(scale**-2)
        + sum(p * torch.outer(x, x) for p, x in zip(precision, rows, strict=True))
    )
    return covariance @ rows.mT @ (precision.unsqueeze(-1) * target), covariance


FEW_AND_MANY = pytest.mark.parametrize("count", [3, 6])  # rows, of 4 inputs


@pytest.mark.parametrize("own", [False, True], ids=["one precision", "of each output"])
@FEW_AND_MANY
def test_a_weight_given_its_inputs_is_the_posterior_of_a_regression(count, own):
    rows, target, event_shape = torch.randn(count, 4), torch.randn(count, 3), (3, 2, 2)
    log_precision, log_scale = torch.randn(count, 3) if own else torch.randn(count), torch.randn(4)
    q = NormalGivenInputs(torch.Size(event_shape), target, log_precision, log_scale).condition(rows)
    mean, covariance = dense_regression(rows, target, log_precision.exp(), log_scale.exp())
    covariance = covariance.expand(3, 4, 4)
    dense = torch.block_diag(*covariance)
    torch.testing.assert_close(q.mean, mean.mT.reshape(event_shape))
    torch.testing.assert_close(q.covariance_matrix, dense)
    torch.testing.assert_close(q.variance, dense.diagonal().reshape(event_shape))
    torch.testing.assert_close(q.variance_sum, dense.trace())
    torch.testing.assert_close(q.log_det_covariance, torch.logdet(dense))
    value, x = torch.randn(2, *event_shape), torch.randn(5, 4)
    expected = MultivariateNormal(mean.mT.flatten(), dense).log_prob(value.flatten(1))
    torch.testing.assert_close(q.log_prob(value), expected)
    torch.testing.assert_close(q.image(x).mean, x @ mean)
    variance = torch.einsum("bi,oij,bj->bo", x, covariance, x)
    torch.testing.assert_close(q.image(x).variance, variance)


def test_a_mean_and_a_noise_scale_have_their_own_precisions():
    x, y = data_of(3)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    model = ps.Regressor(ps.bayesianize(net, 1.0), 20, noise="heteroscedastic")
    guide = ps.GlobalInducingGuide(model, x)
    assert guide["net.2.weight"].log_precision.shape == (20, 2)
    train_once(model, guide, x, y)
    gradient = guide["net.2.weight"].log_precision.grad
    assert not torch.allclose(gradient[:, 0], gradient[:, 1])


@FEW_AND_MANY
def test_gradients_of_the_regression_are_exact(count):
    shapes = (count, 2), (count,), (3,), (count, 3)
    noise = torch.randn(2, 3)
    arguments = [torch.randn(*shape, requires_grad=True) for shape in shapes]

    def moments(target, log_precision, log_scale, rows):
        q = NormalGivenInputs(torch.Size([2, 3]), target, log_precision, log_scale).condition(rows)
        return q.mean, q.scale_noise(noise), q.variance, q.log_det_covariance

    assert torch.autograd.gradcheck(moments, arguments)


@FEW_AND_MANY
def test_precisions_over_many_orders_keep_single_precision(count):
    """Precisions of 1e9 and 1e-3 leave no correct digit in single precision."""
    rows, target = torch.randn(count, 4), torch.randn(count, 2)
    log_precision, noise = torch.linspace(-7, 21, count), torch.randn(2, 4)
    exact = NormalGivenInputs(torch.Size([2, 4]), target, log_precision, torch.zeros(4)).condition(
        rows
    )
    single = [value.float() for value in (target, log_precision, torch.zeros(4))]
    q = NormalGivenInputs(torch.Size([2, 4]), *single).condition(rows.float())
    torch.testing.assert_close(q.mean.double(), exact.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(q.variance.double(), exact.variance, rtol=1e-4, atol=1e-9)
    drawn = q.scale_noise(noise.float()).double()
    torch.testing.assert_close(drawn, exact.scale_noise(noise), rtol=1e-4, atol=1e-5)


def test_the_last_layer_can_be_exact_and_the_elbo_the_evidence():
    x, y = data_of(3)
    model = make_model(3, 4, 1)
    guide = ps.GlobalInducingGuide(model, x, first_layer=PointEstimate())
    last = guide["net.2.weight"]
    with torch.no_grad():
        last.target.copy_(y)
        last.log_precision.fill_(-2 * math.log(NOISE))
    points = guide.median()
    hidden = F.linear(x, points["net.0.weight"], points["net.0.bias"]).tanh()
    inputs = F.pad(hidden, (0, 1), value=1.0)
    marginal = 0.8**2 * inputs @ inputs.mT + NOISE**2 * torch.eye(20)
    evidence = MultivariateNormal(torch.zeros(20), marginal).log_prob(y.flatten())
    prior = poutine.trace(poutine.condition(model, points)).get_trace(x, y)
    prior.compute_log_prob()
    own = sum(prior.nodes[f"net.0.{name}"]["log_prob_sum"] for name in ("weight", "bias"))
    # Trace_ELBO's value has no variance at the exact posterior: each draw gives the evidence.
    for _ in range(3):
        drawn = -Trace_ELBO().differentiable_loss(model, guide, x, y)
        torch.testing.assert_close(drawn.detach() - own, evidence)


def assert_given(q, own, rows):
    """Assert that a weight is the regression of its layer's targets on the rows."""
    scales = own.log_precision.exp(), own.log_scale.exp()
    mean, covariance = dense_regression(rows, own.target, *scales)
    torch.testing.assert_close(q.mean, mean.mT)
    blocks = covariance.expand(len(q.mean), *covariance.shape[-2:])
    torch.testing.assert_close(q.covariance_matrix, torch.block_diag(*blocks))


def with_ones(rows):
    return F.pad(rows, (0, 1), value=1.0)


def test_each_layer_is_drawn_given_the_draws_before_it():
    x, data = torch.randn(9, 2), (torch.randn(20, 2), torch.randn(20, 1))
    guide = ps.GlobalInducingGuide(make_model(2, 4, 5, 1), x)
    guide.initialize(*data)
    scramble(guide)
    nodes, rows = poutine.trace(guide).get_trace(*data).nodes, x
    for layer in (0, 2, 4):
        site = nodes[f"net.{layer}.weight+bias"]
        value = site["value"]
        if layer:
            assert_given(site["fn"], guide[f"net.{layer}.weight"], with_ones(rows))
        weight = nodes[f"net.{layer}.weight"]["value"]
        torch.testing.assert_close(weight, value[:, :-1])
        rows = F.linear(rows, value[:, :-1], value[:, -1]).tanh()
    guide = ps.GlobalInducingGuide(make_model(2, 3, 1), x, join_bias=False, init_scale=0.5)
    scramble(guide)
    guide.initialize(*data)
    nodes = poutine.trace(guide).get_trace(*data).nodes
    first = nodes["net.0.weight"]["value"], nodes["net.0.bias"]["value"]
    assert_given(nodes["net.2.weight"]["fn"], guide["net.2.weight"], F.linear(x, *first).tanh())
    assert isinstance(guide["net.2.bias"].family, MeanField)
    assert guide.draw().keys() == {name for name in nodes if name.startswith("net.")}


def test_the_rows_of_a_convolution_are_its_patches():
    images, second = torch.randn(3, 2, 6, 6), nn.Conv2d(3, 4, 2, stride=2)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), second, nn.Flatten(), nn.Linear(16, 2))
    model = ps.Classifier(ps.bayesianize(net, prior=0.5), num_data=3)
    guide = ps.GlobalInducingGuide(model, images)
    scramble(guide)
    nodes = poutine.trace(guide).get_trace(images, torch.zeros(3, dtype=torch.long)).nodes
    first = nodes["net.0.weight"]["value"], nodes["net.0.bias"]["value"]
    hidden = F.conv2d(images, *first).tanh()
    patches = F.unfold(hidden, 2, stride=2).movedim(1, -1).reshape(-1, 12)
    assert_given(nodes["net.2.weight+bias"]["fn"], guide["net.2.weight"], with_ones(patches))


def test_it_begins_at_the_net_and_at_the_scale_asked_for():
    """With as many points as inputs the targets decide the weight."""
    net = make_net(2, 3, 2)
    model = regressor(copy.deepcopy(net), {"*.weight": 0.7, "*.bias": 1.5})
    guide = ps.GlobalInducingGuide(model, torch.randn(12, 2), init_scale=1e-4)
    median = guide.median()
    for name, value in net.named_parameters():
        torch.testing.assert_close(median[f"net.{name}"], value.detach(), atol=1e-4, rtol=1e-4)
    scales = guide["net.2.weight"].log_scale.detach().exp()
    torch.testing.assert_close(scales, torch.tensor([0.7, 0.7, 0.7, 1.5]))
    drawn = guide.draw()["net.2.weight"] - median["net.2.weight"]
    assert 0 < drawn.abs().max() < 0.02


@pytest.mark.parametrize("first", [None, MeanField()])
def test_layers_that_meet_the_inputs_have_a_family_of_their_own(first):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.top = (nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(3, 1))

        def forward(self, x):
            return self.top(torch.tanh(self.left(x)) + self.right(x))

    model = regressor(Branches())
    guide = ps.GlobalInducingGuide(model, torch.randn(5, 2), first_layer=first)
    families = [
        type(guide[f"net.{name}.weight"].family).__name__ for name in ("left", "right", "top")
    ]
    own = type(first or MatrixNormalFamily()).__name__
    assert families == [own, own, "GlobalInducing"]


def test_a_number_takes_the_first_inputs_of_the_first_call():
    x, y = data_of(3)
    guide = ps.GlobalInducingGuide(make_model(3, 4, 1), 7)
    with pytest.raises(RuntimeError, match="has no posterior before"):
        guide.draw()
    guide(x, y)
    torch.testing.assert_close(guide.inducing_inputs, x[:7], rtol=0, atol=0)
    assert "inducing_inputs" not in dict(guide.named_parameters())
    assert guide["net.2.weight"].target.shape == (7, 1)


def test_points_are_trained_if_asked_and_get_a_gradient():
    (x, y), model = data_of(3), make_model(3, 4, 1)
    guide = ps.GlobalInducingGuide(model, x[:5], train_inputs=True)
    train_once(model, guide, x, y)
    assert guide.inducing_inputs.grad.abs().min() > 0


def test_steps_and_draws_together_are_those_one_by_one():
    x, y = data_of(2)
    model = make_model(2, 3, 1)
    guide = ps.GlobalInducingGuide(model, x[:6])
    scramble(guide)
    with torch.no_grad():
        guide["net.0.weight"].row_log_diagonal.add_(3)  # so that hidden units differ between draws
    joint = guide.joint_posterior()
    torch.testing.assert_close(draws_together(joint, 3), draws_in_a_loop(joint, 3))
    prediction = ps.predict(model, guide, x, num_samples=4)
    assert prediction.functions.shape == (4, 20, 1)
    loss = ps.StructuredELBO(num_particles=3, vectorize_particles=True)
    assert loss.differentiable_loss(model, guide, x, y).isfinite()


def test_compiled_steps_are_the_ordinary_ones():
    data = torch.randn(20, 2), torch.randn(20, 1)

    def make():
        model = make_model(2, 3, 1)
        return model, ps.GlobalInducingGuide(model, data[0][:6], train_inputs=True)

    assert_same(make, data)


def test_running_statistics_are_those_of_the_data_alone():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))
    model, (x, y) = regressor(net, normalization=True), data_of(2)
    guide = ps.GlobalInducingGuide(model, 100 + x[:6])
    train_once(model, guide, x, y)
    assert model.net[1].running_mean.abs().max() < 10
    model.eval()
    before = model.net[1].running_mean.clone()
    guide(x, y)
    torch.testing.assert_close(model.net[1].running_mean, before, rtol=0, atol=0)


def test_it_is_saved_without_its_model():
    x, model = torch.randn(6, 2), make_model(2, 3, 1)
    guide = ps.GlobalInducingGuide(model, x)
    assert_same_draws(guide, copy.deepcopy(guide))
    unpickled = pickle.loads(pickle.dumps(guide))
    for use in (unpickled.draw, unpickled.to_net, lambda: unpickled.report(x, torch.zeros(6, 1))):
        with pytest.raises(RuntimeError, match="unpickled without its model"):
            use()
    found = []
    for each in (guide, unpickled):
        torch.manual_seed(1)
        found.append(ps.predict(model, each, x, num_samples=3).functions)
    assert torch.equal(*found)
    assert_same_draws(guide, unpickled)
    with pytest.raises(RuntimeError, match="size mismatch"):
        ps.GlobalInducingGuide(model, x[:5]).load_state_dict(guide.state_dict())


def of_first_batch(train_inputs=False):
    return ps.GlobalInducingGuide(make_model(2, 3, 1), 6, train_inputs=train_inputs)


def of_two():
    return ps.MixtureGuide(make_model(2, 3, 1), partial(ps.GlobalInducingGuide, inputs=6), 2)


def state_of(guide):
    guide.initialize(*data_of(2))
    return scramble(guide).state_dict()


def assert_state(module, state):
    own = module.state_dict()
    assert own.keys() == state.keys()
    assert all(torch.equal(own[name], value) for name, value in state.items())


@pytest.mark.parametrize("make", [of_first_batch, partial(of_first_batch, True), of_two])
def test_a_state_has_the_points_of_a_guide_that_has_none_yet(make):
    guide, new, part = (make() for _ in range(3))
    state = copy.deepcopy(state_of(guide))
    new.load_state_dict(state)
    assert_state(new, state)
    assert_same_draws(guide, new)
    new.initialize(*data_of(2))  # with other points in its batch
    assert_state(new, state)
    parent = nn.ModuleDict({"guide": part})
    parent.load_state_dict({f"guide.{name}": value for name, value in state.items()})
    assert_state(part, state)


def test_points_of_a_state_have_the_precision_of_the_guide():
    state, new = state_of(of_first_batch()), of_first_batch()
    new.load_state_dict({
        name: value.float() if value.is_floating_point() else value for name, value in state.items()
    })
    assert {value.dtype for _, value in new.named_parameters()} == {torch.float64}
    assert torch.equal(new.inducing_inputs, state["inducing_inputs"].float().double())


def test_a_state_that_does_not_fit_places_no_points():
    state, new = state_of(of_first_batch()), of_first_batch()
    before, last = copy.deepcopy(new.state_dict()), next(name for name in state if "target" in name)
    other = state_of(ps.GlobalInducingGuide(make_model(2, 3, 1), first_layer=MeanField()))
    missing = {name: value for name, value in state.items() if name != last}
    for wrong, message in (
        (other, "family = MeanField instead of MatrixNormal"),
        (missing, "Missing key"),
        (state | {"other": torch.zeros(3)}, "Unexpected key"),
        (state | {last: torch.zeros(7)}, "size mismatch"),
    ):
        with pytest.raises(RuntimeError, match=message):
            new.load_state_dict(wrong)
        assert_state(new, before)
    with pytest.raises(RuntimeError, match="family = MeanField instead of MatrixNormal"):
        nn.Sequential(new).load_state_dict({f"0.{name}": value for name, value in other.items()})
    assert_state(new, before)


def test_another_number_of_points_and_an_optimizer_of_before_are_named():
    state, new = state_of(of_first_batch()), of_first_batch()
    new.initialize(*(value[:4] for value in data_of(2)))
    before = copy.deepcopy(new.state_dict())
    for target, lead in ((new, ""), (nn.ModuleDict({"guide": new}), "guide.")):
        with pytest.raises(
            RuntimeError, match=r"Load it into a new `GlobalInducingGuide\(model\)`"
        ):
            target.load_state_dict({f"{lead}{name}": value for name, value in state.items()})
        assert_state(new, before)
    new = of_first_batch()
    assert len([*new.parameters()]) > 0
    with pytest.warns(NewParametersWarning, match="or a state dict, makes the parameters .*target"):
        new.load_state_dict(state)


def test_parameters_are_of_full_precision_under_autocast():
    model = regressor(make_net(2, 3, 1).float())
    guide = ps.GlobalInducingGuide(model, 5)
    with torch.autocast("cpu", torch.bfloat16):
        train_once(model, guide, *(value.float() for value in data_of(2)))
    assert {parameter.dtype for parameter in guide.parameters()} == {torch.float32}


def test_attention_and_skips_have_a_gradient_for_every_parameter():
    attention = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True, dropout=0.0)
    net = nn.Sequential(attention, nn.Flatten(), nn.Linear(12, 3))
    model = ps.Classifier(ps.bayesianize(net, 1.0, normalization=False), num_data=6)
    x = torch.randn(6, 3, 4)
    guide = ps.GlobalInducingGuide(model, x[:2])
    scramble(guide)
    train_once(model, guide, x, torch.randint(3, (6,)))
    assert len(guide["net.2.weight"].target) == 2
    assert len(guide["net.0.linear1.weight"].target) == 6  # of 3 positions each


def test_a_function_has_its_points_at_the_first_call():
    x, y = data_of(2)

    def model(x, y=None):
        first = pyro.sample("a", pyro.distributions.Normal(torch.zeros(3, 2), 1.0).to_event(2))
        second = pyro.sample("b", pyro.distributions.Normal(torch.zeros(1, 3), 1.0).to_event(2))
        scale = pyro.sample("scale", pyro.distributions.LogNormal(0.0, 1.0))
        mean = F.linear(F.linear(x, first).tanh(), second).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", pyro.distributions.Normal(mean, scale), obs=y)

    guide = ps.GlobalInducingGuide(model, x[:4])
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), ps.StructuredELBO())
    assert math.isfinite(svi.step(x, y.squeeze(-1)))
    assert guide["b"].target.shape == (4, 1)
    assert guide.draw()["scale"] > 0


def test_weights_that_are_used_otherwise_are_named():
    first = nn.Sequential(nn.Embedding(5, 4), nn.Conv1d(2, 2, 1, groups=2))
    model = regressor(nn.Sequential(first, nn.Flatten(), nn.Linear(8, 1)))
    words = torch.randint(5, (6, 2))
    message = r"'net.0.0.weight' in another way.*`families=.*'net.0.0.weight': Mean"
    with pytest.raises(RuntimeError, match=message):
        ps.GlobalInducingGuide(model, words)
    families = {"net.0.*": MeanField()}
    guide = ps.GlobalInducingGuide(model, words, families=families, train_inputs=True)
    assert guide["net.2.weight"].target.shape == (6, 1)
    assert not isinstance(guide.inducing_inputs, nn.Parameter)  # words are no real numbers
    model = regressor(nn.Sequential(nn.Conv1d(2, 4, 1), nn.Conv1d(4, 4, 1, groups=2), nn.Flatten()))
    with pytest.raises(RuntimeError, match=r"'net.1.weight' is transposed, stacked or in groups"):
        ps.GlobalInducingGuide(model, torch.randn(3, 2, 1))


def test_what_cannot_stand_beside_the_layers_is_refused():
    model, x = make_model(2, 3, 1), torch.randn(5, 2)
    for options, error, message in (
        ({"families": {"net.0.*": Members(3)}}, ValueError, "are drawn jointly"),
        ({"first_layer": Members(3)}, TypeError, "`first_layer` must be a family of one weight"),
        ({"local_reparam": True}, ValueError, "`local_reparam` must be False"),
    ):
        with pytest.raises(error, match=message):
            ps.GlobalInducingGuide(model, x, **options)
    with pytest.raises(ValueError, match="Pass the inducing points themselves"):
        ps.GlobalInducingGuide(model, 3).initialize(x=x)
    with pytest.raises(ValueError, match=r"but it is a torch.Tensor of shape \(\)"):
        ps.GlobalInducingGuide(lambda scale: model(x), 3).initialize(torch.tensor(1.0))
    guide = ps.GlobalInducingGuide(model, x, first_layer=InducingWeights((2, 2)))
    assert guide.draw()["net.0.weight"].shape == (3, 2)
    with pytest.raises(NotImplementedError, match="depend on each other"):
        guide.quantiles([0.5])
    with pytest.raises(NotImplementedError, match="depends on its points"):
        ps.estimate_memory(ps.GlobalInducingGuide, model)
    q = guide["net.2.weight"]()
    for ask in (lambda: q.variance, lambda: q.mean, q.rsample, lambda: q.log_prob(x)):
        with pytest.raises(NotImplementedError, match=r"Use `guide.draw\(\)`"):
            ask()


def test_a_part_of_a_list_of_guides_and_sites_of_single_examples_are_refused():
    model = make_model(2, 3, 1)
    together = pyro.infer.autoguide.AutoGuideList(model)
    together.append(ps.GlobalInducingGuide(poutine.block(model, hide=["net.2.bias"])))
    with pytest.raises(NotImplementedError, match="cannot be a part of an AutoGuideList"):
        together(torch.randn(20, 2), torch.randn(20, 1))
    guide = ps.GlobalInducingGuide(local_latent_function, 3)
    with pytest.raises(ValueError, match="belong to single examples"):
        guide.initialize(torch.randn(5, 3), torch.randn(5))


def test_draws_are_those_of_evaluation_mode_after_training():
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1))
    model = ps.Regressor(ps.bayesianize(net, normalization=False), 12, 0.3)
    guide = ps.GlobalInducingGuide(model, torch.randn(4, 3))
    guide.initialize(torch.randn(12, 3), torch.randn(12, 1))
    found = []
    for mode in (True, False):
        model.train(mode)
        torch.manual_seed(0)
        found.append([guide.median(), guide.draw()])
        assert model.training == mode
    torch.testing.assert_close(*found)
