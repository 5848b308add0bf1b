"""Activation checkpointing computes layers again in the backward pass: with the same weights."""

import pyro
import pytest
import torch
from pyro.infer import Trace_ELBO
from torch import nn
from torch.utils.checkpoint import checkpoint

import pyro_structvi as ps
from pyro_structvi.families import InducingWeights, KTied, LowRank, MeanField
from tests.models import regression_data

FAMILIES = {
    "mean field": MeanField(),
    "k-tied with biases": KTied(2, join_bias=True),
    "low rank": LowRank(2),
    "inducing": InducingWeights((2, 2)),
}


class Blocks(nn.Module):
    """Layers with dropout, two of them computed again in the backward pass."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 4), nn.ReLU())
            for _ in range(2)
        )
        self.kind = kind

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            if self.kind is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
        return self.last(x)


def make(kind, family, **options):
    torch.manual_seed(1)
    model = ps.Regressor(ps.bayesianize(Blocks(kind), prior=1.0), 12, 0.3)
    return model, ps.StructuredGuide(model, {"*": family}, init_scale=0.3, **options)


def gradients(kind, family, loss, **options):
    model, guide = make(kind, family, **options)
    data = regression_data()
    guide.initialize(*data)
    for name, use in guide.uses.items():  # without checkpoints, the same weights are drawn first
        assert bool(use.eager_reason) == (kind is not None and ".blocks." in name)
        use.eager_reason = "a test" if ".blocks." in name else ""
    torch.manual_seed(2)
    value = loss.loss_and_grads(model, guide, *data)
    return value, {name: parameter.grad for name, parameter in guide.named_parameters()}


KINDS = pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])


def assert_same_gradients(found, expected):
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-11)


@KINDS
@pytest.mark.parametrize(
    ("name", "objective"),
    [*((name, ps.StructuredELBO) for name in FAMILIES), ("k-tied with biases", Trace_ELBO)],
)
def test_gradients_are_those_without_checkpoints(name, kind, objective):
    loss = objective(num_particles=2)
    value, expected = gradients(None, FAMILIES[name], loss)
    again, found = gradients(kind, FAMILIES[name], loss)
    assert again == pytest.approx(value, rel=1e-12)
    assert_same_gradients(found, expected)


class OwnWeight(nn.Module):
    """A net whose function under a checkpoint reads a parameter of the net itself."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(3, 4), nn.Linear(4, 1), kind
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.kind is None:
            return self.last(self.part(x))
        return self.last(checkpoint(self.part, x, use_reentrant=self.kind == "reentrant"))

    def part(self, x):
        return torch.tanh(x @ self.weight) * self.weight.sum()


@KINDS
def test_a_function_under_a_checkpoint_reads_a_parameter(kind):
    found = []
    for each in (None, kind):
        torch.manual_seed(1)
        model = ps.Regressor(ps.bayesianize(OwnWeight(each), prior=1.0), 12, 0.3)
        guide = ps.MeanFieldGuide(model, init_scale=0.3, local_reparam=False)
        guide.initialize(*regression_data())
        torch.manual_seed(2)
        ps.StructuredELBO().loss_and_grads(model, guide, *regression_data())
        found.append({name: value.grad for name, value in guide.named_parameters()})
    assert_same_gradients(*found)


@KINDS
def test_each_pass_has_its_own_values(kind):
    """Two losses are differentiated after both passes, the first of them first."""
    data, found = regression_data(), []
    for each in (kind, None):
        model, guide = make(each, MeanField(), local_reparam=False)
        guide.initialize(*data)
        torch.manual_seed(3)
        losses = [ps.StructuredELBO().differentiable_loss(model, guide, *data) for _ in range(2)]
        for loss in losses:
            loss.backward()
        found.append({name: value.grad for name, value in guide.named_parameters()})
    assert_same_gradients(*found)


