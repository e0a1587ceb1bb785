"""Measure the CPU time and the memory that the image worker needs for large image files.

    python -m loadtest.bench.bench_large_images [--model PATH ...] [--size 4000x4000 ...]

For each checkpoint, the program starts the worker process that prepares images. The worker forks a
child process, which decodes the images (see nereid_backend/vision/image_worker.py). Before each
measurement, the program makes the worker fork a new child, and sends one small image, so that the
child loads its code. The program then sends the file. The columns of the table are:

    answer    400 if the file is refused, 200 if the prompt is prepared
    CPU, s    the CPU time of the worker and of its child for one request, the minimum of --rounds
    child, MB the peak memory of the child during the request, minus the memory before the request
    worker, MB  the same difference for the worker, which passes on the request and the answer
    output, MB  the size of the prepared pixels, which the child returns

The program needs Linux, because it reads /proc.
"""

import argparse
import base64
import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from nereid_backend import RequestError
from nereid_backend.vision.image_worker_handle import ImageWorkerHandle
from nereid_backend.vision.load_processor import load_processor
from PIL import ExifTags, Image
from transformers import AutoConfig

from loadtest.bench.markdown_table import print_table
from loadtest.bench.process_memory import status_bytes
from loadtest.command_line import Option, parse_command_line

SEE = Path(__file__).resolve().parents[2] / "demo" / "see"
_WORKER = "nereid_backend.vision.image_worker"
# The value that resets VmHWM when it is written to /proc/PID/clear_refs.
_RESET_PEAK = "5"

Encode = Callable[[Image.Image], bytes]


@dataclass(frozen=True)
class Figures:
    """The measurements of one request. The columns of the table show these values."""

    status: int
    cpu_s: float
    child_mb: float | None  # None if the child has ended
    worker_mb: float
    output_mb: float


