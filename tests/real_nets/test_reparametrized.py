"""Weights that are computed from parameters: by ``parametrize``, or by hooks as in pruning."""

import copy
import pickle

import pyro.poutine as poutine
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune, remove_spectral_norm
from torch.nn.utils import spectral_norm as hooked_spectral_norm
from torch.nn.utils import weight_norm as hooked_weight_norm

import pyro_structvi as ps
from tests.real_nets.nets import classifier, perceptron, table
from tests.real_nets.sequence_nets import Recurrent, sequences

LAYER = 2


class Positive(nn.Module):
    def forward(self, weight):
        return F.softplus(weight)


def cayley(layer):
    return parametrizations.orthogonal(layer, orthogonal_map="cayley")


def exponential(layer):
    return parametrizations.orthogonal(layer, orthogonal_map="matrix_exp", use_trivialization=False)


def half(layer, name="weight"):
    return prune.l1_unstructured(layer, name, 0.5)


CHANGES = {
    "weight norm": parametrizations.weight_norm,
    "weight norm by a hook": hooked_weight_norm,
    "orthogonal, Cayley": cayley,
    "orthogonal, exponential": exponential,
    "positive": lambda layer: parametrize.register_parametrization(layer, "weight", Positive()),
    "two in turn": lambda layer: [
        parametrize.register_parametrization(layer, "weight", Positive()) for _ in range(2)
    ],
    "pruned": half,
    "pruned twice": lambda layer: half(half(layer)),
    "pruned units": lambda layer: prune.ln_structured(layer, "weight", 0.5, n=2, dim=0),
    "pruned bias": lambda layer: half(layer, "bias"),
}

pytestmark = pytest.mark.filterwarnings("ignore:.*_norm. is deprecated")


def changed(change):
    return perceptron(lambda net: change(net[LAYER]))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_net_of_a_draw_is_the_one_with_these_parameters(change):
    net = changed(change)
    names, before = [name for name, _ in net.named_parameters()], copy.deepcopy(net.state_dict())
    model, data = classifier(net, *table())
    guide = ps.MeanFieldGuide(model, init_scale=0.3)
    assert sorted(guide.site_names) == sorted(f"net.{name}" for name in names)
    values = guide.draw()
    own = {name: values[f"net.{name}"] for name in names}
    at_means = poutine.condition(model, guide.median())(data[0])
    torch.testing.assert_close(at_means, net(data[0]))
    outputs = poutine.condition(model, values)(data[0])
    assert (outputs - at_means).abs().max() > 1e-3
    torch.testing.assert_close(outputs, functional_call(net, own, (data[0],)))
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_plain_net_has_the_weights_of_its_draw_before_it_runs(change):
    """Hooks leave the weights of the last predictions in the module, tensors of a vmap that is over."""
    model, (x, _) = classifier(changed(change), *table())
    guide = ps.MeanFieldGuide(model, init_scale=0.3)
    ps.predict(model, guide, x, num_samples=3)
    plain, expected = guide.to_net(), guide.to_net(values := guide.draw())
    assert (
        not torch.allclose(plain[LAYER].weight, expected[LAYER].weight)
        or change is CHANGES["pruned bias"]
    )
    before = expected[LAYER].weight.detach().clone()
    own = {name.removeprefix("net."): value for name, value in values.items()}
    torch.testing.assert_close(expected(x), functional_call(plain, own, (x,)))
    torch.testing.assert_close(expected[LAYER].weight, before)
    copied = copy.deepcopy(model)
    outputs = [ps.predict(each, stacked(values), x).functions for each in (copied, model)]
    torch.testing.assert_close(*outputs)


def stacked(values):
    return {name: value.detach().unsqueeze(0) for name, value in values.items()}


@pytest.mark.parametrize("runs_before", [False, True])
@pytest.mark.parametrize("name", ["weight_hh_l0", "weight_ih_l1"])
def test_recurrent_layers(name, runs_before):
    net = Recurrent(nn.LSTM)
    change = parametrizations.weight_norm if "hh" in name else half
    change(net.layer, name)
    if runs_before:  # which lists the computed weight
        net(sequences()[0])
    model, data = classifier(net, *sequences())
    guide = ps.MeanFieldGuide(model, init_scale=0.3)
    values = guide.draw()
    own = {name.removeprefix("net."): value for name, value in values.items()}
    outputs = poutine.condition(model, values)(data[0])
    torch.testing.assert_close(outputs, functional_call(net, own, (data[0],)))


def unchanged(layer, name):
    return layer


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((nn.LSTM, hooked_weight_norm), (nn.GRU, half), (nn.LSTM, unchanged)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((nn.GRU, hooked_weight_norm), (nn.LSTM, half), (nn.GRU, unchanged))
        ),
    ],
)
def test_copies_of_recurrent_layers_after_a_fit(kind, change):
    """These have a way of copying of their own, and list the weights that hooks compute."""
    net = Recurrent(kind)
    change(net.layer, "weight_hh_l0")
    model, (x, y) = classifier(net, *sequences())
    guide = ps.MeanFieldGuide(model, init_scale=0.3)
    ps.fit(model, guide, (x, y), num_steps=2, progress=False)
    draw = guide.draw()
    with guide.sampled(draw):
        expected = model.net(x)
        copied = copy.deepcopy(model)
    assert torch.equal(guide.to_net(draw)(x), expected)
    for other in (copied, pickle.loads(pickle.dumps(model))):
        with guide.sampled(draw):
            assert torch.equal(other.net(x), expected)
    assert len(guide.sample_functions(2)) == 2


# ---- refused -------------------------------------------------------------------------------------


REFUSED = {
    "spectral norm": (
        parametrizations.spectral_norm,
        r"'2\.parametrizations\.weight\.original' is under `spectral_norm`.*Remove it, with "
        "`remove_parametrizations`",
    ),
    "spectral norm by a hook": (
        hooked_spectral_norm,
        r"'2\.weight_orig' is under `spectral_norm`.*`torch.nn.utils.remove_spectral_norm`",
    ),
    "Householder reflections": (
        lambda layer: parametrizations.orthogonal(layer, orthogonal_map="householder"),
        r"""'2\.parametrizations\.weight\.original' is under `orthogonal` by .*Pass """
        r"""`orthogonal_map="cayley"`""",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_a_weight_that_does_not_follow_its_draw_is_refused(change, message):
    net = changed(change)
    with pytest.raises(ValueError, match=message):
        ps.bayesianize(net)
    for name, parameter in net[LAYER].named_parameters():
        parameter.requires_grad_("bias" in name)
    net.eval()
    model, data = classifier(net, *table())  # frozen it has its value
    outputs = poutine.condition(model.eval(), ps.MeanFieldGuide(model).median())(data[0])
    torch.testing.assert_close(outputs, net(data[0]))


def test_what_the_messages_say_to_do_works():
    net = changed(parametrizations.spectral_norm)
    parametrize.remove_parametrizations(net[LAYER], "weight")
    assert ps.bayesianize(net)[LAYER].weight.shape == (4, 4)
    net = changed(hooked_spectral_norm)
    remove_spectral_norm(net[LAYER])
    assert ps.bayesianize(net)[LAYER].weight.shape == (4, 4)
