"""The experiments of the k-tied paper: film reviews as words, the window's ratio, and compression."""

import pytest
import torch

import pyro_structvi as ps
from examples.papers.reviews import load_reviews
from examples.papers.swiatkowski2020.experiment import Experiment, tied_only
from examples.papers.swiatkowski2020.gradient_snr import window_ratio
from examples.papers.swiatkowski2020.mlp import make_net
from pyro_structvi.diagnostics import compress_scales
from pyro_structvi.families import KTied


@pytest.fixture
def folder(tmp_path):
    """Return reviews as their site has them."""
    texts = {
        "train/neg/1_1.txt": "Bad, bad film<br />bad.",
        "train/pos/1_9.txt": "Film!",
        "test/neg/2_1.txt": "an unseen film",
        "test/pos/2_9.txt": "film bad",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_reviews_are_numbers_of_words_by_their_frequency_padded_in_front(folder):
    bad, film, unknown, pad = 3, 4, 2, 0
    reviews = load_reviews(folder, vocabulary=100, length=3)
    train, test = (
        {float(label): words.tolist() for words, label in zip(x, y, strict=True)}
        for x, y in (reviews[:2], reviews[2:])
    )
    assert train == {0.0: [bad, film, bad], 1.0: [pad, pad, film]}
    assert test == {0.0: [unknown, unknown, film], 1.0: [pad, film, bad]}
    reviews = load_reviews(folder, vocabulary=4, length=2)
    assert {*reviews.x_train.flatten().tolist()} == {0, 2, 3}, "rare words are unknown"


def test_the_ratio_of_a_window_is_that_of_moments_and_leaves_out_what_does_not_vary():
    first, second = torch.tensor([1.0, 5.0]), torch.tensor([3.0, 5.0])
    # The first element has mean 2 and variance 2.
    assert window_ratio([[first], [second]]) == pytest.approx(2.0)


def test_compression_ties_the_tied_weights_and_keeps_the_others():
    part = torch.randn(4, 784), torch.zeros(4, dtype=torch.long)
    experiment = Experiment("", make_net, ps.Classifier, "*dense3.weight", part, part, part)
    model = experiment.make_model(prior_scale=0.2)
    guide = experiment.make_guide(model, None)
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.normal_()
    tied = tied_only(guide, compress_scales(guide, 10), experiment.make_guide(model, 10))
    weight = tied["net.dense3.weight"]
    assert isinstance(weight.family, KTied)
    error = weight().stddev - guide["net.dense3.weight"]().stddev
    assert error.norm() < 0.05 * guide["net.dense3.weight"]().stddev.norm()  # full rank
    for name in ("net.dense1.weight", "net.dense3.bias"):
        assert torch.equal(tied[name]().stddev, guide[name]().stddev)
        assert torch.equal(tied[name]().mean, guide[name]().mean)
