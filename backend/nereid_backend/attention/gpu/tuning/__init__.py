# SPDX-License-Identifier: Apache-2.0
"""How the GPU kernels are cut and scheduled: measured tables by device name, and defaults.

A table is `<device name>.json` beside this file, written by `loadtest/bench_gpu.py --tune`: kernel
name to a list of entries {"max_dim", "itemsize", "rows", "tile", "num_warps", "num_stages"}. That
entry counts which is the first with the cache's itemsize and a max_dim of at least the greater of
key and value size; where there is none, the default does.
"""

import functools
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from nereid_backend.errors import ConfigError

FOLDER = Path(__file__).parent
KERNELS = ("decode", "prefill")
_POWERS = (16, 32, 64, 128, 256)
# First numbers of the compute capabilities whose matrix products read tiles from shared memory.
_SHARED_PRODUCTS = (9, 10, 11)


@dataclass(frozen=True, slots=True)
class Tuning:
    """How one kernel is cut.

    Attributes:
        rows: rows of queries in a tile: tokens times heads that share a key head.
        tile: keys in a tile.
        num_warps: warps of one program.
        num_stages: tiles of keys that are under way at once.

    Raises:
        ConfigError: a size that the kernels cannot be cut in.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.rows not in _POWERS or self.tile not in _POWERS:
            raise ConfigError(
                f"rows {self.rows} and tile {self.tile} must be among "
                f"{', '.join(map(str, _POWERS))}"
            )
        if self.num_warps not in (1, 2, 4, 8, 16) or not 1 <= self.num_stages <= 8:
            raise ConfigError(
                f"num_warps {self.num_warps} must be a power of two up to 16, num_stages "
                f"{self.num_stages} 1 to 8"
            )


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a table: a tuning and what it is for."""

    max_dim: int
    itemsize: int
    tuning: Tuning


Table = dict[str, list[Entry]]


def slug(device_name: str) -> str:
    """A device's name as a file's: "NVIDIA H100 80GB HBM3" is nvidia-h100-80gb-hbm3."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


@functools.cache
def table_of(device_name: str, folder: Path = FOLDER) -> Table:
    """The measured table of a device; empty where there is none.

    Raises:
        ConfigError: the file is broken; the message says what to do.
    """
    path = folder / f"{slug(device_name)}.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())["kernels"]
        return {name: [_entry(dict(line)) for line in found.get(name, [])] for name in KERNELS}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: {error!r}; write it anew with loadtest/bench_gpu.py --tune, or remove it"
        ) from error


def write_table(device_name: str, table: Table, facts: dict[str, str], folder: Path) -> Path:
    """Keep a measured table; facts (date, versions) go beside it. Returns the file."""
    path = folder / f"{slug(device_name)}.json"
    kernels = {
        name: [
            {"max_dim": line.max_dim, "itemsize": line.itemsize, **asdict(line.tuning)}
            for line in sorted(lines, key=lambda line: (line.itemsize, line.max_dim))
        ]
        for name, lines in table.items()
    }
    content = {"device": device_name, **facts, "kernels": kernels}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


@dataclass(frozen=True, slots=True)
class Device:
    """What kernels are cut for.

    Attributes:
        table: measured there; may be empty.
        generation: first number of its compute capability; 9 is Hopper.
    """

    table: Table
    generation: int = 9

    def tuning(self, kernel: str, dim: int, itemsize: int) -> Tuning:
        """How to cut a kernel for heads of a size (the greater of key and value)."""
        for entry in self.table.get(kernel, []):
            if entry.itemsize == itemsize and entry.max_dim >= dim:
                return entry.tuning
        return default_tuning(kernel, dim, itemsize, self.generation)


def default_tuning(kernel: str, dim: int, itemsize: int, generation: int = 9) -> Tuning:
    """What should do on data-centre GPUs.

    Chosen by compiling (`loadtest/compile_kernels.py`): tiles that leave room in shared memory for
    a second program, and no registers spilled. Matrix products take registers for what those of
    Hopper and of data-centre Blackwell take from shared memory; all other tiles fit in the 99 KiB
    that consumers' GPUs have.
    """
    if itemsize == 4:
        # Exact float32 products run without tensor cores, so small tiles lose nothing.
        return Tuning(16, 32, 8, 2) if kernel == "decode" else Tuning(32, 16, 8, 2)
    if itemsize == 1:
        return _byte_tuning(kernel, dim, generation)
    if kernel == "decode":
        return Tuning(16, 64, 4, 3) if dim <= 128 else Tuning(16, 32, 4, 3)
    if dim > 256:
        # As wide as that, 64 rows spill 2 KiB a thread on 9.0, and do not fit in 99 KiB on 8.6.
        return Tuning(32, 32 if generation in _SHARED_PRODUCTS else 16, 8, 2)
    if generation not in _SHARED_PRODUCTS:
        if dim <= 128:
            return Tuning(128, 32, 8, 3)
        return Tuning(64, 32, 4 if dim <= 192 else 8, 3)
    if dim <= 128:
        return Tuning(128, 64, 8 if dim > 64 else 4, 3)
    return Tuning(64, 64, 4, 2) if dim <= 192 else Tuning(64, 32, 4, 2)


def _byte_tuning(kernel: str, dim: int, generation: int) -> Tuning:
    """Tiles are made numbers again in registers, so there are more warps to hold them."""
    if kernel == "decode":
        return Tuning(16, 64 if dim <= 128 else 32, 8, 3)
    if generation not in _SHARED_PRODUCTS:
        return Tuning(64, 32 if dim <= 128 else 16, 8, 3)
    return Tuning(128 if dim <= 128 else 64, 64 if dim <= 128 else 32, 8, 3)


def _entry(line: dict[str, int]) -> Entry:
    max_dim, itemsize = line.pop("max_dim"), line.pop("itemsize")
    return Entry(int(max_dim), int(itemsize), Tuning(**line))
