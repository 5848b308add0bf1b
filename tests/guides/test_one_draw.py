"""One set of weights outside of objectives: a plain net, one draw for a block, fixed functions."""

import copy
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import Predictive
from pyro.nn import PyroModule
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import MeanField
from tests.models import make_regressor
from tests.unit_noise import close


class Tied(nn.Module):
    """Has a weight that two layers share, a frozen one, and one of a normalization layer."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.base = nn.Linear(3, 3, bias=False).requires_grad_(False)
        self.decoder = nn.Linear(3, 4)
        self.decoder.weight = nn.Parameter(torch.randn(4, 3))
        self.encoder_of_outputs = nn.Linear(3, 4)
        self.encoder_of_outputs.weight = self.decoder.weight

    def forward(self, x):
        hidden = self.base(self.norm(self.encoder(x)))
        return self.decoder(hidden) + self.encoder_of_outputs(hidden)

    def double_outputs(self, x):
        return self(x) + self(x)


class Adapter(nn.Linear):
    """A frozen layer and an update of rank 1, which evaluation mode merges in place."""

    def __init__(self):
        super().__init__(3, 3, bias=False)
        self.weight.requires_grad_(False)
        self.up, self.down = nn.Parameter(torch.randn(3, 1)), nn.Parameter(torch.randn(1, 3))
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if not mode and not self.merged:
            self.weight.data += self.up @ self.down
            self.merged = True
        return self

    def forward(self, x):
        y = nn.functional.linear(x, self.weight)
        return y if self.merged else y + x @ self.down.T @ self.up.T

    def save_pretrained(self, path):
        torch.save(self.state_dict(), path)


def make(net=None, normalization=False, **options):
    model = ps.Regressor(
        ps.bayesianize(Tied() if net is None else net, normalization=normalization), 6, 0.1
    )
    return model, ps.MeanFieldGuide(model, init_scale=0.3, **options)


CALLS = {
    "the model": lambda model, x: model(x),
    "the net": lambda model, x: model.net(x),
    "a method of the net": lambda model, x: model.net.double_outputs(x),
    "a layer": lambda model, x: model.net.encoder(x),
    "a parameter's values": lambda model, x: model.net.encoder.weight + 1,
    "a tied parameter's values": lambda model, x: torch.cat([model.net.encoder_of_outputs.weight]),
    "setting a parameter": lambda model, x: setattr(model.net.encoder, "weight", x),
}


def test_outside_of_handlers_nothing_is_drawn_from_the_prior():
    model, _ = make()
    x, message = torch.randn(6, 4), r"is random, and no pass defines .* `guide\.to_net\(\)`"
    for call in CALLS.values():
        with pytest.raises(RuntimeError, match=message):
            call(model, x)
    assert not torch.equal(poutine.block(model)(x), poutine.block(model)(x))
    for parallel in (False, True):
        predictive = Predictive(model, num_samples=3, parallel=parallel)
        assert predictive(x)["obs"].shape == (3, 6, 4)


def test_what_is_known_without_values_is_answered():
    model, _ = make(nn.Sequential(nn.Linear(4, 3), nn.LSTM(3, 2)))
    weight = model.to(torch.float32).net[0].weight
    assert (weight.shape, weight.dtype, weight.device.type) == ((3, 4), torch.float32, "cpu")
    assert repr(weight) == "UnsampledParameter(site='net.0.weight', shape=(3, 4))"
    assert "in_features=4" in repr(model)
    copy.deepcopy(model)


def test_merging_and_saving_raise_and_the_users_net_stays(tmp_path):
    net = nn.Sequential(Adapter(), nn.Linear(3, 3))
    before = net[0].weight.clone()
    model, guide = make(net)
    for context in (nullcontext(), guide.sampled()):
        with context, pytest.raises(RuntimeError, match=r"'net\.0\.up' is random"):
            model.eval()
    plain, x = guide.to_net(), torch.randn(5, 3)
    expected = plain(x)
    torch.testing.assert_close(plain.eval()(x), expected)
    assert plain[0].merged
    torch.testing.assert_close(net[0].weight, before, rtol=0, atol=0)
    model, guide = make(Adapter())
    with pytest.raises(RuntimeError, match=r"no weights to save.* Save `guide\.to_net\(\)`"):
        model.net.save_pretrained(tmp_path / "weights")
    guide.to_net().save_pretrained(tmp_path / "weights")
    assert [*torch.load(tmp_path / "weights")] == ["weight", "up", "down"]


@pytest.mark.parametrize("normalization", [False, True])
def test_a_plain_net_is_one_of_the_users_class(normalization):
    net = Tied()
    _, guide = make(net, normalization)
    plain, x = guide.to_net(), torch.randn(6, 4)
    assert type(plain) is Tied
    assert type(plain.encoder) is nn.Linear
    named, own = dict(plain.named_parameters()), dict(net.named_parameters())
    assert [*named] == [*own]
    assert [*plain.state_dict()] == [*net.state_dict()]
    assert [p.requires_grad for p in named.values()] == [p.requires_grad for p in own.values()]
    assert plain.encoder_of_outputs.weight is plain.decoder.weight
    torch.testing.assert_close(plain(x), net(x), rtol=0, atol=0)  # where the guide starts
    assert not {p.data_ptr() for p in named.values()} & {p.data_ptr() for p in own.values()}
    assert not {*vars(plain)} - {*vars(net)}
    assert not plain._forward_pre_hooks
    plain(x).sum().backward()


DENSE = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
LEARNED = ps.HierarchicalScale(dist.LogNormal(0.0, 1.0))
CONVERTED = {
    # A net, the shape of its inputs, its prior, and its layers of this package.
    "recurrent": (nn.Sequential(nn.LSTM(4, 3, 2)), (5, 6, 4), 1.0, {}),
    "weight norm": (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (5, 4), 1.0, {}),
    "transformer": (
        *(nn.TransformerEncoderLayer(4, 2, 5, batch_first=True, dropout=0.0), (2, 3, 4), 1.0, {}),
    ),
    "rank one": (DENSE, (6, 4), 1.0, {"0": ps.RankOne()}),
    "scales": (DENSE, (6, 4), {"2.*": LEARNED, "*": 1.0}, {"0": ps.WalshHadamard()}),
}


@pytest.mark.parametrize(("net", "shape", "prior", "layers"), CONVERTED.values(), ids=CONVERTED)
def test_a_draw_gives_the_net_that_the_model_is_at_it(net, shape, prior, layers):
    bayes_net, x = (
        ps.bayesianize(net.double(), prior, normalization=True, layers=layers),
        torch.randn(shape),
    )
    guide = ps.StructuredGuide(bayes_net, {"*": MeanField()}, init_scale=0.3)
    guide.initialize(x)
    with guide.sampled() as draw:
        expected, again = bayes_net(x), bayes_net(x)
    plain = guide.to_net(draw)
    for outputs in (again, plain(x), plain(x)):
        torch.testing.assert_close(outputs, expected, rtol=0, atol=0)
    if not layers:
        assert {type(part) for part in plain.modules()} == {type(part) for part in net.modules()}


def test_one_draw_is_used_by_all_calls_and_is_differentiable():
    model, guide = make()
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    with guide.sampled() as draw:
        assert torch.equal(model(x), model.net(x))
        torch.testing.assert_close(model.net.double_outputs(x), 2 * model(x))
        trace = poutine.trace(model).get_trace(x)
        assert trace.nodes["net.encoder.weight"]["value"] is draw["net.encoder.weight"]
        (model(x) - y).square().sum().backward()
    for posterior in guide.posteriors.values():
        assert all(parameter.grad.abs().sum() > 0 for parameter in posterior.parameters())
    with guide.sampled() as other:
        assert not torch.equal(model(x), guide.to_net(draw)(x))
    with guide.sampled(draw):
        assert torch.equal(model(x), guide.to_net(draw)(x))
    assert other is not draw


def test_objectives_and_predictions_draw_inside_of_a_block_as_outside():
    model, guide = make()
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    guide.initialize(x, y)
    far = {name: value + 100 for name, value in guide.draw().items()}
    found = []
    for draw in (None, far):
        pyro.set_rng_seed(0)
        with guide.sampled(guide.draw() if draw is None else draw):
            pyro.set_rng_seed(1)
            loss = ps.StructuredELBO().loss(model, guide, x, y)
            found.append((loss, ps.predict(model, guide, x, num_samples=3).mean))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_draws_that_do_not_fit():
    model, guide = make()
    draw = guide.draw()
    rest = {name: value for name, value in draw.items() if name != "net.encoder.bias"}
    message = r"value of shape \(3,\) for the site 'net\.encoder\.bias', but got none"
    with pytest.raises(ValueError, match=message):
        guide.to_net(rest)
    with pytest.raises(ValueError, match=r"`draw` must have a value for each site, but \['net\.de"):
        guide.sampled({})
    stacked = {name: value.unsqueeze(0) for name, value in draw.items()}
    message = r"value of shape \(3, 4\) for the site .*, but got \(1, 3, 4\)"
    with pytest.raises(ValueError, match=message):
        guide.to_net(stacked)
    with guide.sampled(stacked), pytest.raises(ValueError, match=message):
        model(torch.randn(6, 4))


def test_the_net_of_a_model_of_ones_own():
    class Around(PyroModule):
        def __init__(self, count):
            super().__init__()
            nets = [ps.bayesianize(nn.Linear(3, 1)) for _ in range(count)]
            self.nets = PyroModule[nn.ModuleList](nets)

        def forward(self, x):
            return sum(net(x) for net in self.nets)

    assert type(ps.MeanFieldGuide(Around(1)).to_net()) is nn.Linear
    with pytest.raises(TypeError, match=r"needs a model with one net .* with 2 of them"):
        ps.MeanFieldGuide(Around(2)).to_net()


# ---- functions of a net at fixed draws -----------------------------------------------------------


def make_functions_guide(make=ps.KTiedGuide, **options):
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
    model = ps.Regressor(ps.bayesianize(net, normalization=False), num_data=8, noise_scale=0.1)
    return make(model, init_scale=0.3, **options)


def sampled(guide, count, x, read=lambda outputs: outputs):
    """Return functions, and the outputs of the nets at the same draws."""
    torch.manual_seed(1)
    functions = guide.sample_functions(count)
    torch.manual_seed(1)
    draws = guide.joint_posterior().draw_many(range(count))
    nets = [guide.to_net({key: draw[i] for key, draw in draws.items()}) for i in range(count)]
    return functions, torch.stack([read(net.eval()(x)) for net in nets])


@pytest.mark.parametrize("make", [ps.KTiedGuide, ps.MAPGuide, ps.InducingWeightGuide])
def test_each_function_is_the_net_at_one_draw(make):
    guide, x = make_functions_guide(make), torch.randn(7, 3, requires_grad=True)
    functions, expected = sampled(guide, 4, x)
    close(functions(x), expected)
    assert torch.equal(functions(x), functions(x))
    assert len(functions) == 4
    assert (make is ps.MAPGuide) == bool((expected[0] == expected[1]).all())
    found, own = (torch.autograd.grad(each[1].sum(), x)[0] for each in (functions(x), expected))
    torch.testing.assert_close(found, own, rtol=1e-12, atol=1e-14)
    assert not [*functions.parameters()], "samples are frozen"


def test_functions_of_an_ensemble_are_those_of_its_members_in_turn():
    ensemble, x = ps.EnsembleGuide(make_regressor(8), size=3), torch.randn(7, 3)
    members = torch.stack([member.to_net()(x) for member in ensemble.members])
    close(ensemble.sample_functions(3)(x), members)
    nets = [ensemble.to_net(ensemble.draw(number=number)) for number in range(3)]
    close(torch.stack([net(x) for net in nets]), members)


@pytest.mark.parametrize(
    "make_guide",
    [
        partial(ps.EnsembleGuide, size=2),
        partial(ps.InducingWeightGuide, inducing_shape=(2, 2), inducing_posterior="ensemble"),
    ],
)
def test_an_ensemble_has_no_net_of_average_weights(make_guide):
    guide = make_guide(make_regressor(8))
    with pytest.raises(ValueError, match=r"`draw` must be given.*guide\.to_net\(guide\.draw\(\)\)"):
        guide.to_net()
    assert type(guide.to_net(guide.draw())) is nn.Sequential


def test_it_is_a_module_with_a_state():
    guide, x = make_functions_guide(), torch.randn(7, 3)
    functions, others = guide.sample_functions(2), guide.sample_functions(2)
    assert not torch.equal(functions(x), others(x))
    others.load_state_dict(functions.state_dict())
    assert torch.equal(functions(x), others(x))
    assert functions.float()(x.float()).dtype == torch.float32


class WithLogits(nn.Module):
    """A net that returns an object, as those of transformers do."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(3, 4).requires_grad_(False)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return SimpleNamespace(logits=self.head(self.base(x).tanh()), cache=[])


