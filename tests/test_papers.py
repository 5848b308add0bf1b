"""Experiments after papers: priors, bounds, reviews, products of layers, corrupted images."""

import itertools
import math

import pyro.poutine as poutine
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter
from torch import nn

import pyro_structvi as ps
from examples.papers.reviews import load_reviews
from examples.papers.ritter2021.corruptions import CORRUPTIONS, corrupt
from examples.papers.swiatkowski2020.experiment import Experiment, tied_only
from examples.papers.swiatkowski2020.gradient_snr import window_ratio
from examples.papers.swiatkowski2020.mlp import make_net
from examples.papers.tomczak2020 import images, posteriors
from examples.papers.tutorial import depth
from pyro_structvi.diagnostics import compress_scales
from pyro_structvi.families import KTied
from tests.models import make_regressor, regression_data


def test_the_prior_of_the_mlp_has_a_precision_of_a_hundredth_of_its_outputs():
    net = ps.bayesianize(images.make_mlp(), images.by_outputs)
    sites = poutine.trace(net).get_trace(torch.zeros(1, 1, 28, 28)).nodes
    for name, outputs in (("1", 400), ("3", 400), ("5", 10)):
        for site in (f"{name}.weight", f"{name}.bias"):
            variance = sites[site]["fn"].variance
            assert len(variance) == outputs
            torch.testing.assert_close(variance, torch.full_like(variance, 100 / outputs))


def test_each_posterior_has_the_rank_and_the_diagonal_of_its_name():
    for name in (own for own in posteriors.GUIDES if "K = " in own and "K = 0" not in own):
        guide = posteriors.GUIDES[name](make_regressor())
        family = guide[guide.site_names[0]].family
        assert f"K = {family.rank}" in name
        assert family.join_bias
        diagonals = {"ELRG-D": "full", "isotropic": "isotropic", "ELRG,": "constant"}
        expected = [value for start, value in diagonals.items() if name.startswith(start)]
        assert family.diagonal == (expected or ["constant"])[0]
        assert family.diagonal_variance == (math.exp(-10) if name.startswith("ELRG,") else None)


def test_the_bound_over_uneven_batches_is_that_of_all_data():
    """Of points the expected log likelihood has no noise, so the two must agree to rounding."""
    model, data = make_regressor(), regression_data()
    guide = ps.MAPGuide(model)
    guide.initialize(*data)
    with torch.no_grad():
        terms = ps.StructuredELBO().terms(model, guide, *data)
    expected = float(terms.elbo), float(sum(terms.kl.values()))
    size = len(data[0]) // 2 + 1
    found = posteriors.expected_bound(model, guide, data, size, passes=2)
    assert found == pytest.approx(expected, rel=1e-12)


# ---- film reviews --------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
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


# ---- products of layers --------------------------------------------------------------------------


def random_layers(*widths):
    shapes = [(outputs, inputs) for inputs, outputs in itertools.pairwise(widths)]
    return [torch.randn(shape) for shape in shapes], [torch.rand(shape) + 0.1 for shape in shapes]


def all_signs(means, variances):
    """Return every draw of elements that are a standard deviation above or below their mean."""
    sizes = [mean.numel() for mean in means]
    signs = torch.tensor([*itertools.product([-1.0, 1.0], repeat=sum(sizes))])
    return [
        mean + variance.sqrt() * sign.reshape(-1, *mean.shape)
        for mean, variance, sign in zip(means, variances, signs.split(sizes, 1), strict=True)
    ]


@pytest.mark.parametrize("widths", [(3, 2), (2, 3, 1), (3, 2, 2), (2, 1, 2, 2), (1, 2, 2, 2)])
def test_the_covariance_of_a_product_is_exact(widths):
    """It needs two moments of each element, so two values for each, all combined, are an oracle."""
    torch.manual_seed(0)
    means, variances = random_layers(*widths)
    exact = depth.products(all_signs(means, variances), torch.ones(widths[0])).flatten(1)
    expected = exact.T.cov(correction=0).reshape(exact.shape[1], -1)
    found = depth.product_covariance(means, variances)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_mean_of_absolute_correlations():
    covariance = torch.tensor([[4.0, -1.0, 0.0], [-1.0, 1.0, 0.5], [0.0, 0.5, 1.0]])
    assert depth.mean_correlation(covariance) == pytest.approx((0.5 + 0.5) / 3)


