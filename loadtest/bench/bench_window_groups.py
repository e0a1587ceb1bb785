# SPDX-License-Identifier: Apache-2.0
"""Compute the KV cache memory of models with sliding windows, with and without groups of layers.

The model shapes come from published configurations. The program calls the functions with which the
engine plans its memory, so it needs no weights:

    python -m loadtest.bench.bench_window_groups
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from nereid_backend.attention.layers import LayerGroups, LayerSpec, LayerWindow, single_group
from nereid_backend.config import EngineConfig
from nereid_backend.main_memory import format_bytes
from nereid_backend.model.forward_path.length_limits import LengthLimit
from nereid_backend.model.memory.layer_groups import divide_layers
from nereid_backend.model.memory.memory_plan import BlockShape, plan_memory

from loadtest.bench.markdown_table import table
from loadtest.command_line import Option, parse_command_line

_ITEM_BYTES = 2  # bfloat16

_OPTIONS = {
    "--tokens": Option(32_000, "tokens in each request"),
    "--gib": Option(4.0, "size of the KV cache in GiB"),
    "--step-tokens": Option(512, "tokens in one step"),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The attention of a published model.

    The pattern contains the kinds of consecutive layers: "W" for layers with the sliding window
    `window`, and "F" for layers with full attention. The pattern repeats.
    """

    pattern: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: LayerWindow

    def layers(self) -> list[LayerSpec]:
        """Return the attention layers. The number of query heads does not affect the cache."""
        heads, dim = self.num_kv_heads, self.head_dim
        full = LayerSpec(heads, heads, dim, dim)
        windowed = LayerSpec(heads, heads, dim, dim, self.window)
        kinds = (self.pattern * self.num_layers)[: self.num_layers]
        return [full if kind == "F" else windowed for kind in kinds]


# The values come from config.json in the checkpoints with these names.
SHAPES = {
    "Gemma 3 4B": Shape("WWWWWF", 34, 4, 256, LayerWindow(size=1024)),
    "Gemma 3 27B": Shape("WWWWWF", 62, 16, 128, LayerWindow(size=1024)),
    "gpt-oss 20B": Shape("WF", 24, 8, 64, LayerWindow(size=128)),
    "gpt-oss 120B": Shape("WF", 36, 8, 64, LayerWindow(size=128)),
    "Llama 4 Scout": Shape("WWWF", 48, 8, 128, LayerWindow(chunk=8192)),
    "Command R7B (Cohere 2)": Shape("WWWF", 32, 8, 128, LayerWindow(size=4096)),
    "Command A (Cohere 2)": Shape("WWWF", 64, 8, 128, LayerWindow(size=4096)),
}


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one request, and the number of requests that always fit into the KV cache."""

    bytes_per_token: float
    num_requests: int


def measure(
    layers: Sequence[LayerSpec],
    groups: LayerGroups,
    config: EngineConfig,
    num_tokens: int,
    num_bytes: int,
) -> Memory:
    """Plan a KV cache of `num_bytes` bytes for requests with `num_tokens` tokens."""
    block = BlockShape(
        bytes_per_token=layers[0].bytes_per_token(_ITEM_BYTES) * groups.num_places,
        block_size=config.block_size,
        windows=groups.windows,
        max_step_tokens=config.max_num_batched_tokens,
    )
    limit = LengthLimit(num_tokens, "the length of the requests")
    plan = plan_memory(config, block, bytes_per_sequence=0, limit=limit, num_bytes=num_bytes)
    num_blocks = block.num_sequence_blocks(num_tokens)
    return Memory(num_blocks * block.num_bytes / num_tokens, plan.num_blocks // num_blocks)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table with one row for each model."""
    args = parse_command_line(__doc__, _OPTIONS, argv)
    print(
        f"Memory per token of requests with {args.tokens} tokens, and requests in {args.gib:g} "
        "GiB\n"
    )
    head = ["model", "one group", "requests", "groups", "memory", "requests"]
    print(table(head, [[name, *cells(shape, args)] for name, shape in SHAPES.items()]))


def cells(shape: Shape, args: argparse.Namespace) -> list[str]:
    """Return the memory and the number of requests of a model without groups and with groups."""
    num_bytes = int(args.gib * 2**30)
    layers = shape.layers()
    config = EngineConfig(
        "none", max_num_seqs=args.step_tokens, max_num_batched_tokens=args.step_tokens
    )
    groups = divide_layers(layers, args.tokens, args.step_tokens, config.block_size)
    ungrouped = measure(layers, single_group(layers), config, args.tokens, num_bytes)
    grouped = measure(layers, groups, config, args.tokens, num_bytes)
    return [
        format_bytes(int(ungrouped.bytes_per_token)),
        str(ungrouped.num_requests),
        f"{len(groups.windows)} of {groups.num_places} layers",
        format_bytes(int(grouped.bytes_per_token)),
        str(grouped.num_requests),
    ]


if __name__ == "__main__":
    main()
