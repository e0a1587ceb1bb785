# SPDX-License-Identifier: Apache-2.0
"""Save a Qwen3 with random weights, and time one pass over a prompt: a program of bench_gpu.py.

    python -m loadtest.gpu.random_model FOLDER --shape 0.6b --prompt 512

Prints {"weights_bytes": of all parameters, "forward_ms": of the pass}. It is a process of its own,
so that nothing of it stays in memory, and that it does not matter whether a kernel has lost the
device for the one that asks.
"""

import argparse
import functools
import json
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM
from transformers.utils import logging

from loadtest.bench.bench import SHAPES, config_of
from loadtest.gpu.gpu_kernels import milliseconds


def main() -> None:
    """Draw, time, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--prompt", type=int, required=True, help="tokens of the pass")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = config_of(args.shape)
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(getattr(torch, args.dtype))
    with args.device:  # weights are drawn there: on a host this takes minutes
        model = Qwen3ForCausalLM(config).eval()
    ids = torch.randint(3, config.vocab_size, (1, args.prompt), device=args.device)
    with torch.inference_mode():
        spent = milliseconds(
            functools.partial(model, input_ids=ids, use_cache=False, logits_to_keep=1),
            args.device,
            repeat=5,
        )
    model.save_pretrained(args.folder)
    weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    print(json.dumps({"weights_bytes": weights_bytes, "forward_ms": spent}), flush=True)


if __name__ == "__main__":
    main()
