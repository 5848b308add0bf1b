"""Guides on nets: a step is the net's, its gradient reaches all, draws are functions, sites are random.

Each net has a guide with joint biases, and a transformer has every guide.
"""

from fnmatch import fnmatchcase

import pyro.poutine as poutine
import pytest
import torch

import pyro_structvi as ps
from pyro_structvi.weights.lazy import DelayDraws
from tests.guide_cases import GUIDES, POINTS, once
from tests.real_nets.nets import CASES
from tests.unit_noise import draw_with_noise

CASE_NAMES = [case.name for case in CASES]


def case_of(name):
    return CASES[CASE_NAMES.index(name)]


def make_guide(name, case, model):
    if name == "ensemble":
        return ps.EnsembleGuide(model, 3, vectorize=case.runs_mapped)
    return (GUIDES | POINTS)[name](model)


def assert_draws_are_functions(model, guide, inputs, draws_differ=True):
    """The same inputs again, in other mini-batches, give the same outputs; another draw others."""
    twice = tuple(torch.cat([value, value]) for value in inputs)
    functions = ps.predict(
        model, guide, twice, num_samples=5, batch_size=len(inputs[0]) - 1
    ).functions
    first, again = functions.split(len(inputs[0]), 1)
    tolerance = 1e-10 if functions.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(first, again, rtol=tolerance, atol=tolerance)
    changes = (first - first[0]).abs().amax(list(range(1, first.dim())))
    assert (changes[1:] > 10 * tolerance).any() == draws_differ


ON_EVERY_NET, WITH_EVERY_GUIDE = "k-tied, joined", "transformer encoder"
PAIRS = [
    *((name, ON_EVERY_NET) for name in CASE_NAMES if name != WITH_EVERY_GUIDE),
    *(
        pytest.param(WITH_EVERY_GUIDE, *guide.values, marks=guide.marks)
        for guide in once([*GUIDES, *POINTS])
    ),
    *(("LeNet", guide) for guide in ("inducing weights", "ensemble", "matrix normal, joined")),
]


GAUSSIAN = [name for name in GUIDES if name != "inducing weights, ensemble"]


@pytest.mark.parametrize(("name", "guide_name"), PAIRS)
def test_a_step_is_the_nets_reaches_every_parameter_and_draws_are_functions(name, guide_name):
    """Without noise it is that of the net at the means, whatever way a layer takes.

    These ways are outputs, factors, a joined bias, a draw.
    """
    case = case_of(name)
    model, data = case.make()
    guide = make_guide(guide_name, case, model)
    guide.initialize(*data)
    (-ps.StructuredELBO().terms(model, guide, *data).elbo).backward()
    for key, parameter in guide.named_parameters():
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.ne(0).any() or not parameter.numel(), key
    assert_draws_are_functions(model, guide, data[:-1], draws_differ=guide_name != "points")
    if guide_name not in GAUSSIAN:
        return
    model.eval()
    with torch.no_grad():
        terms, _ = draw_with_noise(lambda: ps.StructuredELBO().terms(model, guide, *data), None)
        at_means = poutine.trace(poutine.condition(model, guide.median())).get_trace(*data)
    at_means.compute_log_prob()
    expected = at_means.nodes["obs"]["log_prob_sum"]
    torch.testing.assert_close(terms.log_likelihood["obs"], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_site_moves_the_outputs_and_is_drawn_only_where_it_must_be(case):
    model, data = case.make()
    guide = GUIDES["low rank"](model, init_scale=0.3)
    guide.initialize(*data)
    with DelayDraws():  # as StructuredELBO does
        trace = poutine.trace(guide).get_trace(*data)
    poutine.replay(model, trace)(*data)
    values = {name: trace.nodes[name]["value"] for name in guide.site_names}
    drawn = [name for name, value in values.items() if getattr(value, "is_drawn", True)]
    assert drawn == [
        name
        for name in guide.site_names
        if any(fnmatchcase(name, pattern) for pattern in case.drawn)
    ]
    model.eval()
    means, draw = guide.median(), guide.draw()
    with torch.no_grad():
        outputs = poutine.condition(model, means)(*data[:-1])
        for name in guide.site_names:
            changed = poutine.condition(model, means | {name: draw[name]})(*data[:-1])
            assert (changed - outputs).abs().max() > 1e-6, name


def test_an_ensemble_that_cannot_train_in_one_pass_is_refused():
    model, data = case_of("LSTM").make()
    with pytest.raises(RuntimeError, match="Pass `vectorize=False` to the guide to run one after"):
        ps.fit(model, ps.EnsembleGuide(model, 3), data, num_steps=1, progress=False)


def test_attention_of_several_draws_runs_in_one_pass():
    """Not in a loop of torch with a warning, which is an error here."""
    model, (x, y) = case_of("transformer encoder").make()
    model.eval()
    guide = ps.EnsembleGuide(model, 3)
    guide.initialize(x, y)
    alone = [ps.StructuredELBO().loss(model, member, x, y) for member in guide.members]
    assert ps.StructuredELBO().loss(model, guide, x, y) == pytest.approx(sum(alone) / 3, rel=1e-9)
    functions = guide.sample_functions(3)
    with torch.no_grad():
        for found, member in zip(functions(x), guide.members, strict=True):
            torch.testing.assert_close(found, member.to_net()(x).detach())
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_fast_path_of_a_transformer_takes_the_draw():
    """Without gradients torch runs a layer in evaluation as one operation on its weights."""
    model, (x, _) = case_of("transformer encoder").make()
    conditioned = poutine.condition(model.eval(), ps.MeanFieldGuide(model, init_scale=0.3).draw())
    with torch.no_grad():
        outputs = conditioned(x)
    torch.testing.assert_close(outputs, conditioned(x).detach())