def test_frozen_parameters_are_kept_once_and_logits_are_returned():
    guide = ps.KTiedGuide(ps.Classifier(ps.bayesianize(WithLogits()), num_data=8))
    x = torch.randn(7, 3)
    functions, expected = sampled(guide, 3, x, lambda outputs: outputs.logits)
    close(functions(x), expected)
    shapes = {name: tuple(value.shape) for name, value in functions.state_dict().items()}
    of_head = {"head/weight": (3, 2, 4), "head/bias": (3, 2)}
    assert shapes == of_head | {"base/weight": (4, 3), "base/bias": (4,)}


def test_outputs_are_those_that_the_likelihood_reads():
    class WithState(nn.Linear):
        def forward(self, x):
            return x, super().forward(x)

    net, x = ps.bayesianize(WithState(3, 2)), torch.randn(7, 3)
    guide = ps.KTiedGuide(ps.Classifier(net, num_data=8, output=lambda pair: pair[1]))
    functions, expected = sampled(guide, 2, x, lambda pair: pair[1])
    close(functions(x), expected)
    with pytest.raises(TypeError, match="The net must return a tensor"):
        ps.KTiedGuide(ps.Classifier(net, num_data=8)).sample_functions(2)(x)


def test_functions_of_a_shared_layer_are_the_same_in_each_call():
    layer = nn.Linear(3, 3)
    net = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(3, 3))
    net[3].bias = layer.bias
    guide, x = ps.MeanFieldGuide(ps.Regressor(ps.bayesianize(net), 8, 0.1)), torch.randn(7, 3)
    functions, expected = sampled(guide, 2, x)
    for _ in range(3):
        close(functions(x), expected)


