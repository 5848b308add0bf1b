"""Samples of functions, and moments of one pass, in ONNX Runtime."""

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from benchmarks.nets import make_lenet, make_mlp, make_resnet18

pytestmark = [pytest.mark.nets, pytest.mark.filterwarnings("default")]
NETS = {
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
    [pytest.param(n, marks=pytest.mark.nets_sample if n == "MLP" else ()) for n in NETS],
)
def test_onnx_runtime_has_the_same_outputs(name, way, tmp_path):
    torch.manual_seed(0)
    make, shape = NETS[name]
    x = torch.randn(shape)
    model = ps.Classifier(ps.bayesianize(make(), prior=0.3, normalization=False), num_data=10)
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
    """As the page of deployment writes it."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = ps.Regressor(ps.bayesianize(make_mlp(3, 10, 2)), num_data=10, noise_scale=0.1)
    functions, x = ps.MeanFieldGuide(model).sample_functions(3), torch.randn(7, 3)
    shapes = {"args": ({0: torch.export.Dim("batch")},)}
    path = tmp_path / "functions.onnx"
    torch.onnx.export(functions, (x,), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = runtime.InferenceSession(path)
    for rows in (x, x[:2]):
        (found,) = session.run(None, {session.get_inputs()[0].name: rows.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), functions(rows), rtol=1e-5, atol=1e-5)
