"""Measure the CPU time and the memory that the image worker needs for large image files.

    python -m loadtest.bench.bench_large_images [--model PATH ...] [--size 4000x4000 ...]

For each file and each checkpoint, the program starts the process that prepares images (see
nereid_backend/vision/image_worker.py) and sends it one small image, which loads code. It then sends
the file. The columns of the table are:

    answer    400 if the file is refused, 200 if the prompt is prepared
    CPU, s    the CPU time of the worker and of its child for one request, the minimum of --rounds
    child, MB the largest memory of the child during the request, beyond the memory before it
    worker, MB  the same for the worker, which passes the request and the answer on
    output, MB  the size of the prepared pixels, which the child returns

The program needs Linux, because it reads /proc.
"""

import base64
import io
import os
import struct
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from nereid_backend import RequestError
from nereid_backend.vision.image_worker_handle import ImageWorkerHandle
from nereid_backend.vision.load_processor import load_processor
from PIL import Image
from transformers import AutoConfig

from loadtest import command_line
from loadtest.bench.markdown_table import table

SEE = Path(__file__).resolve().parents[2] / "demo" / "see"
_WORKER = "nereid_backend.vision.image_worker"
_ORIENTATION = 0x112  # the EXIF tag of the rotation
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Encode = Callable[[Image.Image], bytes]


@dataclass(frozen=True)
class Figures:
    """The figures of one request.

    Attributes:
        status: 200 or 400.
        cpu_s: the CPU time of the worker and its child in seconds.
        child_mb: the growth of the child's memory in MB; None if the child has ended.
        worker_mb: the growth of the worker's memory in MB.
        output_mb: the size of the packed pixels in MB.
    """

    status: int
    cpu_s: float
    child_mb: float | None
    worker_mb: float
    output_mb: float


def picture(width: int, height: int) -> Image.Image:
    """Return an RGB image that compresses about as well as a photo."""
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (max(1, height // 50), max(1, width // 50), 3), np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
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
    """Encode an image as JPEG whose EXIF data contain a rotation."""
    exif = Image.Exif()
    exif[_ORIENTATION] = 6
    return saved("JPEG", quality=90, exif=exif)(image)


def _transparent(image: Image.Image) -> bytes:
    """Encode an image as PNG whose left half is transparent."""
    image = image.convert("RGBA")
    image.paste((0, 0, 0, 0), (0, 0, image.width // 2, image.height))
    return saved("PNG", "RGBA", compress_level=3)(image)


def _grey_16_bits(image: Image.Image) -> bytes:
    """Encode an image as PNG with 16-bit grey values."""
    grey = np.array(image.convert("L")).astype(np.uint16) * 257
    file = io.BytesIO()
    Image.fromarray(grey).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _colour_16_bits(image: Image.Image) -> bytes:
    """Encode an image as PNG with 16-bit colours, which Pillow cannot write."""
    pixels = (np.array(image).astype(">u2") & 0xF0) * 256
    rows = pixels.reshape(image.height, -1).view(np.uint8)
    rows = np.concatenate([np.zeros((image.height, 1), np.uint8), rows], axis=1)

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", image.width, image.height, 16, 2, 0, 0, 0)
    data = zlib.compress(rows.tobytes(), 1)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


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
    "transparent WebP": lambda image: saved("WEBP", "RGBA", quality=90, method=0)(
        Image.open(io.BytesIO(_transparent(image)))
    ),
    "GIF": saved("GIF", "P"),
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
        """Send one image file to the process, and return the figures."""
        # The worker ends its child after a refused file. A new child has no memory that earlier
        # requests have left.
        self._ask(b"")
        self._ask(saved("PNG")(Image.new("RGB", (64, 64))))
        (child,) = _children(self._pid)
        pids = (child, self._pid)
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5", "ascii")
        memory_before = {pid: _memory_mb(pid, "VmRSS") for pid in pids}
        cpu_before = _cpu_s(self._pid) + _cpu_s(child)
        num_bytes = self._ask(data)
        has_child = child in _children(self._pid)
        # If the child has ended, the CPU time of the worker contains the CPU time of the child.
        cpu_s = _cpu_s(self._pid) + (_cpu_s(child) if has_child else 0.0) - cpu_before
        growth = [
            _memory_mb(pid, "VmHWM") - memory_before[pid] if pid == self._pid or has_child else None
            for pid in pids
        ]
        return Figures(
            200 if num_bytes is not None else 400,
            cpu_s,
            growth[0],
            growth[1] or 0.0,
            (num_bytes or 0) / 1e6,
        )

    def _ask(self, data: bytes) -> int | None:
        """Send an image file. Return the number of bytes of the packed pixels; None if refused."""
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
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {int(child) for task in tasks for child in (task / "children").read_text().split()}


def _cpu_s(pid: int) -> float:
    """Return the CPU time in seconds of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    # The fields 14 to 17 of the file are utime, stime, cutime and cstime. `fields` begins with the
    # third field.
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


def _memory_mb(pid: int, name: str) -> float:
    """Return a value in MB of the file /proc/PID/status, such as "VmRSS"."""
    for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/{pid}/status has no {name}")


def main() -> None:
    """Measure the files, and print one table for each checkpoint."""
    flags = command_line.parser(__doc__)
    add = flags.add_argument
    add("--model", type=Path, nargs="+", default=[SEE], help="checkpoints (default: demo/see)")
    add("--size", nargs="+", default=["4000x4000"], help="width and height of the images")
    add("--kind", nargs="+", default=list(_KINDS), choices=list(_KINDS), help="kinds of files")
    add(
        "--rounds", type=int, default=3, help="requests with each file, of which the minimum counts"
    )
    args = flags.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = _write_files(args.size, args.kind, Path(folder))
        for model in args.model:
            print(f"\n{model.name}\n\n{_measure(model, files, args.rounds)}", flush=True)


def _write_files(sizes: list[str], kinds: list[str], folder: Path) -> dict[tuple[str, str], Path]:
    """Write the image files, and map their kinds and sizes to their paths."""
    files = {}
    for size in sizes:
        width, height = map(int, size.split("x"))
        image = picture(width, height)
        for kind in kinds:
            path = folder / f"{len(files)}"
            path.write_bytes(_KINDS[kind](image))
            files[kind, size] = path
    return files


def _measure(model: Path, files: dict[tuple[str, str], Path], num_rounds: int) -> str:
    """Measure all files with one checkpoint, and return a table."""
    rows = []
    worker = Worker(model)
    try:
        for (kind, size), path in files.items():
            data = path.read_bytes()
            rounds = [worker.measure(data) for _ in range(num_rounds)]
            best = min(rounds, key=lambda each: each.cpu_s)
            child = [each.child_mb for each in rounds if each.child_mb is not None]
            rows.append(
                [
                    kind,
                    size,
                    f"{len(data) / 1e6:.1f}",
                    str(best.status),
                    f"{best.cpu_s:.2f}",
                    f"{max(child):.0f}" if child else "",
                    f"{max(each.worker_mb for each in rounds):.0f}",
                    f"{best.output_mb:.1f}",
                ]
            )
    finally:
        worker.close()
    head = ["kind", "size", "file, MB", "answer", "CPU, s", "child, MB", "worker, MB", "output, MB"]
    return table(head, rows)


if __name__ == "__main__":
    main()
