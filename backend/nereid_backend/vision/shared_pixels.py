# SPDX-License-Identifier: Apache-2.0
"""Lets image processors of transformers read the pixels of a Pillow image without copying them.

Most image processors first convert an image to a NumPy array, and then make the image smaller. To
make the image smaller, they convert the array back to an image of Pillow. For an image of 16
million pixels, these conversions need 200 MB and about 0.3 s, and they do not change the pixels.

`share_pixels` replaces the two conversions: the array shares the memory of the image, and the
conversion back returns the image itself. The results of an image processor stay the same.
"""

import ctypes
from importlib import import_module
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

# Pillow stores each pixel of an RGB image as four bytes. The fourth byte is not used.
_PIXEL_BYTES = 4
_NUM_CHANNELS = 3
_PAGE_BYTES = 4096
# Maps the address of an image's pixels to the `_SharedPixels` of the image. An entry is removed as
# soon as no array uses the pixels.
_shared_by_address: "WeakValueDictionary[int, _SharedPixels]" = WeakValueDictionary()

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _ArrowArray(ctypes.Structure):
    """The structure ArrowArray of the Arrow C data interface."""


_ArrowArray._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
    ("dictionary", ctypes.c_void_p),
    ("release", ctypes.c_void_p),
    ("private_data", ctypes.c_void_p),
]


class PixelMemory:
    """The memory of an image's pixels, row by row. Each pixel has four bytes.

    Attributes:
        address: the address of the first pixel.
    """

    def __init__(self, image: Any) -> None:  # noqa: ANN401 - an image of Pillow
        """Find the memory of an image through Pillow's export to the Arrow C data interface.

        The memory is not freed as long as this object exists.

        Args:
            image: an image whose pixels are decoded and have four bytes, such as an RGB image.

        Raises:
            ValueError: the pixels do not have four bytes or are not in one block of memory, or this
                version of Pillow cannot export the memory.
        """
        if not hasattr(image, "__arrow_c_array__"):
            raise ValueError("this version of Pillow cannot export the memory of an image")
        # If the pixels are in several blocks of memory, Pillow raises a ValueError. Store the
        # PyCapsule, because the memory of the pixels may be freed when the PyCapsule is deleted.
        _, self._capsule = image.__arrow_c_array__()
        array_of_pixels = _ArrowArray.from_address(_get_pointer(self._capsule, b"arrow_array"))
        # If a pixel has four bytes, Arrow represents the pixels as an array with one child. The
        # child is an array of the bytes. If a pixel has one byte, the array has no child.
        if array_of_pixels.n_children != 1:
            raise ValueError("the pixels of the image do not have four bytes each")
        array_of_bytes = array_of_pixels.children[0].contents
        if array_of_bytes.offset != 0:
            raise ValueError("the bytes of the pixels do not begin at the start of their buffer")
        # The first buffer of an Arrow array marks missing values, and is empty here. The second
        # buffer contains the values, which are the bytes of the pixels.
        self.address: int = array_of_bytes.buffers[1]


class _SharedPixels:
    """The pixels of an RGB image in the form that `numpy.asarray` converts to an array.

    Attributes:
        image: the image.
    """

    def __init__(self, image: Any) -> None:  # noqa: ANN401 - an image of Pillow
        self.image = image
        self._core = image.im  # the object of Pillow that contains the pixels
        self._memory = PixelMemory(image)
        row_bytes = _PIXEL_BYTES * image.width
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (image.height, image.width, _NUM_CHANNELS),
            "strides": (row_bytes, _PIXEL_BYTES, 1),
            "data": (self._memory.address, False),
        }

    @property
    def address(self) -> int:
        """The address of the first pixel."""
        return self._memory.address

    @property
    def is_outdated(self) -> bool:
        """Whether the pixels of `image` were replaced after the creation of this object."""
        return self.image.im is not self._core


