"""Guides on nets: a step is the net's, its gradient reaches all, draws are functions, sites are random.

Each net meets the guides that take different ways through it, each guide a net with convolutions, a
transformer and a recurrent net; all pairs are slow tests.
"""

from fnmatch import fnmatchcase

import pyro.poutine as poutine
import pytest
import torch
from torch import nn
from torchvision import models

import pyro_structvi as ps
from pyro_structvi.weights.lazy import DelayDraws
from tests.guide_cases import GUIDES, POINTS, SLOW
from tests.real_nets.nets import CASES, NUM_DATA, images
from tests.unit_noise import draw_with_noise

CASE_NAMES = [case.name for case in CASES]


def case_of(name):
    return CASES[CASE_NAMES.index(name)]


def make_guide(name, case, model):
    if name == "ensemble":
        return ps.EnsembleGuide(model, 3, vectorize=case.runs_mapped)
    return (GUIDES | POINTS)[name](model)


def num_steps_of(guide_name):
    if guide_name == "dropout":  # whose noise is as large as the weights from the start
        return 18
    return 30 if guide_name in SLOW else 6


def assert_learns(model, guide, data, **options):
    history = ps.fit(model, guide, data, **options, progress=False)
    for values in (history.elbo, history.log_likelihood):
        first, *_, last = torch.tensor(values).chunk(3)
        assert last.mean() > first.mean()


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


ALL_PAIRS = [(name, guide) for name in CASE_NAMES for guide in [*GUIDES, *POINTS]]
ON_EVERY_NET = ("k-tied, joined", "inducing weights")
WITH_EVERY_GUIDE = ("LeNet", "transformer encoder", "LSTM cell")
DIFFERENT_PAIRS = [
    (name, guide) for name, guide in ALL_PAIRS if guide in ON_EVERY_NET or name in WITH_EVERY_GUIDE
]


@pytest.mark.parametrize(("name", "guide_name"), DIFFERENT_PAIRS)
def test_a_step_reaches_every_parameter_and_draws_are_functions(name, guide_name):
    case = case_of(name)
    model, data = case.make()
    guide = make_guide(guide_name, case, model)
    guide.initialize(*data)
    (-ps.StructuredELBO().terms(model, guide, *data).elbo).backward()
    for key, parameter in guide.named_parameters():
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.ne(0).any() or not parameter.numel(), key
    assert_draws_are_functions(model, guide, data[:-1], draws_differ=guide_name != "points")


GAUSSIAN = [name for name in GUIDES if name != "inducing weights, ensemble"]


@pytest.mark.parametrize(
    ("name", "guide_name"), [pair for pair in DIFFERENT_PAIRS if pair[1] in GAUSSIAN]
)
def test_without_noise_a_step_is_that_of_the_net_at_the_means(name, guide_name):
    """Whatever way a layer takes: outputs, factors, a joined bias, a draw."""
    model, data = case_of(name).make()
    guide = GUIDES[guide_name](model, init_scale=0.3)
    guide.initialize(*data)
    model.eval()
    with torch.no_grad():
        terms, _ = draw_with_noise(lambda: ps.StructuredELBO().terms(model, guide, *data), None)
        at_means = poutine.trace(poutine.condition(model, guide.median())).get_trace(*data)
    at_means.compute_log_prob()
    expected = at_means.nodes["obs"]["log_prob_sum"]
    torch.testing.assert_close(terms.log_likelihood["obs"], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "guide_name"), ALL_PAIRS)
def test_a_guide_learns_and_its_draws_are_functions(name, guide_name):
    case = case_of(name)
    model, data = case.make()
    guide = make_guide(guide_name, case, model)
    assert_learns(model, guide, data, num_steps=num_steps_of(guide_name), lr=0.03)
    assert_draws_are_functions(model, guide, data[:-1], draws_differ=guide_name != "points")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_site_moves_the_outputs(case):
    model, data = case.make()
    guide = ps.MeanFieldGuide(model, init_scale=0.3)
    guide.initialize(*data)
    model.eval()
    means, draw = guide.median(), guide.draw()
    with torch.no_grad():
        outputs = poutine.condition(model, means)(*data[:-1])
        for name in guide.site_names:
            changed = poutine.condition(model, means | {name: draw[name]})(*data[:-1])
            assert (changed - outputs).abs().max() > 1e-6, name


@pytest.mark.parametrize("guide_name", ["mean field", "k-tied", "low rank"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_drawn_in_training(case, guide_name):
    model, data = case.make()
    guide = GUIDES[guide_name](model)
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


@pytest.mark.parametrize("name", ["LSTM", "GRU, time first", "RNN, packed", "LSTM cell"])
def test_an_ensemble_that_cannot_train_in_one_pass_says_so(name):
    model, data = case_of(name).make()
    with pytest.raises(RuntimeError, match="Pass `vectorize=False` to run one after another"):
        ps.fit(model, ps.EnsembleGuide(model, 3), data, num_steps=1, progress=False)


def test_the_fast_path_of_a_transformer_takes_the_draw():
    """Without gradients torch runs a layer in evaluation as one operation on its weights."""
    model, (x, _) = case_of("transformer encoder").make()
    conditioned = poutine.condition(model.eval(), ps.MeanFieldGuide(model, init_scale=0.3).draw())
    with torch.no_grad():
        outputs = conditioned(x)
    torch.testing.assert_close(outputs, conditioned(x).detach())


# ---- torchvision's own, in single precision ------------------------------------------------------


def resnet():
    return models.resnet18(num_classes=2)


def vgg():
    net = models.vgg11(num_classes=2)
    net.avgpool, net.classifier = nn.Flatten(), nn.Linear(512, 2)
    return net


MAIN = {
    "mean field": ps.MeanFieldGuide,
    "k-tied, joined": GUIDES["k-tied, joined"],
    "low rank": GUIDES["low rank"],
    "inducing weights": ps.InducingWeightGuide,
}


@pytest.mark.slow
@pytest.mark.parametrize("make_guide", MAIN.values(), ids=MAIN)
@pytest.mark.parametrize("make_net", [resnet, vgg])
def test_torchvision_nets(make_net, make_guide):
    torch.set_default_dtype(torch.float32)
    x, y = images(32)
    data = 2 * x.expand(-1, 3, -1, -1), y
    net = ps.bayesianize(make_net(), ps.FanIn(2**0.5), normalization=False)
    model = ps.Classifier(net, NUM_DATA)
    guide = make_guide(model)
    # A few examples beside millions of weights: with its full weight the KL leads at first.
    assert_learns(model, guide, data, num_steps=24, lr=1e-3, kl_weight=1e-3)
    assert_draws_are_functions(model, guide, data[:-1])
