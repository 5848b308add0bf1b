"""Updates of fused optimizers as operations that compilers know: what torch's own kernels do."""

import pytest
import torch

from pyro_structvi.infer.steps.decompositions import make_elementary
from pyro_structvi.infer.steps.recording import Traced

ADAM, ADAMW = torch.optim.Adam, torch.optim.AdamW
CASES = {
    "adam": (ADAM, {}),
    "every option": (ADAM, {"amsgrad": True, "maximize": True, "weight_decay": 0.1, "eps": 1e-3}),
    "no momentum": (ADAM, {"betas": (0.0, 0.9)}),
    "adamw": (ADAMW, {"weight_decay": 0.1}),
}


def make_parameters():
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 2), (4,)
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in shapes
    ]


def record(parameters, optimizer, x, **given):
    """Return records of a loss with its gradients, and of an update by these, after a step of both."""

    @torch.enable_grad()
    def differentiate(x):
        loss = sum((parameter * x).sin().sum() for parameter in parameters)
        return loss.detach(), None, *torch.autograd.grad(loss, parameters)

    def update(_, *gradients):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for name, value in given.items():
            setattr(optimizer, name, value)
        optimizer.step()
        return ()

    given = {name: torch.tensor(value, dtype=torch.float32) for name, value in given.items()}
    update(*(value for value in differentiate(x) if value is not None))  # which makes its state
    traced = Traced(differentiate, [x])
    return traced, Traced(update, [value for value in traced.outputs if value is not None])


def train(optimizer_of, joins, **given):
    """Take three steps by records, one after the other or as one; return parameters and state."""
    parameters, x = make_parameters(), torch.tensor(0.7, dtype=torch.float64)
    optimizer = optimizer_of(parameters)
    loss, update = record(parameters, optimizer, x, **given)
    joined = loss.followed_by(update, [x])
    can_be_compiled = joined.can_be_compiled
    if can_be_compiled:
        make_elementary(joined.graph.graph)
        joined.graph.recompile()
    for number in range(3):
        inputs = [x + number]
        if joins:
            outputs = joined(inputs)
        else:
            outputs = loss(inputs)
            update([value for value in outputs if value is not None])
    return outputs[:2], parameters, [*optimizer.state.values()], joined if can_be_compiled else None


@pytest.mark.parametrize("given", [{}, {"found_inf": 1.0}, {"found_inf": 0.0, "grad_scale": 4.0}])
@pytest.mark.parametrize("case", CASES)
def test_a_fused_update_is_what_torchs_kernel_does(case, given):
    kind, options = CASES[case]

    def optimizer_of(parameters):
        return kind(parameters, lr=0.01, fused=True, **options)

    *expected, _ = train(optimizer_of, joins=False, **given)
    *found, joined = train(optimizer_of, joins=True, **given)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert not any("_fused_" in str(node.target) for node in joined.graph.graph.nodes)
    moved = not torch.equal(found[1][0], make_parameters()[0])
    assert moved == (given.get("found_inf") != 1.0)


def test_what_no_compiler_takes_is_not_joined():
    *_, joined = train(lambda own: torch.optim.SGD(own, lr=0.01, fused=True), joins=False)
    assert joined is None


def test_a_tensor_in_both_records_is_one_input():
    *_, joined = train(lambda own: ADAM(own, lr=0.01, fused=True), joins=True)
    assert len({id(value) for value in joined.found}) == len(joined.found)


def test_an_update_finds_gradients_in_the_layout_that_it_was_recorded_with():
    x, total = torch.arange(6.0).reshape(2, 3), torch.zeros(6)
    loss = Traced(lambda x: (2 * x.t(),), [x])
    (gradient,) = loss.outputs
    update = Traced(lambda given: (total.add_(given.view(-1)), ())[1], [gradient.contiguous()])
    total.zero_()
    (found,) = loss.followed_by(update, [x])([x])
    assert found.stride() == gradient.stride() != gradient.contiguous().stride()
    assert torch.equal(total, gradient.flatten())
