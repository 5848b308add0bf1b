"""Unmodified nets of other libraries: what holds for any of them, with any posterior.

They need the extra ``nets``; ``make test-nets`` installs it and runs them all, ``NETS=sample`` those
that differ most.
"""

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from benchmarks.nets import make_lenet, make_mlp, make_resnet18
from pyro_structvi.nn.likelihood import call_net, read_output
from pyro_structvi.sites.finding import OtherRowsWarning
from tests.any_net.nets import CASES, SAMPLE

GUIDES = {
    "mean field": ps.MeanFieldGuide,
    "k-tied": ps.KTiedGuide,
    "low rank": lambda model, **options: ps.AutoLowRankLRT(model, 2, diagonal="full", **options),
}
pytestmark = [
    pytest.mark.nets,
    pytest.mark.filterwarnings("default"),  # of libraries of all ages
    pytest.mark.filterwarnings(f"ignore::{OtherRowsWarning.__module__}.OtherRowsWarning"),
]
NETS = [
    pytest.param(name, marks=pytest.mark.nets_sample if name in SAMPLE else ()) for name in CASES
]


def make(name: str, guide: str = "mean field", **options):
    case = CASES[name]
    pytest.importorskip(case.library)
    torch.manual_seed(0)
    net, x, y = case.make(), case.inputs(), case.labels()
    model = case.model(net)
    return case, net, model, GUIDES[guide](model, **options), x, y


def accuracy(mean, y):
    counted = y != -100
    return float((mean.argmax(-1) == y)[counted].float().mean())


@pytest.mark.parametrize(
    ("name", "guide"),
    [
        pytest.param(name, guide, marks=pytest.mark.nets_sample if name in SAMPLE else ())
        for name in CASES
        for guide in GUIDES
        if guide == "mean field" or name in SAMPLE
    ],
)
def test_it_learns_a_few_examples_by_heart_and_is_saved(name, guide):
    case, net, model, posterior, x, y = make(name, guide)
    adapters = case.prior != 0.3  # which cannot learn as much
    before = accuracy(ps.predict(model, posterior, x, num_samples=2).mean, y)
    history = ps.fit(
        model,
        posterior,
        [(x, y)],
        num_steps=200,
        kl_weight=1e-4,
        progress=False,
        compiled=False,
    )
    assert all(map(torch.isfinite, torch.tensor([history.elbo, history.kl]).flatten()))
    prediction = ps.predict(model, posterior, x, num_samples=8)
    assert prediction.mean.isfinite().all()
    assert accuracy(prediction.mean, y) > (before if adapters else case.by_heart)
    again = case.model(net)
    loaded = GUIDES[guide](again)
    loaded.initialize(x, y)
    again.load_state_dict(model.state_dict())
    loaded.load_state_dict(posterior.state_dict())
    torch.testing.assert_close(loaded.median(), posterior.median(), rtol=0, atol=0)


@pytest.mark.parametrize("name", NETS)
def test_with_a_vanishing_posterior_it_is_the_net_drawn_or_local(name):
    likelihoods = []
    for local in (True, False):
        _, net, model, guide, x, y = make(name, init_scale=1e-7, local_reparam=local)
        guide.initialize(x, y)
        likelihoods.append(
            ps.StructuredELBO().terms(model, guide, x, y).log_likelihood["obs"].detach()
        )
    with torch.no_grad():
        logits = read_output(call_net(net, x), None)
    torch.testing.assert_close(
        ps.predict(model, guide, x, num_samples=1).mean, logits.softmax(-1), rtol=1e-3, atol=1e-4
    )
    expected = -nn.functional.cross_entropy(
        logits.flatten(0, -2), y.flatten(), ignore_index=-100, reduction="sum"
    )
    torch.testing.assert_close(torch.stack(likelihoods), expected.expand(2), rtol=2e-4, atol=1e-2)


