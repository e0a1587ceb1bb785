# SPDX-License-Identifier: Apache-2.0
"""The tile sizes of the GPU kernels: tables of measured values by device, and default values.

A table is a file `<device name>.json` in this folder. The option --tune of the GPU benchmark
(loadtest/gpu) writes it. The table maps the name of a kernel to a list of entries with the keys
"max_dim", "itemsize", "rows", "tile", "num_warps" and "num_stages". A kernel uses the first entry
whose itemsize is that of the cache and whose max_dim is at least the larger of key and value size.
If there is none, the kernel uses the default values.
"""

import functools
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from nereid_backend.errors import ConfigError

FOLDER = Path(__file__).parent
KERNELS = ("decode", "prefill")
_TILE_SIZES = (16, 32, 64, 128, 256)
_NUM_WARPS = (1, 2, 4, 8, 16)
_MAX_STAGES = 8
# Major numbers of the compute capabilities whose matrix products read tiles from shared memory.
_SHARED_PRODUCTS = (9, 10, 11)


@dataclass(frozen=True, slots=True)
class Tuning:
    """The tile sizes of one kernel.

    Attributes:
        rows: the number of query rows in a tile: tokens times heads that share a key head.
        tile: the number of keys in a tile.
        num_warps: the number of warps of one program.
        num_stages: the number of tiles of keys that are loaded at the same time.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        """Raise ConfigError if the kernels do not support a value."""
        if self.rows not in _TILE_SIZES or self.tile not in _TILE_SIZES:
            sizes = ", ".join(map(str, _TILE_SIZES))
            raise ConfigError(
                f"rows and tile must be among {sizes}, but rows is {self.rows} and tile is "
                f"{self.tile}."
            )
        if self.num_warps not in _NUM_WARPS or not 1 <= self.num_stages <= _MAX_STAGES:
            warps = ", ".join(map(str, _NUM_WARPS))
            raise ConfigError(
                f"num_warps must be among {warps}, and num_stages must be from 1 to "
                f"{_MAX_STAGES}, but num_warps is {self.num_warps} and num_stages is "
                f"{self.num_stages}."
            )


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a table.

    Attributes:
        max_dim: the largest key or value size for which the tile sizes are used.
        itemsize: the bytes of one number in the cache.
        tuning: the tile sizes.
    """

    max_dim: int
    itemsize: int
    tuning: Tuning


Table = dict[str, list[Entry]]


def slug(device_name: str) -> str:
    """Return a device's name as a file name.

    Example: "NVIDIA H100 80GB HBM3" gives "nvidia-h100-80gb-hbm3".
    """
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


@functools.cache
def table_of(device_name: str, folder: Path = FOLDER) -> Table:
    """Return the measured table of a device, or an empty table if there is none.

    Raises:
        ConfigError: if the file is damaged.
    """
    path = folder / f"{slug(device_name)}.json"
    if not path.is_file():
        return {}
    try:
        kernels = json.loads(path.read_text())["kernels"]
        return {name: [_entry(dict(line)) for line in kernels.get(name, [])] for name in KERNELS}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: the table of tile sizes cannot be read: {error!r}. Create it again with the "
            "option --tune of the GPU benchmark, or delete the file."
        ) from error


def write_table(device_name: str, table: Table, facts: dict[str, str], folder: Path) -> Path:
    """Store a measured table and return its file.

    Args:
        device_name: the name of the device.
        table: the measured entries.
        facts: further information to store, such as the date and the versions.
        folder: the folder of the file.
    """
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
    """The properties of a GPU that determine the tile sizes.

    Attributes:
        table: the table that was measured on the GPU; it may be empty.
        generation: the major number of the compute capability. 9 is Hopper.
    """

    table: Table
    generation: int = 9

    def tuning(self, kernel: str, dim: int, itemsize: int) -> Tuning:
        """Return the tile sizes of a kernel.

        Args:
            kernel: "decode" or "prefill".
            dim: the larger of the key and value size.
            itemsize: the bytes of one number in the cache.
        """
        for entry in self.table.get(kernel, []):
            if entry.itemsize == itemsize and entry.max_dim >= dim:
                return entry.tuning
        return default_tuning(kernel, dim, itemsize, self.generation)


def default_tuning(kernel: str, dim: int, itemsize: int, generation: int = 9) -> Tuning:
    """Return tile sizes that are suitable for GPUs in data centres.

    The arguments are those of `Device.tuning`. The values were chosen by compiling the kernels: no
    registers are spilled, and the tiles leave enough shared memory for a second program. On Hopper
    and on Blackwell for data centres, matrix products read tiles from shared memory. On other GPUs
    they read registers, and the tiles fit into the 99 KiB of shared memory that consumer GPUs have.
    """
    if itemsize == 4:
        # Exact float32 products do not use tensor cores, so small tiles are not slower.
        return Tuning(16, 32, 8, 2) if kernel == "decode" else Tuning(32, 16, 8, 2)
    if itemsize == 1:
        return _byte_tuning(kernel, dim, generation)
    if kernel == "decode":
        return Tuning(16, 64, 4, 3) if dim <= 128 else Tuning(16, 32, 4, 3)
    if dim > 256:
        # With 64 rows, each thread would spill 2 KiB of registers on compute capability 9.0, and
        # the tiles would not fit into 99 KiB of shared memory on 8.6.
        return Tuning(32, 32 if generation in _SHARED_PRODUCTS else 16, 8, 2)
    if generation not in _SHARED_PRODUCTS:
        if dim <= 128:
            return Tuning(128, 32, 8, 3)
        return Tuning(64, 32, 4 if dim <= 192 else 8, 3)
    if dim <= 128:
        return Tuning(128, 64, 8 if dim > 64 else 4, 3)
    return Tuning(64, 64, 4, 2) if dim <= 192 else Tuning(64, 32, 4, 2)


def _byte_tuning(kernel: str, dim: int, generation: int) -> Tuning:
    """Return tile sizes for a cache with 8 bits for each number.

    The kernels convert such tiles in registers, so more warps are needed to hold them.
    """
    if kernel == "decode":
        return Tuning(16, 64 if dim <= 128 else 32, 8, 3)
    if generation not in _SHARED_PRODUCTS:
        return Tuning(64, 32 if dim <= 128 else 16, 8, 3)
    return Tuning(128 if dim <= 128 else 64, 64 if dim <= 128 else 32, 8, 3)


def _entry(line: dict[str, int]) -> Entry:
    """Return the entry of a table that a JSON object describes."""
    max_dim = line.pop("max_dim")
    itemsize = line.pop("itemsize")
    return Entry(int(max_dim), int(itemsize), Tuning(**line))