@KINDS
def test_layers_given_their_inputs_are_behind_checkpoints_but_not_inside(kind):
    data, found = regression_data(), []
    for each in (kind, None):
        model = make(each, MeanField())[0]
        families = {"net.blocks.*": MeanField()}
        guide = ps.GlobalInducingGuide(model, 5, families, init_scale=0.3)
        guide.initialize(*data)
        torch.manual_seed(2)
        loss = ps.StructuredELBO(num_particles=2).differentiable_loss(model, guide, *data)
        loss.backward()
        assert guide["net.last.weight"].target.grad.any()
        found.append((loss, {name: value.grad for name, value in guide.named_parameters()}))
    assert found[0][0] == found[1][0]
    assert_same_gradients(found[0][1], found[1][1])
    guide = ps.GlobalInducingGuide(make(kind, MeanField())[0], 5)
    with pytest.raises(RuntimeError, match=r"'net.blocks.0.0.weight' where .* no checkpoint there"):
        guide.initialize(*data)


class OnlyWithGradients(Blocks):
    """Takes its checkpoints where the pass that counts uses does not see them."""

    def forward(self, x):
        self.kind = "not reentrant" if torch.is_grad_enabled() else None
        return super().forward(x)


@pytest.mark.parametrize("family", [MeanField(), InducingWeights((2, 2))])
def test_checkpoints_that_were_not_seen_are_an_error(family):
    model = ps.Regressor(ps.bayesianize(OnlyWithGradients(None)), 12, 0.3)
    guide = ps.StructuredGuide(model, {"*": family})
    loss = ps.StructuredELBO().differentiable_loss(model, guide, *regression_data())
    with pytest.raises(RuntimeError, match=r"site 'net.blocks.1.*activation checkpoints"):
        loss.backward()


def test_draws_in_one_pass_are_told_to_take_turns():
    """In the backward pass; torch 2.11 maps no checkpoint at all."""
    model = make("not reentrant", MeanField())[0]
    guide, elbo = ps.EnsembleGuide(model, 2), ps.StructuredELBO()
    text = r"needed again in a backward pass.*`vectorize=False`|several draws.*`vectorize=False`"
    with pytest.raises(RuntimeError, match=text):
        elbo.differentiable_loss(model, guide, *regression_data()).backward()


def test_a_net_that_is_checkpointed_as_a_whole():
    net = ps.bayesianize(Blocks(None), prior=1.0)
    data = regression_data()

    def model(x, y=None, reentrant=None):
        mean = net(x) if reentrant is None else checkpoint(net, x, use_reentrant=reentrant)
        with pyro.plate("data", len(x)):
            pyro.sample("obs", pyro.distributions.Normal(mean, 0.3).to_event(1), obs=y)

    guide = ps.MeanFieldGuide(model, local_reparam=False)
    guide.initialize(*data)
    found = []
    for reentrant in (None, False):
        torch.manual_seed(4)
        loss = ps.StructuredELBO().differentiable_loss(model, guide, *data, reentrant=reentrant)
        found.append(torch.autograd.grad(loss, [*guide.parameters()]))
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-11)
    x = data[0].requires_grad_()
    loss = ps.StructuredELBO().differentiable_loss(model, guide, x, data[1], reentrant=True)
    with pytest.raises(
        RuntimeError, match=r"pass that it belongs to is not known.*use_reentrant=False"
    ):
        loss.backward()


def test_without_gradients_no_values_are_kept():
    model, guide = make("reentrant", MeanField())
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):  # torch's own
        prediction = ps.predict(model, guide, regression_data()[0], num_samples=2)
    assert torch.isfinite(prediction.mean).all()
    y = torch.zeros(2, requires_grad=True) * 2
    y.register_hook(lambda gradient: model.net.first(torch.zeros(1, 3)).sum())
    with pytest.raises(RuntimeError, match="in a backward pass"):
        y.sum().backward()
    net = ps.bayesianize(nn.Linear(3, 1, bias=False))
    net.forward = lambda x: net.weight  # an output that is a parameter keeps nothing either
    guide = ps.MAPGuide(net)
    pyro.poutine.replay(net, pyro.poutine.trace(guide).get_trace(torch.zeros(2, 3)))(None)
    assert not any(parameter._backward_hooks for parameter in guide.parameters())
