"""Corrupted images of the example: what each kind does, and seeds."""

import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter

from examples.papers.ritter2021.corruptions import CORRUPTIONS, corrupt


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
