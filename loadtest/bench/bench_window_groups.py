# SPDX-License-Identifier: Apache-2.0
"""Compute the KV cache memory of models with sliding windows, with and without groups of layers.

The shapes are those of published configurations. The functions that plan the memory of the engine
compute all figures, so no weights are needed:

    python -m loadtest.bench.bench_window_groups
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nereid_backend.attention.layers import LayerGroups, LayerSpec, LayerWindow, single_group
from nereid_backend.config import EngineConfig
from nereid_backend.main_memory import format_bytes
from nereid_backend.model.forward_path.length_limits import LengthLimit
from nereid_backend.model.memory.layer_groups import divide_layers
from nereid_backend.model.memory.memory_plan import BlockShape, plan_memory

from loadtest import command_line

_ITEM_BYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class Shape:
    """The attention of a published model.

    Attributes:
        pattern: the kinds of consecutive layers: "W" for a sliding window, "F" for full attention.
            The pattern repeats.
        num_layers: the number of layers.
        num_kv_heads: the number of key and value heads of a layer.
        head_dim: the size of a head.
        window: the window of a layer of kind W.
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
    """The memory of one request, and the number of requests that fit into the KV cache.

    Attributes:
        bytes_per_token: the memory of a request divided by its tokens.
        num_requests: the number of requests that are guaranteed to fit at the same time.
    """

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
    layer_bytes = layers[0].bytes_per_token(_ITEM_BYTES) * groups.num_places
    block = BlockShape(
        layer_bytes, config.block_size, groups.windows, config.max_num_batched_tokens
    )
    num_blocks = block.num_sequence_blocks(num_tokens)
    limit = LengthLimit(num_tokens, "the length of the requests")
    plan = plan_memory(config, block, 0, limit, num_bytes)
    return Memory(num_blocks * block.num_bytes / num_tokens, plan.num_blocks // num_blocks)


def main(argv: Sequence[str] | None = None) -> None:
    """Print one row for each model."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=32_000, help="tokens in each request")
    parser.add_argument("--gib", type=float, default=4, help="size of the KV cache in GiB")
    parser.add_argument("--step-tokens", type=int, default=512, help="tokens in one step")
    args = parser.parse_args(argv)
    config = EngineConfig(
        "none", max_num_seqs=args.step_tokens, max_num_batched_tokens=args.step_tokens
    )
    num_bytes = int(args.gib * 2**30)
    print(f"Memory per token of requests with {args.tokens} tokens, and requests in {args.gib} GiB")
    print(
        f"{'model':24}{'one group':>12}{'requests':>10}{'groups':>16}{'memory':>12}{'requests':>10}"
    )
    for name, shape in SHAPES.items():
        layers = shape.layers()
        groups = divide_layers(layers, args.tokens, args.step_tokens, config.block_size)
        before = measure(layers, single_group(layers), config, args.tokens, num_bytes)
        after = measure(layers, groups, config, args.tokens, num_bytes)
        division = f"{len(groups.windows)} of {groups.num_places} layers"
        print(
            f"{name:24}{format_bytes(int(before.bytes_per_token)):>12}{before.num_requests:>10}"
            f"{division:>16}{format_bytes(int(after.bytes_per_token)):>12}{after.num_requests:>10}"
        )


if __name__ == "__main__":
    main()
