# SPDX-License-Identifier: Apache-2.0
"""The tile sizes of the GPU kernels: measured values for some devices, and default values.

The measured values of a device are stored in a table, which is a file `<device name>.json` in this
folder. The command `python -m loadtest.gpu attention` measures a device and writes the file into
the folder of its results. The file must then be copied to this folder.

A table contains a list of entries for each kernel. An entry has the keys "max_dim", "itemsize",
"rows", "tile", "num_warps" and "num_stages". A kernel uses the first entry that satisfies two
conditions: itemsize equals the itemsize of the cache, and max_dim is at least the larger of the key
size and the value size. If there is no such entry, the kernel uses the default values.
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
KIB = 1024


@dataclass(frozen=True, slots=True)
class Tuning:
    """The tile sizes and launch parameters of one kernel.

    Attributes:
        rows: the number of query rows in a tile. A row belongs to one token and one query head.
        tile: the number of keys in a tile.
        num_warps: the number of warps of one program.
        num_stages: the number of stages in which Triton pipelines the loading of key tiles.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        """Raise a ConfigError if the kernels do not support the value of an attribute."""
        if self.rows not in _TILE_SIZES or self.tile not in _TILE_SIZES:
            sizes = ", ".join(map(str, _TILE_SIZES))
            raise ConfigError(
                f"rows and tile must be among {sizes}, but rows is {self.rows} and tile is "
                f"{self.tile}."
            )
        has_valid_stages = 1 <= self.num_stages <= _MAX_STAGES
        if self.num_warps not in _NUM_WARPS or not has_valid_stages:
            warps = ", ".join(map(str, _NUM_WARPS))
            raise ConfigError(
                f"num_warps must be among {warps}, and num_stages must be from 1 to "
                f"{_MAX_STAGES}, but num_warps is {self.num_warps} and num_stages is "
                f"{self.num_stages}."
            )


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a measured table.

    Attributes:
        max_dim: the tile sizes are used for keys and values of at most this size.
        itemsize: the number of bytes of one number in the cache.
        tuning: the tile sizes.
    """

    max_dim: int
    itemsize: int
    tuning: Tuning


Table = dict[str, list[Entry]]
# The type of a compute capability, which has a major and a minor number.
Capability = tuple[int, int]


def slug(device_name: str) -> str:
    """Convert the name of a device to the form that is used as a file name.

    Example: "NVIDIA H100 80GB HBM3" gives "nvidia-h100-80gb-hbm3".
    """
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


@functools.cache
def table_of(device_name: str, folder: Path = FOLDER) -> Table:
    """Return the table that was measured for a device. If there is none, return an empty table.

    Raises:
        ConfigError: if the file is damaged.
    """
    path = folder / f"{slug(device_name)}.json"
    if not path.is_file():
        return {}
    try:
        kernels = json.loads(path.read_text())["kernels"]
        return {name: [_entry(item) for item in kernels.get(name, [])] for name in KERNELS}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: the table of tile sizes cannot be read: {error!r}. Create the table again "
            "with the GPU benchmark (python -m loadtest.gpu attention), or delete the file."
        ) from error


def write_table(device_name: str, table: Table, facts: dict[str, str], folder: Path) -> Path:
    """Write a measured table to a file, and return the path of the file.

    Args:
        device_name: the name of the device.
        table: the measured entries.
        facts: additional information to store in the file, for example the date and the versions.
        folder: the folder of the file.
    """
    path = folder / f"{slug(device_name)}.json"
    kernels: dict[str, list[dict[str, int]]] = {}
    for name, entries in table.items():
        # `Device.tuning` uses the first suitable entry, so small heads must come first.
        ordered = sorted(entries, key=lambda entry: (entry.itemsize, entry.max_dim))
        kernels[name] = [
            {"max_dim": entry.max_dim, "itemsize": entry.itemsize, **asdict(entry.tuning)}
            for entry in ordered
        ]
    content = {"device": device_name, **facts, "kernels": kernels}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


@dataclass(frozen=True, slots=True)
class Device:
    """The properties of a GPU on which the tile sizes depend.

    Attributes:
        table: the table that was measured on the GPU; it may be empty.
        capability: the compute capability. (9, 0) is Hopper.
    """

    table: Table
    capability: Capability = (9, 0)

    def tuning(self, kernel: str, dim: int, itemsize: int) -> Tuning:
        """Return the tile sizes of a kernel on this GPU.

        Args:
            kernel: "decode" or "prefill".
            dim: the key size or the value size, whichever is larger.
            itemsize: the number of bytes of one number in the cache.
        """
        for entry in self.table.get(kernel, []):
            if entry.itemsize == itemsize and entry.max_dim >= dim:
                return entry.tuning
        return default_tuning(kernel, dim, itemsize, self.capability)


def shared_bytes(capability: Capability) -> int:
    """Return the maximum size in bytes of the shared memory of one program.

    The sizes are listed in NVIDIA's CUDA programming guide, in the table of compute capabilities.
    """
    major, _ = capability
    if major in (9, 10, 11):
        return 227 * KIB
    return 163 * KIB if capability in ((8, 0), (8, 7)) else 99 * KIB


# The type of a list of pairs. A pair contains a head size, and the tile sizes for heads of at most
# this size. The head sizes are in ascending order.
_Entries = tuple[tuple[int, Tuning], ...]

# The default tile sizes, for GPUs without a measured table. The outer key contains the kernel and
# the number of bytes of one number in the cache. The inner key is the result of `_class_of`.
#
# The tile sizes were not measured on a GPU. They were chosen such that, in the compiled kernels,
# the values of one program fit into the registers and the shared memory. If a number in the cache
# has one or two bytes, the kernel also loads at least one later tile while it computes a tile.
_DEFAULTS: dict[tuple[str, int], dict[str, _Entries]] = {
    ("decode", 2): {
        "8.0": ((128, Tuning(16, 64, 4, 3)), (512, Tuning(16, 32, 4, 3))),
        "8.9": (
            (128, Tuning(16, 64, 4, 3)),
            (256, Tuning(16, 32, 4, 3)),
            (512, Tuning(16, 16, 4, 3)),
        ),
        "9.0": ((128, Tuning(16, 64, 4, 3)), (512, Tuning(16, 32, 4, 3))),
        "10.0": ((128, Tuning(16, 64, 4, 3)), (512, Tuning(16, 32, 4, 3))),
    },
    ("prefill", 2): {
        "8.0": (
            (128, Tuning(128, 32, 8, 3)),
            (256, Tuning(64, 32, 8, 3)),
            (512, Tuning(32, 16, 8, 3)),
        ),
        "8.9": (
            (128, Tuning(128, 32, 8, 3)),
            (192, Tuning(64, 32, 4, 3)),
            (256, Tuning(64, 16, 8, 3)),
            (512, Tuning(32, 16, 8, 3)),
        ),
        "9.0": (
            (64, Tuning(128, 64, 4, 3)),
            (128, Tuning(128, 64, 8, 3)),
            (192, Tuning(64, 64, 4, 3)),
            (256, Tuning(128, 32, 8, 3)),
            (512, Tuning(32, 32, 8, 3)),
        ),
        "10.0": (
            (128, Tuning(128, 64, 8, 3)),
            (192, Tuning(64, 64, 4, 3)),
            (256, Tuning(64, 32, 8, 3)),
            (512, Tuning(32, 32, 8, 3)),
        ),
    },
    # The kernels convert 8-bit numbers to wider numbers in registers. These entries have more
    # warps, because a program with more warps has more registers.
    ("decode", 1): dict.fromkeys(
        ("8.0", "8.9", "9.0", "10.0"),
        (
            (128, Tuning(16, 64, 8, 3)),
            (192, Tuning(16, 32, 8, 3)),
            (256, Tuning(16, 32, 4, 3)),
            (512, Tuning(16, 32, 8, 3)),
        ),
    ),
    ("prefill", 1): {
        "8.0": (
            (128, Tuning(64, 32, 8, 3)),
            (256, Tuning(64, 16, 8, 3)),
            (512, Tuning(32, 16, 8, 3)),
        ),
        "8.9": (
            (128, Tuning(64, 32, 8, 3)),
            (256, Tuning(64, 16, 8, 3)),
            (512, Tuning(32, 16, 8, 3)),
        ),
        "9.0": (
            (96, Tuning(128, 64, 8, 3)),
            (128, Tuning(128, 32, 8, 3)),
            (256, Tuning(64, 16, 8, 3)),
            (512, Tuning(32, 32, 8, 3)),
        ),
        "10.0": (
            (96, Tuning(128, 64, 8, 3)),
            (128, Tuning(128, 32, 8, 3)),
            (256, Tuning(64, 32, 8, 3)),
            (512, Tuning(32, 32, 8, 3)),
        ),
    },
    # Large tiles accelerate only products that use tensor cores. Exact float32 products do not use
    # tensor cores, so these entries have small tiles.
    ("decode", 4): {
        "8.0": ((512, Tuning(16, 32, 8, 2)),),
        "8.9": ((512, Tuning(16, 16, 8, 2)),),
        "9.0": ((512, Tuning(16, 32, 8, 2)),),
        "10.0": ((512, Tuning(16, 32, 8, 2)),),
    },
    ("prefill", 4): dict.fromkeys(
        ("8.0", "8.9", "9.0", "10.0"),
        ((256, Tuning(32, 16, 8, 2)), (512, Tuning(16, 16, 8, 2))),
    ),
}


def default_tuning(kernel: str, dim: int, itemsize: int, capability: Capability = (9, 0)) -> Tuning:
    """Return the default tile sizes of a GPU without a measured table.

    `Device.tuning` documents the arguments.
    """
    entries = _DEFAULTS[kernel, itemsize][_class_of(capability)]
    for max_dim, tuning in entries:
        if max_dim >= dim:
            return tuning
    _, tuning_of_largest_heads = entries[-1]
    return tuning_of_largest_heads


def _class_of(capability: Capability) -> str:
    """Return the key in `_DEFAULTS` for a compute capability. Example: (12, 0) gives "8.9".

    On GPUs with the capability 9.0 or 10.0, matrix products read tiles from shared memory. On other
    GPUs, they read registers. GPUs for consumers have as much shared memory as GPUs with the
    capability 8.9.
    """
    major, _ = capability
    if major == 9:
        return "9.0"
    if major in (10, 11):
        return "10.0"
    return "8.0" if shared_bytes(capability) == 163 * KIB else "8.9"


def _entry(item: dict[str, int]) -> Entry:
    """Convert one JSON object of a table file to an `Entry`."""
    tuning = dict(item)
    max_dim = int(tuning.pop("max_dim"))
    itemsize = int(tuning.pop("itemsize"))
    return Entry(max_dim, itemsize, Tuning(**tuning))
