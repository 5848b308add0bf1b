"""Updates by fused kernels, which take elements in the order of memory, and their roundings."""

from functools import partial

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.infer.structured_adam import _at_most
from tests.models import make_regressor, regression_data

TABLE = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).cos().reshape(2, 12)


def make_optimizer(*parameters):
    guide = ps.MeanFieldGuide(make_regressor(4))
    guide.initialize(*regression_data(4))
    return ps.StructuredAdam(parameters, guide)


def take_steps(parameter, lay_out):
    parameter = nn.Parameter(parameter)
    optimizer = make_optimizer(parameter)
    for seed in range(3):
        torch.manual_seed(seed)
        parameter.grad = lay_out(torch.randn(3, 4))
        optimizer.step()
    return parameter.detach()


def test_a_gradient_in_another_order_of_memory_moves_its_elements():
    start = TABLE[:, :6].reshape(3, 4)
    expected = take_steps(start.clone(), lambda gradient: gradient)
    assert torch.equal(take_steps(start.clone(), lambda own: own.mT.contiguous().mT), expected)
    transposed = start.mT.contiguous().mT  # which is dense
    assert not transposed.is_contiguous()
    assert torch.equal(take_steps(transposed, lambda gradient: gradient), expected)


@pytest.mark.parametrize("value", [TABLE[:, :6], TABLE[:1].expand(2, 12)])
def test_a_slice_of_another_tensor_is_refused(value):
    message = r"all elements next to each other.*strides.*parameter.data.contiguous\(\)"
    with pytest.raises(ValueError, match=message):
        make_optimizer(nn.Parameter(value))


def test_a_move_is_cut_to_the_same_bits_for_a_number_and_a_tensor():
    """A record of a step has its rates in tensors, in double precision."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        for move in torch.randn(100, 7, dtype=dtype):
            size = 0.1 * 2**-0.5
            cut = _at_most(size, move)
            assert cut.dtype == dtype
            assert torch.equal(cut, _at_most(torch.tensor(size, dtype=torch.float64), move))


@pytest.mark.parametrize(
    "make_guide", [ps.RowwiseGuide, pytest.param(ps.MatrixNormalGuide, marks=pytest.mark.slow)]
)
def test_traced_steps_cut_moves_as_pythons(make_guide):
    """Noise of 3 leaves posteriors near the prior, whose second moves are large."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    found = []
    for compiled in (False, "traced"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        model = ps.Regressor(ps.bayesianize(net, 1.0), noise_scale=3.0)
        guide, options = make_guide(model), {"num_steps": 120, "progress": False}
        history = ps.fit(model, guide, (x, x[:, :1].sin()), compiled=compiled, **options)
        found.append((history.elbo, [value.detach() for value in guide.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_clipped_beside_a_parameter_in_half_precision(dtype):
    """One gradient of a thousand times the usual norm is divided by about 1000 / 3."""
    first, value = nn.Parameter(torch.zeros(4, dtype=dtype)), nn.Parameter(torch.zeros(4, 4))
    moves = []
    for size in (100.0, 1e5):
        optimizer = make_optimizer(first, value)
        for _ in range(20):
            value.grad = torch.full((4, 4), 100.0)
            optimizer.step()
        before = optimizer.state[value]["exp_avg"].clone()
        value.grad = torch.full((4, 4), size)
        optimizer.step()
        moves.append((optimizer.state[value]["exp_avg"] - 0.9 * before).mean())
    assert moves[1] / moves[0] == pytest.approx(3.0, rel=0.05)


def test_complex_parameters_move_as_pairs_of_real_ones():
    """Points of a net of Fourier modes, whose updates the fused kernel does not have."""
    start, bias = torch.randn(4, 3, 2), torch.randn(3, 2)
    target = torch.randn(4, 3, dtype=torch.complex128)
    found = []
    for as_given in (torch.clone, lambda value: torch.view_as_complex(value.clone())):
        parameters = [nn.Parameter(as_given(start)), nn.Parameter(as_given(bias))]
        optimizer = make_optimizer(*parameters)
        optimizer.param_groups[1]["unit"] = 0.1  # of a row of pairs, which is a vector as complex
        for _ in range(5):
            optimizer.zero_grad()
            first, last = (p if p.is_complex() else torch.view_as_complex(p) for p in parameters)
            ((first - target).abs().square().sum() + (first * last).real.sum()).backward()
            optimizer.step()
        found.append([
            p.data if p.is_complex() else torch.view_as_complex(p.data) for p in parameters
        ])
    torch.testing.assert_close(*found)


def test_options_that_it_does_not_have_are_refused():
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = make_optimizer(first)
    message = r"`param_group` must have options among .* but got \['maximize', 'weight_decay'\]"
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [second], "weight_decay": 1.0, "maximize": True})
    with pytest.raises(ValueError, match=r"but got \['unit'\]"):  # which follows from the parameter
        optimizer.add_param_group({"params": [second], "unit": 1.0})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [second], "lr": 0.2})
    for wrong in ({"params": [first]}, ("weight", first)):
        with pytest.raises(TypeError, match=r"`parameters` must be tensors.*`add_param_group`"):
            make_optimizer(wrong)


def test_fit_says_how_to_pass_it():
    model = make_regressor(10)
    guide, data = ps.MeanFieldGuide(model), regression_data(10)
    options = {"num_steps": 1, "progress": False}
    with pytest.raises(TypeError, match=r"Leave it out, or write `partial\(StructuredAdam, guide"):
        ps.fit(model, guide, data, optimizer=ps.StructuredAdam, **options)
    ps.fit(model, guide, data, optimizer=partial(ps.StructuredAdam, guide=guide), **options)
