"""Corrupted images: what each kind does, seeds, dtypes, and what is refused."""

import sys

import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter

from pyro_structvi.metrics import CORRUPTIONS, corrupt

SEVERITIES = range(1, 6)


def smooth_images(count=6, channels=3, size=32):
    """Return images with structure at several scales, off 0 and 1."""
    noise = torch.randn(count, channels, size, size).numpy()
    layers = [gaussian_filter(noise, (0, 0, s, s)) * s for s in (0.7, 1.5, 3.0)]
    return (0.5 + 0.25 * torch.tensor(sum(layers))).clamp(0.02, 0.98)


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize(("channels", "size"), [(3, 32), (1, 28)])
def test_each_kind_changes_images_more_with_severity(kind, channels, size):
    images = smooth_images(channels=channels, size=size)
    changed = [corrupt(images, kind, severity) for severity in SEVERITIES]
    distances = [(own - images).square().mean().sqrt().item() for own in changed]
    assert distances[0] > 0.005
    assert distances == sorted(set(distances))
    for own in changed:
        assert (own - images).flatten(1).norm(dim=1).min() > 0.01
        assert (own.shape, own.dtype) == (images.shape, images.dtype)
        assert own.min() >= 0
        assert own.max() <= 1


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_an_image_is_changed_alone_as_in_a_batch(kind):
    images = smooth_images()
    for severity in (1, 5):
        batch = corrupt(images, kind, severity)
        for image, own in zip(images.flip(0), batch.flip(0), strict=True):
            torch.testing.assert_close(corrupt(image, kind, severity), own, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_uint8_is_the_same_up_to_rounding(kind):
    images = (smooth_images(2) * 255).round().to(torch.uint8)
    changed = corrupt(images, kind, 3)
    assert changed.dtype == torch.uint8
    expected = corrupt(images.double() / 255, kind, 3) * 255
    assert (changed.double() - expected).abs().max() <= 0.5 + 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_dtypes(kind, dtype):
    images = smooth_images(2).to(dtype)
    changed = corrupt(images, kind, 2)
    assert changed.dtype == dtype
    assert torch.equal(changed, corrupt(images.double(), kind, 2).to(dtype))


@pytest.mark.parametrize("shape", [(3, 2, 2), (1, 1, 2, 3), (2, 1, 5, 2), (3, 17, 40)])
@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_small_and_oblong_images(kind, shape):
    images = torch.rand(shape)
    for severity in SEVERITIES:
        changed = corrupt(images, kind, severity)
        assert changed.shape == images.shape
        assert not torch.equal(changed, images)


@pytest.mark.parametrize("kind", [kind for kind in CORRUPTIONS if kind != "jpeg"])
def test_any_number_of_channels(kind):
    assert not torch.equal(corrupt(images := torch.rand(5, 8, 8), kind, 1), images)


def test_noise_is_normal_and_of_its_own_for_each_image_and_seed():
    images = torch.full((2, 3, 64, 64), 0.5)
    images[1] += 0.01
    first, other = corrupt(images, "gaussian_noise", 5) - images
    again = corrupt(images, "gaussian_noise", 5, seed=1)[0] - images[0]
    weaker = corrupt(images, "gaussian_noise", 1)[0] - images[0]
    # 12,288 numbers: a deviation is known to 0.64%, a correlation to 0.9%; 5 standard errors.
    for noise in (first, other, again):
        assert noise.std().item() == pytest.approx(0.10, rel=0.032)
        assert abs(noise.mean().item()) < 5 * 0.10 / 12_288**0.5
    for one, two in ((first, other), (first, again)):
        assert abs(torch.corrcoef(torch.stack([one.flatten(), two.flatten()]))[0, 1]) < 0.046
    torch.testing.assert_close(weaker, 0.4 * first, rtol=0, atol=1e-12)


def test_a_seed_gives_the_same_and_the_global_random_state_stays():
    images = smooth_images(2)
    for kind in CORRUPTIONS:
        state = torch.get_rng_state()
        first = corrupt(images, kind, 4, seed=7)
        torch.rand(3)
        assert torch.equal(first, corrupt(images, kind, 4, seed=7))
        torch.set_rng_state(state)
        corrupt(images, kind, 4)
        assert torch.equal(state, torch.get_rng_state())


def test_blur_is_that_of_scipy():
    images = smooth_images(2)
    for severity, (scale, reach) in enumerate(
        [(0.4, 2), (0.6, 3), (0.7, 3), (0.8, 4), (1.0, 4)], 1
    ):
        expected = gaussian_filter(images, scale, radius=reach, mode="mirror", axes=(-2, -1))
        found = corrupt(images, "blur", severity)
        torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-12)


def test_contrast_keeps_the_mean_and_scales_the_rest():
    images = smooth_images(2)
    found = corrupt(images, "contrast", 2)
    mean = images.mean((-2, -1), keepdim=True)
    torch.testing.assert_close(found - mean, 0.5 * (images - mean), rtol=0, atol=1e-12)