@pytest.mark.parametrize("name", NETS)
def test_its_report_lists_every_parameter_once_and_most_are_local(name):
    case, net, _model, guide, x, y = make(name)
    report = guide.report(x, y)
    names = [each.name.removeprefix("net.") for each in report.parameters]
    assert sorted(names) == sorted(key for key, _ in net.named_parameters())
    assert {each.state for each in report.parameters} <= {"random", "trained", "frozen"}
    assert report.local_share >= case.local, str(report)


@pytest.mark.parametrize("name", NETS)
def test_compiled_steps_are_the_eager_ones(name):
    losses = []
    for compiled in (False, True):
        # Recorded as for a compiler, experts are applied by an operation that takes drawn weights.
        case, _, model, guide, x, y = make(name, local_reparam=name != "Mixtral")
        guide.initialize(x, y)
        optimizer = torch.optim.Adam(guide.parameters(), 1e-3)
        elbo = ps.StructuredELBO()
        svi = ps.CompiledSVI(model, guide, optimizer, elbo, backend=None) if compiled else None
        torch.manual_seed(1)
        for _ in range(5):
            if svi is not None and not case.can_trace:
                with pytest.raises(RuntimeError, match="cannot be compiled: the size of a result"):
                    svi.step(x, y), svi.step(x, y), svi.step(x, y)
                return
            if svi is not None:
                losses.append(svi.step(x, y))
                continue
            optimizer.zero_grad()
            loss = elbo.differentiable_loss(model, guide, x, y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    torch.testing.assert_close(losses[5:], losses[:5], rtol=1e-4, atol=1e-2)


# ---- in ONNX Runtime -----------------------------------------------------------------------------


EXPORTED = {
    "MLP": (lambda: make_mlp(3, 10, 2), (7, 3)),
    "LeNet": (make_lenet, (4, 1, 28, 28)),
    "ResNet-18": (make_resnet18, (2, 3, 32, 32)),
    "transformer": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(40, 3)
        ),
        (6, 5, 8),
    ),
}


def run_by_onnx(module, x, path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.onnx.export(module, (x,), path, dynamo=True, verbose=False)
    session = runtime.InferenceSession(path)
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})


@pytest.mark.parametrize("way", ["samples", "moments"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.nets_sample if n == "MLP" else ()) for n in EXPORTED],
)
def test_onnx_runtime_has_the_same_outputs(name, way, tmp_path):
    torch.manual_seed(0)
    build, shape = EXPORTED[name]
    x = torch.randn(shape)
    model = ps.Classifier(ps.bayesianize(build(), prior=0.3, normalization=False), num_data=10)
    guide = ps.MeanFieldGuide(model)
    guide.initialize(x, torch.zeros(len(x), dtype=torch.long))
    samples, moments = guide.sample_functions(3), ps.moments.NetMoments(model.eval(), guide)
    module = samples if way == "samples" else moments
    with torch.no_grad():
        outputs = module(x)
    expected = [outputs] if way == "samples" else [*outputs]
    for own, value in zip(run_by_onnx(module, x, tmp_path / "net.onnx"), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(own), value, rtol=1e-5, atol=1e-5)


@pytest.mark.nets_sample
def test_a_file_takes_any_batch(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = ps.Regressor(ps.bayesianize(make_mlp(3, 10, 2)), num_data=10, noise_scale=0.1)
    functions, x = ps.MeanFieldGuide(model).sample_functions(3), torch.randn(7, 3)
    shapes = {"args": ({0: torch.export.Dim("batch")},)}
    path = tmp_path / "functions.onnx"
    exported = torch.export.export(functions, (x,), dynamic_shapes=shapes)
    torch.onnx.export(exported, (x,), path, dynamo=True, verbose=False)
    session = runtime.InferenceSession(path)
    for rows in (x, x[:2]):
        (found,) = session.run(None, {session.get_inputs()[0].name: rows.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), functions(rows), rtol=1e-5, atol=1e-5)