def picture(width: int, height: int) -> Image.Image:
    """Return an RGB image that compresses about as well as a photo.

    The image consists of blurred random spots with a width of about 50 pixels. In every second
    pixel, the lowest bit is random, like the noise of a camera.
    """
    rng = np.random.default_rng(0)
    spots = rng.integers(0, 256, (max(1, height // 50), max(1, width // 50), 3), np.uint8)
    image = Image.fromarray(spots).resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.array(image)
    pixels[:, ::2] ^= rng.integers(0, 4, pixels[:, ::2].shape, np.uint8) & 1
    return Image.fromarray(pixels)


def saved(kind: str, mode: str = "RGB", **options: object) -> Encode:
    """Return a function that converts an image to a mode and encodes it as a file."""

    def encode(image: Image.Image) -> bytes:
        file = io.BytesIO()
        image.convert(mode).save(file, kind, **options)
        return file.getvalue()

    return encode


def _rotated(image: Image.Image) -> bytes:
    """Encode an image as a JPEG file whose EXIF data contain a rotation by 90 degrees."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    return saved("JPEG", quality=90, exif=exif)(image)


def _transparent(image: Image.Image) -> bytes:
    """Encode an image as a PNG file whose left half is transparent."""
    image = image.convert("RGBA")
    image.paste((0, 0, 0, 0), (0, 0, image.width // 2, image.height))
    return saved("PNG", "RGBA", compress_level=3)(image)


def _transparent_webp(image: Image.Image) -> bytes:
    """Encode an image as a WebP file whose left half is transparent."""
    transparent = Image.open(io.BytesIO(_transparent(image)))
    return saved("WEBP", "RGBA", quality=90, method=0)(transparent)


def _grey_16_bits(image: Image.Image) -> bytes:
    """Encode an image as a PNG file with 16-bit grey values."""
    # 65535 / 255 is 257, so white remains white.
    grey = np.array(image.convert("L")).astype(np.uint16) * 257
    file = io.BytesIO()
    Image.fromarray(grey).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _colour_16_bits(image: Image.Image) -> bytes:
    """Encode an image as a PNG file with 16-bit colours.

    This function writes the file itself, because Pillow cannot write such files. Only the upper
    four bits of each colour are used, so that the file compresses well.
    """
    pixels = (np.array(image).astype(">u2") & 0xF0) * 256
    rows = pixels.reshape(image.height, -1).view(np.uint8)
    filters = np.zeros((image.height, 1), np.uint8)  # Each row begins with its filter type.
    data = zlib.compress(np.concatenate([filters, rows], axis=1).tobytes(), 1)
    bit_depth, rgb = 16, 2
    header = struct.pack(">IIBBBBB", image.width, image.height, bit_depth, rgb, 0, 0, 0)
    chunks = [_png_chunk(b"IHDR", header), _png_chunk(b"IDAT", data), _png_chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _png_chunk(name: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file: its length, its name, its data and its checksum."""
    checksum = zlib.crc32(name + data)
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)


_KINDS: dict[str, Encode] = {
    "JPEG": saved("JPEG", quality=90),
    "PNG": saved("PNG", compress_level=3),
    "WebP": saved("WEBP", quality=90, method=0),
    "progressive JPEG": saved("JPEG", quality=90, progressive=True),
    "CMYK JPEG": saved("JPEG", "CMYK", quality=90),
    "rotated JPEG": _rotated,
    "grey JPEG": saved("JPEG", "L", quality=90),
    "palette PNG": saved("PNG", "P"),
    "transparent PNG": _transparent,
    "grey PNG of 16 bits": _grey_16_bits,
    "colour PNG of 16 bits": _colour_16_bits,
    "lossless WebP": saved("WEBP", lossless=True, quality=0, method=0),
    "transparent WebP": _transparent_webp,
    "GIF": saved("GIF", "P"),
}

_OPTIONS = {
    "--model": Option([SEE], "checkpoints (default: demo/see)"),
    "--size": Option(["4000x4000"], "width and height of the images"),
    "--kind": Option(list(_KINDS), "kinds of files", list(_KINDS)),
    "--rounds": Option(3, "requests with each file; the minimum counts"),
}


class Worker:
    """A worker process whose CPU time and memory are measured."""

    def __init__(self, model: Path) -> None:
        """Start the process, and prepare one small image."""
        self._process = ImageWorkerHandle(_WORKER, str(model))
        before = _children(os.getpid())
        self._process.warm_up()
        (self._pid,) = _children(os.getpid()) - before
        config = AutoConfig.from_pretrained(model)
        processor = load_processor(model, config)
        self._text = getattr(processor, "image_token", "<image>")

    def measure(self, data: bytes) -> Figures:
        """Send one image file to the process, and return the measurements of this request."""
        child = self._new_child()
        worker_before, child_before = _reset_peak(self._pid), _reset_peak(child)
        cpu_before = _cpu_s(self._pid) + _cpu_s(child)
        num_bytes = self._ask(data)
        has_child = child in _children(self._pid)
        # If the child has ended, the CPU time of the worker contains the CPU time of the child.
        cpu_after = _cpu_s(self._pid) + (_cpu_s(child) if has_child else 0.0)
        child_growth = status_bytes(child, "VmHWM") - child_before if has_child else None
        return Figures(
            status=400 if num_bytes is None else 200,
            cpu_s=cpu_after - cpu_before,
            child_mb=None if child_growth is None else child_growth / 1e6,
            worker_mb=(status_bytes(self._pid, "VmHWM") - worker_before) / 1e6,
            output_mb=(num_bytes or 0) / 1e6,
        )

    def _new_child(self) -> int:
        """Make the worker start a new child process, and return the process id of this child.

        A new child uses no memory for earlier requests. The worker ends its child after a refused
        file, and starts a new child for the next image.
        """
        self._ask(b"")
        self._ask(saved("PNG")(Image.new("RGB", (64, 64))))
        (child,) = _children(self._pid)
        return child

    def _ask(self, data: bytes) -> int | None:
        """Send an image file. Return the bytes of the packed pixels, or None for a refused file."""
        url = b"data:image/png;base64," + base64.b64encode(data)
        try:
            _, packed = self._process.call([self._text, [url]])
        except RequestError:
            return None
        return len(packed)

    def close(self) -> None:
        """End the process."""
        self._process.close()


def _children(pid: int) -> set[int]:
    """Return the ids of the child processes of a process."""
    return {child.pid for child in psutil.Process(pid).children()}


def _cpu_s(pid: int) -> float:
    """Return the CPU time in seconds of a process and of its children that have ended."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def _reset_peak(pid: int) -> int:
    """Reset the peak memory of a process to the current memory, and return this memory in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK, "ascii")
    return status_bytes(pid, "VmRSS")


def main() -> None:
    """Measure the files, and print one table for each checkpoint."""
    args = parse_command_line(__doc__, _OPTIONS)
    head = ["kind", "size", "file, MB", "answer", "CPU, s", "child, MB", "worker, MB", "output, MB"]
    for model in args.model:
        print(f"\n{model.name}\n")
        worker = Worker(model)
        try:
            print_table(head, _rows(worker, args))
        finally:
            worker.close()


def _rows(worker: Worker, args: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the row of the table for each size and each kind of file."""
    for size in args.size:
        width, height = map(int, size.split("x"))
        image = picture(width, height)
        for kind in args.kind:
            file = _KINDS[kind](image)
            rounds = [worker.measure(file) for _ in range(args.rounds)]
            yield [kind, size, f"{len(file) / 1e6:.1f}", *_cells(rounds)]


def _cells(rounds: list[Figures]) -> list[str]:
    """Return the cells with the shortest time and the largest memory of all rounds."""
    fastest = min(rounds, key=lambda figures: figures.cpu_s)
    child_sizes = [figures.child_mb for figures in rounds if figures.child_mb is not None]
    return [
        str(fastest.status),
        f"{fastest.cpu_s:.2f}",
        f"{max(child_sizes):.0f}" if child_sizes else "",
        f"{max(figures.worker_mb for figures in rounds):.0f}",
        f"{fastest.output_mb:.1f}",
    ]


if __name__ == "__main__":
    main()
