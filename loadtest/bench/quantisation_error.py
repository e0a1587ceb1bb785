"""Measure how integer weights change the next-token probabilities of a checkpoint.

    python -m loadtest.bench.quantisation_error demo/chat --text docs/quickstart.md

For each setting of weight_dtype, the table shows the perplexity of the text, the mean
Kullback-Leibler divergence from the probabilities of the float32 model in nats, and the share of
positions at which the most likely token stays the same.
"""

from pathlib import Path

import torch
from nereid_backend.linear.packed_embedding import pack_embedding
from nereid_backend.linear.quantise_weights import quantise_linears
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from loadtest import command_line
from loadtest.bench.markdown_table import table

# The number of tokens that the model processes at a time.
WINDOW = 256


@torch.inference_mode()
def log_probabilities(path: str, windows: Tensor, weight_dtype: str) -> Tensor:
    """Return the log-probabilities of the next token, [windows, WINDOW, vocab_size].

    `windows` are token ids, [windows, WINDOW]. `weight_dtype` is "float32", "bfloat16", "int8" or
    "int4".
    """
    dtype = torch.float32 if weight_dtype == "float32" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    if weight_dtype.startswith("int"):
        quantise_linears(model, bits=int(weight_dtype.removeprefix("int")))
        pack_embedding(model, lambda: True, can_round=True)
    logits = [model(window[None]).logits[0].float() for window in windows]
    return torch.stack(logits).log_softmax(-1)


def read_windows(model: str, files: list[str], max_windows: int) -> Tensor:
    """Return the tokens of text files, divided into windows, [windows, WINDOW]."""
    text = "\n".join(Path(file).read_text(encoding="utf-8") for file in files)
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    num_windows = min(max_windows, len(ids) // WINDOW)
    return ids[: num_windows * WINDOW].view(num_windows, WINDOW)


def row(weight_dtype: str, rounded: Tensor, exact: Tensor, windows: Tensor) -> list[str]:
    """Return the row of the table for one weight_dtype.

    `rounded` contains the log-probabilities of the model with this weight_dtype, and `exact`
    contains those of the model with float32 weights.
    """
    # Each position predicts the next token, so the last position of a window predicts no token.
    predicted, targets = rounded[:, :-1].flatten(0, 1), windows[:, 1:].flatten()
    perplexity = functional.nll_loss(predicted, targets).exp()
    divergence = (exact.exp() * (exact - rounded)).sum(-1).mean()
    agreement = (exact.argmax(-1) == rounded.argmax(-1)).float().mean()
    return [weight_dtype, f"{perplexity:.3f}", f"{divergence:.5f}", f"{agreement:.1%}"]


def main() -> None:
    """Measure all data types of the weights, and print the table."""
    parser = command_line.parser(__doc__)
    parser.add_argument("model", help="the folder of the checkpoint")
    parser.add_argument("--text", required=True, nargs="+", help="text files to read")
    parser.add_argument("--windows", type=int, default=16, help="number of windows of 256 tokens")
    args = parser.parse_args()
    windows = read_windows(args.model, args.text, args.windows)
    exact = log_probabilities(args.model, windows, "float32")
    rows = [
        row(dtype, log_probabilities(args.model, windows, dtype), exact, windows)
        for dtype in ("float32", "bfloat16", "int8", "int4")
    ]
    print(table(["weights", "perplexity", "divergence", "same token"], rows))


if __name__ == "__main__":
    main()
