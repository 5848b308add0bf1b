"""Functions of a net at fixed samples of its weights."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call

import pyro_structvi as ps
from tests.models import linear_function, make_regressor
from tests.unit_noise import close


def make_guide(make=ps.KTiedGuide, **options):
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
    guide, x = make_guide(make), torch.randn(7, 3)
    functions, expected = sampled(guide, 4, x)
    close(functions(x), expected)
    assert torch.equal(functions(x), functions(x))
    assert len(functions) == 4
    assert (make is ps.MAPGuide) == bool((expected[0] == expected[1]).all())
    ensemble = ps.EnsembleGuide(make_regressor(8), size=3)  # members take turns
    members = torch.stack([member.to_net()(x) for member in ensemble.members])
    close(ensemble.sample_functions(3)(x), members)


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


def test_it_is_exported_as_one_graph_for_any_batch():
    functions, x = ps.KTiedGuide(make_regressor(8)).sample_functions(3), torch.randn(7, 3)
    batch = torch.export.Dim("batch")
    exported = torch.export.export(functions, (x,), dynamic_shapes={"args": ({0: batch},)})
    for rows in (x, torch.randn(4, 3)):
        torch.testing.assert_close(exported.module()(rows), functions(rows), rtol=1e-12, atol=1e-14)


def test_what_is_refused():
    guide = ps.KTiedGuide(linear_function)
    guide.initialize(torch.randn(6, 3), torch.randn(6, 2))
    with pytest.raises(TypeError, match="needs a model with one net"):
        guide.sample_functions(2)

    class Last(nn.LSTM):  # without batching rules
        def forward(self, x):
            return super().forward(x)[0][:, -1]

    net = ps.bayesianize(nn.Sequential(Last(3, 4, batch_first=True), nn.Linear(4, 1)))
    functions = ps.MeanFieldGuide(ps.Regressor(net, 8, 0.1)).sample_functions(2)
    with pytest.raises(RuntimeError, match=r"must run under `torch.func.vmap`.*guide.to_net"):
        functions(torch.randn(5, 6, 3))
