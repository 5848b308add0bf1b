"""Classes of tokens: against cross-entropy, without the padding."""

import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from torch import nn

import pyro_structvi as ps
from pyro_structvi.nn.classifiers import PaddedCategorical

BATCH, LENGTH, CLASSES = 6, 5, 4


def make(**options):
    net = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, CLASSES))
    return ps.TokenClassifier(ps.bayesianize(net, 1.0), **options)


def data():
    x = torch.randint(7, (BATCH, LENGTH))
    y = torch.randint(CLASSES, (BATCH, LENGTH))
    y[:, -2:] = -100
    return x, y


def log_likelihood(model, x, y):
    trace = poutine.trace(model).get_trace(x, y)
    trace.compute_log_prob()
    return trace.nodes["obs"]["log_prob_sum"], trace.nodes["_RETURN"]["value"]


@pytest.mark.parametrize(("ignore_index", "shift"), [(-100, True), (0, False)])
def test_the_likelihood_is_cross_entropy_without_the_padding(shift, ignore_index):
    model = make(num_data=3 * BATCH, shift=shift, ignore_index=ignore_index)
    x, y = data()
    y[y == -100] = ignore_index
    found, logits = log_likelihood(model, x, y)
    targets = y[:, 1:] if shift else y
    assert logits.shape == (*targets.shape, CLASSES)
    loss = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=ignore_index, reduction="sum"
    )
    torch.testing.assert_close(found, -3 * loss, rtol=1e-10, atol=0)


def test_padding_has_no_gradient_and_stays_when_a_padded_categorical_grows():
    _, y = data()
    logits = torch.randn(BATCH, LENGTH, CLASSES, requires_grad=True)
    PaddedCategorical(logits=logits).log_prob(y).sum().backward()
    assert not logits.grad[:, -2:].any()
    assert logits.grad[:, :-2].any()
    tokens = PaddedCategorical(logits=torch.zeros(3, 2), ignore_index=7).expand((4, 3))
    assert tokens.log_prob(torch.full((4, 3), 7)).eq(0).all()
    with pytest.raises(ValueError, match="within the support"):
        PaddedCategorical(logits=torch.zeros(3, 2), validate_args=True).log_prob(torch.tensor(5))


def test_it_predicts_with_its_padding():
    model = make(num_data=BATCH)
    guide = ps.KTiedGuide(model)
    x, y = data()
    prediction = ps.predict(model, guide, x, num_samples=4, y=y)
    assert prediction.mean.shape == (BATCH, LENGTH, CLASSES)
    assert prediction.functions.shape == (4, BATCH, LENGTH, CLASSES)
    median = {name: value.unsqueeze(0) for name, value in guide.median().items()}
    one = ps.predict(model, median, x, y=y)
    expected = -F.cross_entropy(one.mean.log().mT, y, reduction="none").sum(1)
    torch.testing.assert_close(one.log_density, expected, rtol=1e-9, atol=1e-12)


def test_other_observations_are_refused():
    with pytest.raises(ValueError, match=r"shape \(6, 5\)"):
        poutine.block(make(num_data=6))(data()[0], torch.zeros(BATCH, dtype=torch.long))
    model = ps.TokenClassifier(ps.bayesianize(nn.Linear(3, 2), 1.0), num_data=6)
    with pytest.raises(ValueError, match=r"\(batch, length, classes\), but got \(6, 2\)"):
        poutine.block(model)(torch.randn(6, 3))
