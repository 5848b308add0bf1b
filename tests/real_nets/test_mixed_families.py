"""One guide with a family for each kind of weight, as in the papers."""

import torch

import pyro_structvi as ps
from pyro_structvi.families import KTied, MeanField, PointEstimate
from tests.real_nets.nets import classifier, images, lenet
from tests.real_nets.test_nets import assert_draws_are_functions, assert_learns, case_of


def families_of(guide):
    return {name: guide[name].family for name in guide.site_names}


def test_dense_layers_are_k_tied_and_convolutions_mean_field():
    model, data = classifier(lenet(), *images())
    dense = {"net.7.weight": KTied(rank=2), "net.9.weight": KTied(rank=2)}
    guide = ps.StructuredGuide(model, dense | {"*": MeanField()})
    assert families_of(guide) == {
        f"net.{layer}.{part}": KTied(rank=2) if layer > 3 and part == "weight" else MeanField()
        for layer in (0, 3, 7, 9)
        for part in ("weight", "bias")
    }
    assert_learns(model, guide, data, num_steps=6, lr=0.03)
    assert_draws_are_functions(model, guide, data[:-1])
    standard_deviations = guide["net.7.weight"]().stddev
    assert torch.linalg.matrix_rank(standard_deviations) == 2


def test_an_lstm_with_points_for_its_biases():
    model, data = case_of("LSTM").make()
    guide = ps.StructuredGuide(model, {"*bias*": PointEstimate(), "*weight*": KTied(2)})
    assert all(
        family == (PointEstimate() if "bias" in name else KTied(2))
        for name, family in families_of(guide).items()
    )
    before = guide.median()
    assert_learns(model, guide, data, num_steps=6, lr=0.03)
    assert_draws_are_functions(model, guide, data[:-1])
    first, second = guide.draw(), guide.draw()
    for name in guide.site_names:
        assert torch.equal(first[name], second[name]) == ("bias" in name)
        assert not torch.equal(first[name], before[name]), "every site is trained"
    kl = ps.StructuredELBO().terms(model, guide, *data).kl["net.layer.bias_hh_l1"]
    bias = guide.draw()["net.layer.bias_hh_l1"]
    prior = torch.distributions.Normal(0.0, 1.0)
    torch.testing.assert_close(kl, -prior.log_prob(bias).sum())
