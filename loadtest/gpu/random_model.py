"""Save a Qwen3 model with random weights and time one forward pass over a prompt.

    python -m loadtest.gpu.random_model FOLDER --shape 0.6b --prompt 512

The program is a part of bench_gpu.py. It prints the JSON object
{"weights_bytes": bytes of all parameters, "forward_ms": milliseconds of the pass}. It
runs in a process of its own, so that it leaves nothing in GPU memory, and works even if a failed
kernel has made the GPU unusable for the calling process.
"""

import functools
import json
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM
from transformers.utils import logging

from loadtest import command_line
from loadtest.bench.bench import SHAPES, config_of
from loadtest.gpu.gpu_kernels import milliseconds


def main() -> None:
    """Create the model, time the forward pass, and save the model."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    dtypes, device = ["float32", "bfloat16"], torch.device("cuda:0")
    add("folder", type=Path, help="folder for the checkpoint")
    add("--shape", choices=SHAPES, required=True, help="shape of the model, as in bench.py")
    add("--prompt", type=int, required=True, help="tokens of the forward pass")
    add("--dtype", choices=dtypes, default="bfloat16", help="dtype of the weights")
    add("--device", type=torch.device, default=device, help="device (default: %(default)s)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = config_of(args.shape)
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(getattr(torch, args.dtype))
    with args.device:  # creating random weights on the CPU would take minutes
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
