"""Functions of a net at fixed samples of its weights."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call

import pyro_structvi as ps
from tests.models import linear_function, make_regressor


def make_guide(make=ps.KTiedGuide, **options):
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
    model = ps.Regressor(ps.bayesianize(net, normalization=False), num_data=8, noise_scale=0.1)
    return make(model, init_scale=0.3, **options)


@pytest.mark.parametrize("make", [ps.KTiedGuide, ps.MAPGuide, ps.InducingWeightGuide])
def test_each_function_is_the_net_at_one_draw(make):
    guide, x = make_guide(make), torch.randn(7, 3)
    torch.manual_seed(1)
    functions = guide.sample_functions(4)
    torch.manual_seed(1)
    draws = guide.joint_posterior().draw_many(range(4))
    nets = [guide.to_net({name: draw[i] for name, draw in draws.items()}).eval() for i in range(4)]
    expected = torch.stack([net(x) for net in nets])
    torch.testing.assert_close(functions(x), expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(functions(x), functions(x))
    assert len(functions) == 4
    assert (make is ps.MAPGuide) == bool((expected[0] == expected[1]).all())


def test_the_members_of_an_ensemble_take_turns():
    model = make_regressor(8)
    guide = ps.EnsembleGuide(model, size=3)
    functions, x = guide.sample_functions(3), torch.randn(7, 3)
    expected = torch.stack([member.to_net()(x) for member in guide.members])
    torch.testing.assert_close(functions(x), expected, rtol=1e-12, atol=1e-14)


def test_gradients_by_inputs_are_those_of_each_net():
    guide, x = make_guide(), torch.randn(7, 3, requires_grad=True)
    functions = guide.sample_functions(2)
    (found,) = torch.autograd.grad(functions(x)[1].sum(), x)
    net = guide.to_net().eval()
    weights = {name for name, _ in net.named_parameters()}
    state = {name.replace("/", "."): value for name, value in functions.state_dict().items()}
    values = {name: value[1] if name in weights else value for name, value in state.items()}
    (expected,) = torch.autograd.grad(functional_call(net, values, (x,)).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert not [*functions.parameters()], "samples are frozen"


def test_it_is_a_module_with_a_state():
    guide, x = make_guide(), torch.randn(7, 3)
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
    torch.manual_seed(1)
    functions = guide.sample_functions(3)
    torch.manual_seed(1)
    draws = guide.joint_posterior().draw_many(range(3))
    nets = [guide.to_net({name: draw[i] for name, draw in draws.items()}) for i in range(3)]
    expected = torch.stack([net(x).logits for net in nets])
    torch.testing.assert_close(functions(x), expected, rtol=1e-12, atol=1e-14)
    shapes = {name: tuple(value.shape) for name, value in functions.state_dict().items()}
    assert shapes == {
        "head/weight": (3, 2, 4),
        "head/bias": (3, 2),
        "base/weight": (4, 3),
        "base/bias": (4,),
    }
    assert len(functions) == 3


class WithState(nn.Linear):
    """A net that returns a tuple."""

    def forward(self, x):
        return x, super().forward(x)


def test_outputs_are_those_that_the_likelihood_reads():
    net, x = ps.bayesianize(WithState(3, 2)), torch.randn(7, 3)
    guide = ps.KTiedGuide(ps.Classifier(net, num_data=8, output=lambda pair: pair[1]))
    torch.manual_seed(1)
    functions = guide.sample_functions(2)
    torch.manual_seed(1)
    draws = guide.joint_posterior().draw_many(range(2))
    nets = [guide.to_net({name: draw[i] for name, draw in draws.items()}) for i in range(2)]
    expected = torch.stack([net(x)[1] for net in nets])
    torch.testing.assert_close(functions(x), expected, rtol=1e-12, atol=1e-14)
    with pytest.raises(TypeError, match="The net must return a tensor"):
        ps.KTiedGuide(ps.Classifier(net, num_data=8)).sample_functions(2)(x)


def test_it_is_exported_as_one_graph_for_any_batch():
    functions, x = ps.KTiedGuide(make_regressor(8)).sample_functions(3), torch.randn(7, 3)
    batch = torch.export.Dim("batch")
    exported = torch.export.export(functions, (x,), dynamic_shapes={"args": ({0: batch},)})
    for rows in (x, torch.randn(4, 3)):
        torch.testing.assert_close(exported.module()(rows), functions(rows), rtol=1e-12, atol=1e-14)


def test_a_model_without_one_net_is_refused():
    guide = ps.KTiedGuide(linear_function)
    guide.initialize(torch.randn(6, 3), torch.randn(6, 2))
    with pytest.raises(TypeError, match="needs a model with one net"):
        guide.sample_functions(2)
    with pytest.raises(ValueError, match="`num_samples` must be"):
        make_guide().sample_functions(0)


def test_a_net_without_batching_rules_is_refused():
    class Last(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0][:, -1]

    net = ps.bayesianize(nn.Sequential(Last(3, 4, batch_first=True), nn.Linear(4, 1)))
    functions = ps.MeanFieldGuide(ps.Regressor(net, 8, 0.1)).sample_functions(2)
    with pytest.raises(RuntimeError, match=r"must run under `torch.func.vmap`.*guide.to_net"):
        functions(torch.randn(5, 6, 3))