def pixel_array(image: Any) -> "np.ndarray[Any, Any] | None":  # noqa: ANN401 - an image
    """Return an array [height, width, 3] that shares the memory of an image.

    Return None if `image` is not an RGB image of Pillow, if a colour of the image is transparent,
    or if the memory cannot be shared.

    Mutates: `_shared_by_address`. As long as the array exists, `shared_image` can find the image.
    """
    from PIL.Image import Image

    if not isinstance(image, Image) or image.mode != "RGB" or "transparency" in image.info:
        return None
    image.load()
    try:
        pixels = _SharedPixels(image)
    except ValueError:
        return None
    array = np.asarray(pixels)  # NumPy copies no memory. The array has a reference to `pixels`.
    # A WeakValueDictionary does not keep its values alive. Therefore only the array keeps `pixels`
    # alive, and this entry is removed when the array is deleted.
    _shared_by_address[pixels.address] = pixels
    return array


def shared_image(array: "np.ndarray[Any, Any]") -> Any:  # noqa: ANN401 - an image of Pillow
    """Return the image whose pixels an array shares; None if there is no such image.

    The array must contain all pixels of the image, with the channels as the first or the last
    dimension. `pixel_array` has stored the image under the address of its first pixel. This entry
    exists as long as an array uses the pixels, so the address cannot belong to other memory.
    """
    address = array.__array_interface__["data"][0]
    pixels = _shared_by_address.get(address)
    if pixels is None or pixels.is_outdated:
        return None
    return pixels.image if _covers_all_pixels(array, pixels) else None


def _covers_all_pixels(array: "np.ndarray[Any, Any]", pixels: _SharedPixels) -> bool:
    """Return whether an array has the shape, data type and strides of the whole image.

    The array begins at the first pixel. The first or the last dimension of the array contains the
    channels.
    """
    channels_last = np.asarray(pixels)
    channels_first = np.moveaxis(channels_last, -1, 0)
    return any(
        (array.dtype, array.shape, array.strides)
        == (expected.dtype, expected.shape, expected.strides)
        for expected in (channels_last, channels_first)
    )


def share_pixels(max_pixels: int) -> None:
    """Make the image processors of transformers in this process share the memory of images.

    Do nothing if Pillow is missing, or if this version of transformers has other functions.

    Args:
        max_pixels: the number of pixels of the largest image whose memory is shared.
    """
    try:
        # The modules have the type `Any`, because the code below replaces functions that have no
        # type annotations.
        pillow: Any = import_module("PIL.Image")
        backends: Any = import_module("transformers.image_processing_backends")
        transforms: Any = import_module("transformers.image_transforms")
        convert_to_rgb = backends.convert_to_rgb_pil
        to_pil_image = transforms.to_pil_image
        process_image = backends.PilBackend.process_image
        set_block_size = pillow.core.set_block_size
    except (ImportError, AttributeError):
        return
    # Pixels can be shared only if they are in one block of memory. By default, a block has at most
    # 16 MiB, so allow larger blocks.
    num_pages = _PIXEL_BYTES * max_pixels // _PAGE_BYTES + 1
    set_block_size(num_pages * _PAGE_BYTES)

    def shared_convert_to_rgb(image: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        pixels = pixel_array(image) if kwargs.get("return_numpy") else None
        return convert_to_rgb(image, *args, **kwargs) if pixels is None else pixels

    def shared_to_pil_image(image: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        # The arguments `do_rescale` and `image_mode` can change the pixels. Any positional argument
        # could be one of these two, so the pixels are shared only if there is no positional
        # argument.
        changes_pixels = args or kwargs.get("do_rescale") or kwargs.get("image_mode")
        if isinstance(image, np.ndarray) and not changes_pixels:
            found = shared_image(image)
            if found is not None:
                return found
        return to_pil_image(image, *args, **kwargs)

    def shared_process_image(
        self: Any,  # noqa: ANN401
        image: Any,  # noqa: ANN401
        do_convert_rgb: bool | None = None,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        pixels = None if do_convert_rgb else pixel_array(image)
        if pixels is not None:
            return np.moveaxis(pixels, -1, 0)
        return process_image(self, image, do_convert_rgb, *args, **kwargs)

    backends.convert_to_rgb_pil = shared_convert_to_rgb
    transforms.to_pil_image = shared_to_pil_image
    backends.PilBackend.process_image = shared_process_image
