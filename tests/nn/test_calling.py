"""Nets that take keywords or return objects, and plain nets with Bayesian parts."""

from collections import UserDict
from types import SimpleNamespace

import pyro.poutine as poutine
import pytest
import torch
from torch import nn

import pyro_structvi as ps

X = {"ids": torch.randint(5, (6, 4)), "mask": torch.ones(6, 4, dtype=torch.float64)}
Y = torch.tensor([0, 1, 2, 0, 1, 2])


class Net(nn.Module):
    """Takes keywords, and returns what Hugging Face calls a ModelOutput."""

    def __init__(self, result="object"):
        super().__init__()
        self.words, self.head, self.result = nn.Embedding(5, 3), nn.Linear(3, 3), result

    def forward(self, ids, mask=None):
        words = self.words(ids)
        words = words if mask is None else words * mask.unsqueeze(-1)
        logits = self.head(words.mean(1))
        results = {
            "object": SimpleNamespace(logits=logits, loss=None),
            "tuple": (logits, None),
            "tensor": logits,
        }
        return results[self.result]


def make(result="object", **options):
    model = ps.Classifier(ps.bayesianize(Net(result), 1.0), **options)
    return model, ps.MeanFieldGuide(model)


@pytest.mark.parametrize(
    ("x", "result", "options"),
    [
        (X, "object", {}),
        (UserDict(X), "tensor", {}),
        (X["ids"], "tuple", {"output": lambda result: result[0]}),
    ],
)
def test_inputs_are_keywords_and_outputs_are_found(x, result, options):
    """A mask of ones changes no Laplace variance, and the sampled labels are the same."""
    model, guide = make(result, **options)
    history = ps.fit(model, guide, (x, Y), num_epochs=2, batch_size=4, progress=False)
    assert (model.num_data, len(history.elbo)) == (6, 4)
    shapes = {"net.words.weight": (5, 3), "net.head.weight": (3, 3), "net.head.bias": (3,)}
    draws = {name: torch.randn(2, *shape) for name, shape in shapes.items()}
    parts, once = (ps.predict(model, draws, x, batch_size=size) for size in (4, None))
    assert once.mean.shape == (6, 3)
    torch.testing.assert_close(parts.mean, once.mean)
    found, points = [], ps.MAPGuide(model)
    for inputs in (x, X["ids"]):
        torch.manual_seed(0)
        found.append(ps.element_scores.laplace_variances(model, points, inputs, batch_size=4))
    torch.testing.assert_close(*found)


def test_what_is_no_tensor_is_named():
    model, _ = make("tuple", num_data=6)
    with pytest.raises(TypeError, match="net must return a tensor, or an object with `logits`"):
        poutine.block(model)(X)
    model, _ = make("tuple", num_data=6, output=lambda result: result)
    with pytest.raises(TypeError, match=r"`output` must return a tensor"):
        poutine.block(model)(X)

    class Takes(nn.Linear):
        def forward(self, features):
            return super().forward(features["ids"].double() * features["mask"])

    model = ps.Classifier(ps.bayesianize(Takes(4, 3), 1.0), num_data=6)
    assert poutine.block(model)(X).shape == (6, 3), "a mapping may be one input"


def test_data_of_two_lengths_are_refused():
    model, guide = make()
    with pytest.raises(ValueError, match=r"one positive length, but got \[6, 6, 5\]"):
        ps.fit(model, guide, (X, Y[:5]), num_steps=1, progress=False)
    with pytest.raises(ValueError, match=r"data\[0\]\['mask'\]` holds 24 NaN"):
        ps.fit(model, guide, (X | {"mask": X["mask"] * torch.nan}, Y), num_steps=1, progress=False)
    with pytest.raises(ValueError, match=r"\(6,\), but got \(5,\)"):
        ps.predict(model, guide, X, num_samples=2, y=Y[:5])


# ---- parts ---------------------------------------------------------------------------------------


def parts():
    first, last = (ps.bayesianize(nn.Linear(*sizes), 1.0) for sizes in ((4, 3), (3, 2)))
    return nn.Sequential(first, nn.ReLU(), last)


def test_bayesian_parts_of_a_plain_net_have_names_of_their_own():
    guide = ps.MeanFieldGuide(ps.Classifier(parts(), num_data=6))
    guide.initialize(torch.randn(6, 4), Y % 2)
    assert guide.site_names == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
    with pytest.raises(ValueError, match="Two modules of the model declare the site 'weight'"):
        ps.MeanFieldGuide(parts()).initialize(torch.randn(6, 4))


def test_a_net_that_is_compiled_after_it_became_bayesian_is_taken_out_of_its_compiler():
    net = ps.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), 1.0)
    model = ps.Classifier(torch.compile(net, backend="eager"))
    guide, x = ps.MeanFieldGuide(model), torch.randn(6, 3)
    ps.fit(model, guide, (x, Y), num_steps=1, progress=False)
    values = guide.draw()
    draws = {name: value.detach().unsqueeze(0) for name, value in values.items()}
    outputs = ps.predict(model, draws, x).functions[0]
    torch.testing.assert_close(outputs, guide.to_net(values)(x).detach())


def test_a_part_that_was_called_by_itself_is_refused():
    net = parts()
    poutine.block(net[0])(torch.randn(2, 4))
    with pytest.raises(ValueError, match="was called before it became part of this model"):
        ps.Classifier(net, num_data=6)
    assert type(net) is nn.Sequential