def test_it_is_exported_as_one_graph_for_any_batch():
    functions, x = ps.KTiedGuide(make_regressor(8)).sample_functions(3), torch.randn(7, 3)
    assert not functions.training  # of which exports of torch warn
    batch = torch.export.Dim("batch")
    exported = torch.export.export(functions, (x,), dynamic_shapes={"args": ({0: batch},)})
    for rows in (x, torch.randn(4, 3)):
        torch.testing.assert_close(exported.module()(rows), functions(rows), rtol=1e-12, atol=1e-14)


def test_graphs_of_one_size_are_refused_where_another_is_asked_for():
    """By `torch.export.export`; `torch.onnx.export` raises nothing of a module."""
    layers, x = [nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)], torch.randn(7, 3)
    net = ps.bayesianize(nn.Sequential(*layers), normalization=False)
    functions = ps.MeanFieldGuide(ps.Classifier(net, num_data=10)).sample_functions(3)
    shapes = {"args": ({0: torch.export.Dim("batch")},)}
    with pytest.raises(Exception, match=r"marked batch as dynamic but"):
        torch.export.export(functions, (x,), dynamic_shapes=shapes)


def test_nets_without_functions_are_refused():
    class Last(nn.LSTM):  # without batching rules
        def forward(self, x):
            return super().forward(x)[0][:, -1]

    net = ps.bayesianize(nn.Sequential(Last(3, 4, batch_first=True), nn.Linear(4, 1)))
    functions = ps.MeanFieldGuide(ps.Regressor(net, 8, 0.1)).sample_functions(2)
    with pytest.raises(RuntimeError, match=r"must run under `torch.func.vmap`.*guide.to_net"):
        functions(torch.randn(5, 6, 3))