def test_brightness_adds_to_the_value_and_keeps_hue_and_saturation():
    images = smooth_images(2) * 0.7
    images[0, :, 0, 0] = 0.0
    found = corrupt(images, "brightness", 5)
    torch.testing.assert_close(found.amax(1), images.amax(1) + 0.3, rtol=0, atol=1e-12)
    ratios = images / images.amax(1, keepdim=True)
    expected = torch.where(ratios.isnan(), 1.0, ratios)
    torch.testing.assert_close(found / found.amax(1, keepdim=True), expected, rtol=0, atol=1e-12)
    assert corrupt(torch.full((1, 4, 4), 0.9), "brightness", 5).unique().tolist() == [1.0]


def test_what_is_too_bright_keeps_its_hue():
    image = torch.tensor([0.9, 0.45, 0.0]).reshape(3, 1, 1).expand(3, 2, 2)
    expected = torch.tensor([1.0, 0.5, 0.0]).reshape(3, 1, 1).expand(3, 2, 2)
    torch.testing.assert_close(corrupt(image, "brightness", 5), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["blur", "contrast", "brightness", "pixelate"])
def test_height_and_width_are_treated_alike(kind):
    image = torch.rand(3, 12, 31)
    turned = corrupt(image.mT, kind, 5).mT
    torch.testing.assert_close(turned, corrupt(image, kind, 5), rtol=0, atol=1e-6)


def test_pixels_are_coarser():
    found = corrupt(torch.rand(1, 32, 32), "pixelate", 4)  # 24 pixels in each direction
    assert found.unique().numel() == 24**2
    # As CIFAR-10-C is made: by Pillow in 8 bits, which are rounded twice.
    images = (smooth_images(1)[0] * 255).round().to(torch.uint8)
    image = Image.fromarray(images.movedim(0, -1).numpy())
    image = image.resize((20, 20), Image.BOX).resize((32, 32), Image.BOX)
    expected = torch.tensor([*image.tobytes()]).reshape(32, 32, 3).movedim(-1, 0)
    assert (corrupt(images, "pixelate", 5).long() - expected).abs().max() <= 1
    whole = corrupt(image := torch.rand(1, 2, 2), "pixelate", 1)
    torch.testing.assert_close(whole, image.mean().expand(1, 2, 2), rtol=0, atol=1e-7)


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_that_of_pillow(channels, tmp_path):
    image = (smooth_images(1, channels)[0] * 255).round().to(torch.uint8)
    array = image.movedim(0, -1).numpy()
    Image.fromarray(array[..., 0] if channels == 1 else array).save(tmp_path / "a.jpg", quality=58)
    decoded = torch.tensor([*Image.open(tmp_path / "a.jpg").tobytes()], dtype=torch.uint8)
    expected = decoded.reshape(32, 32, channels).movedim(-1, 0)
    assert torch.equal(corrupt(image, "jpeg", 3), expected)


@pytest.mark.parametrize("severity", [0, 6, -1, 2.5])
def test_severities_are_from_1_to_5(severity):
    with pytest.raises(ValueError, match="`severity` must be a whole number from 1 to 5"):
        corrupt(torch.rand(3, 4, 4), "blur", severity)


@pytest.mark.parametrize(
    ("images", "kind", "error", "message"),
    [
        (torch.rand(3, 4, 4), "fog", ValueError, '`kind` must be "gaussian_noise", "blur"'),
        (torch.rand(3, 4, 4) + 1, "blur", ValueError, r"from 0 to 1 .*`images.clamp\(0, 1\)`"),
        (torch.full((3, 4, 4), torch.nan), "blur", ValueError, "`images` must be from 0 to 1"),
        (torch.ones(3, 4, 4).long(), "blur", TypeError, "`images` must hold real numbers"),
        (torch.rand(4, 4), "blur", ValueError, r"`images` must have shape \(N, C, H, W\)"),
        (torch.rand(3, 4, 1), "blur", ValueError, "at least 2 pixels"),
        (
            torch.rand(0, 3, 4, 4),
            "blur",
            ValueError,
            r"but got a torch.Tensor of shape \(0, 3, 4, 4\)",
        ),
        (torch.rand(2, 4, 4), "jpeg", ValueError, "`images` must have 1 channel or 3"),
    ],
)
def test_what_is_refused(images, kind, error, message):
    with pytest.raises(error, match=message):
        corrupt(images, kind, 1)


@pytest.mark.parametrize(
    ("kind", "module", "name"),
    [
        ("blur", "torchvision.transforms.v2.functional", "torchvision"),
        ("jpeg", "PIL.Image", "Pillow"),
        ("pixelate", "PIL.Image", "Pillow"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(kind, module, name, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ImportError, match=rf'kind="{kind}".*needs {name}.*pyro-structvi\[examples\]'
    ):
        corrupt(torch.rand(3, 4, 4), kind, 1)
    corrupt(torch.rand(3, 4, 4), "contrast", 1)
