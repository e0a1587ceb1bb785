"""Tests that image processors return the same pixels if they share the memory of an image."""

import numpy as np
import pytest
import torch
import transformers
from backend.vision.image_archs import picture
from nereid_backend.vision.shared_pixels import pixel_array, share_pixels, shared_image
from PIL import Image, ImageOps
from transformers import image_processing_backends, image_transforms

# The names of image processors, and the arguments with which these tests create them.
_PROCESSORS = {
    "CLIPImageProcessorPil": {},
    "SiglipImageProcessorPil": {"do_convert_rgb": False},
    "ViTImageProcessorPil": {"do_resize": False, "do_rescale": False, "do_normalize": False},
    "Qwen2VLImageProcessorPil": {"size": {"shortest_edge": 3136, "longest_edge": 50_176}},
    "Idefics2ImageProcessorPil": {},
    "Idefics3ImageProcessorPil": {"size": {"longest_edge": 728}},
    "LlavaNextImageProcessorPil": {},
    "LlavaOnevisionImageProcessorPil": {},
    "GotOcr2ImageProcessorPil": {"crop_to_patches": True},
    "Gemma3ImageProcessorPil": {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 32,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    },
    "PixtralImageProcessorPil": {},
    "MllamaImageProcessorPil": {},
    "JanusImageProcessorPil": {},
    "DeepseekVLImageProcessorPil": {},
    "Glm4vImageProcessorPil": {},
    "Ovis2ImageProcessorPil": {},
}


@pytest.fixture
def share(monkeypatch):
    """A function that calls `share_pixels`. Its changes of libraries are undone after the test."""
    block_size = Image.core.get_block_size()

    def share_and_undo_later():
        # `share_pixels` replaces these functions. Patch each function with itself first, so that
        # monkeypatch restores it after the test.
        for owner, name in (
            (image_processing_backends, "convert_to_rgb_pil"),
            (image_transforms, "to_pil_image"),
            (image_processing_backends.PilBackend, "process_image"),
        ):
            monkeypatch.setattr(owner, name, getattr(owner, name))
        share_pixels(16 * 10**6)

    yield share_and_undo_later
    Image.core.set_block_size(block_size)


def leaves(value):
    """Return the items of nested lists as one flat list."""
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


@pytest.mark.parametrize("name", _PROCESSORS)
def test_the_pixels_are_the_same_with_shared_memory(name, share):
    processor = getattr(transformers, name)(**_PROCESSORS[name])
    images = [picture(1, 203, 131), picture(2, 60, 160), Image.new("RGB", (224, 224), "red")]
    expected_outputs = [dict(processor([image])) for image in images]

    share()

    for image, expected in zip(images, expected_outputs, strict=True):
        original_pixels = image.tobytes()
        outputs = dict(processor([image]))
        assert outputs.keys() == expected.keys()
        for key in expected:
            pairs = zip(leaves(outputs[key]), leaves(expected[key]), strict=True)
            assert all(np.array_equal(leaf, expected_leaf) for leaf, expected_leaf in pairs), key
        assert image.tobytes() == original_pixels


def test_an_array_shares_the_memory_and_leads_back_to_its_image():
    image = picture(1, 50, 30)
    array = pixel_array(image)
    assert np.array_equal(array, np.array(image))
    image.putpixel((2, 1), (1, 2, 3))
    assert array[1, 2].tolist() == [1, 2, 3]
    assert shared_image(array) is image
    assert shared_image(np.moveaxis(array, -1, 0)) is image
    for changed_view in (array[:-1], array[..., ::-1], array[:, :, :1], array.copy(), array[1:]):
        assert shared_image(changed_view) is None


def test_the_array_keeps_its_pixels_when_the_image_is_changed_or_deleted():
    image = picture(1, 50, 30)
    image.getexif()[0x112] = 6
    array = pixel_array(image)
    expected = array.copy()
    ImageOps.exif_transpose(image, in_place=True)
    assert image.size == (30, 50)
    assert shared_image(array) is None
    del image
    assert np.array_equal(array, expected)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "I;16"])
def test_only_rgb_images_are_shared(mode):
    assert pixel_array(Image.new(mode, (4, 4))) is None


def test_an_image_with_a_transparent_colour_is_not_shared():
    image = Image.new("RGB", (4, 4))
    image.info["transparency"] = (0, 0, 0)
    assert pixel_array(image) is None
    assert pixel_array(torch.zeros(4, 4, 3)) is None


def test_the_largest_legal_image_is_shared(share):
    share()
    assert pixel_array(Image.new("RGB", (4000, 4000))) is not None