@pytest.mark.parametrize(
    "name", ["5 layers, leaky ReLU, mean field", "5 linear layers, mean field"]
)
def test_the_product_at_an_input_is_the_derivative_of_the_net(name):
    torch.manual_seed(0)
    posterior = depth.POSTERIORS[name]
    model = ps.Classifier(ps.bayesianize(depth.make_net(posterior), 1.0), num_data=1)
    guide = posterior.guide(model)
    x, weights = torch.randn(depth.PIXELS**2), [guide[name]().mean for name in guide.site_names]
    layers = [nn.Linear(*weight.shape[::-1], bias=False) for weight in weights]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight = nn.Parameter(weight)
    between = [posterior.activation() for _ in layers[1:]]
    net = nn.Sequential(layers[0], *itertools.chain(*zip(between, layers[1:], strict=True)))
    slope = 1.0 if posterior.is_linear else depth.SLOPE
    product = depth.products([weight[None] for weight in weights], x, slope)[0]
    torch.testing.assert_close(product, torch.autograd.functional.jacobian(net, x))


# ---- corrupted images ----------------------------------------------------------------------------


def smooth_images(count=6, channels=3, size=32):
    """Return images with structure at several scales, off 0 and 1."""
    noise = torch.randn(count, channels, size, size).numpy()
    layers = [gaussian_filter(noise, (0, 0, s, s)) * s for s in (0.7, 1.5, 3.0)]
    return (0.5 + 0.25 * torch.tensor(sum(layers))).clamp(0.02, 0.98)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_each_kind_changes_images_more_with_severity_and_each_image_alone(kind):
    """By noise of its own, which leaves the global random state as it is."""
    images, state = smooth_images(), torch.get_rng_state()
    changed = [corrupt(images, kind, severity, seed=7) for severity in range(1, 6)]
    assert torch.equal(state, torch.get_rng_state())
    distances = [(own - images).square().mean().sqrt().item() for own in changed]
    assert distances[0] > 0.005
    assert distances == sorted(set(distances))
    for own in changed:
        assert (own.shape, own.dtype) == (images.shape, images.dtype)
        assert own.min() >= 0
        assert own.max() <= 1
    alone = torch.cat([corrupt(image.unsqueeze(0), kind, 5, seed=7) for image in images])
    torch.testing.assert_close(alone, changed[-1], rtol=0, atol=1e-12)


def test_noise_is_normal_and_of_its_own_for_each_image_and_seed():
    images = torch.full((2, 3, 64, 64), 0.5)
    images[1] += 0.01
    first, other = corrupt(images, "gaussian_noise", 5) - images
    again = corrupt(images, "gaussian_noise", 5, seed=1)[0] - images[0]
    # 12,288 numbers: a deviation is known to 0.64%, a correlation to 0.9%; 5 standard errors.
    for noise in (first, other, again):
        assert noise.std().item() == pytest.approx(0.10, rel=0.032)
        assert abs(noise.mean().item()) < 5 * 0.10 / 12_288**0.5
    for one, two in ((first, other), (first, again)):
        assert abs(torch.corrcoef(torch.stack([one.flatten(), two.flatten()]))[0, 1]) < 0.046


def test_blur_is_that_of_scipy():
    images = smooth_images(2)
    expected = gaussian_filter(images, 0.7, radius=3, mode="mirror", axes=(-2, -1))
    torch.testing.assert_close(
        corrupt(images, "blur", 3), torch.tensor(expected), rtol=0, atol=1e-12
    )


def test_contrast_scales_around_the_mean_and_brightness_adds_to_the_value():
    images = smooth_images(2) * 0.7
    mean = images.mean((-2, -1), keepdim=True)
    found = corrupt(images, "contrast", 2)
    torch.testing.assert_close(found - mean, 0.5 * (images - mean), rtol=0, atol=1e-12)
    found = corrupt(images, "brightness", 5)
    torch.testing.assert_close(found.amax(1), images.amax(1) + 0.3, rtol=0, atol=1e-12)
    ratios = images / images.amax(1, keepdim=True)  # hue and saturation
    torch.testing.assert_close(found / found.amax(1, keepdim=True), ratios, rtol=0, atol=1e-12)


def test_pixels_are_coarser():
    found = corrupt(torch.rand(1, 1, 32, 32), "pixelate", 4)  # 24 pixels in each direction
    assert found.unique().numel() == 24**2


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_that_of_pillow(channels, tmp_path):
    image = (smooth_images(1, channels)[0] * 255).round().to(torch.uint8)
    array = image.movedim(0, -1).numpy()
    Image.fromarray(array[..., 0] if channels == 1 else array).save(tmp_path / "a.jpg", quality=58)
    decoded = torch.tensor([*Image.open(tmp_path / "a.jpg").tobytes()], dtype=torch.uint8)
    expected = decoded.reshape(32, 32, channels).movedim(-1, 0).double() / 255
    found = corrupt(image.unsqueeze(0).double() / 255, "jpeg", 3)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-12)
