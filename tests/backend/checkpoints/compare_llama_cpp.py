"""Compares the greedy tokens of the engine with those of llama.cpp for the same GGUF files.

    pip install xllamacpp
    python tests/backend/checkpoints/compare_llama_cpp.py            all types, as a Markdown table
    python tests/backend/checkpoints/compare_llama_cpp.py Q8_0 F16   some types

The files are exports of the demo chat model. Both programs tokenise the prompts themselves, so the
comparison includes the tokenizers. llama.cpp rounds the inputs of layers to 8-bit integers if the
weights are quantised, and to float16 if the weights are float16. The engine rounds the inputs only
with prepack=True. The programs can therefore choose different tokens if two tokens have similar
probabilities. The table contains the ratio of these probabilities.
"""

import argparse
import json
import math
import shutil
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3]))

from backend.checkpoints.gguf_writer import write_gguf
from backend.exactness import open_engine
from nereid_backend import Engine, SamplingParams
from transformers import AutoTokenizer

from loadtest.bench.markdown_table import table

DEMO = Path(__file__).parents[3] / "demo" / "chat"
# The rows of most weights of the demo model have 192 numbers. llama.cpp uses these types instead of
# K-quants for such rows.
_NARROW = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_NARROW_WEIGHTS = (
    *("token_embd", "attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_gate", "ffn_up"),
)
KINDS = ["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL"]
QUESTIONS = [
    "Hello!",
    "What is 3 + 4?",
    "What is 12 * 12?",
    "What is the capital of France?",
    "What is the capital of Japan?",
    "Translate 'good morning' into German.",
    "How many days does a week have?",
    "Sort these numbers: 9 2 5",
    "Who are you?",
    "Write a short poem about the sea.",
    "Is 7 a prime number?",
    "What colour is the sky?",
    "Spell the word river backwards.",
    "Which planet is the largest?",
    "Tell me a joke.",
    "What is 100 - 37?",
    "Give me a JSON object with a name and an age.",
    "List three fruits.",
    "What does the word 'ocean' mean?",
    "Thank you, goodbye!",
]
NUM_TOKENS = 48


def write_file(kind: str, folder: Path) -> Path:
    """Write the demo model as a GGUF file, and return the path of the file.

    If `kind` is a K-quant, only the weights whose rows are long enough have this type.
    """
    other_kinds = dict.fromkeys(_NARROW_WEIGHTS, _NARROW[kind]) if kind in _NARROW else {}
    return write_gguf(
        folder / "chat",
        "qwen3",
        kind,
        other_kinds=other_kinds,
        metadata={"rope.freq_base": 10000.0},
        path=folder / f"{kind}.gguf",
    )


class LlamaServer:
    """A server of llama.cpp in this process, with one thread and a KV cache in float32."""

    def __init__(self, path: Path) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = 1024
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.warmup = False
        params.verbosity = -1
        self._server = xllamacpp.Server(params)

    def generate(self, prompt: str) -> tuple[list[int], list[int]]:
        """Return the tokens of the prompt and the tokens of the greedy answer."""
        tokens = self._post("/tokenize", {"content": prompt, "parse_special": True})["tokens"]
        body = {
            "prompt": prompt,
            "n_predict": NUM_TOKENS,
            "temperature": 0,
            "return_tokens": True,
            "cache_prompt": False,
        }
        return tokens, self._post("/completion", body)["tokens"]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._server.listening_address.rstrip("/") + path,
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            return json.load(response)


def generate(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """Return the greedy answers, and a number for each token of the answers.

    The number is the difference between the two largest log-probabilities.
    """
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=2)
    answers, gaps = [], []
    for output in engine.generate(prompts, params):
        answer = output.outputs[0]
        answers.append(list(answer.token_ids))
        # `logprobs` contains the chosen token at the index 0, and the two likeliest tokens at the
        # indices 1 and 2.
        gaps.append([top.logprobs[1] - top.logprobs[2] for top in answer.logprobs])
    return answers, gaps


def compare_answers(
    answers: list[list[int]], gaps: list[list[float]], expected: list[list[int]]
) -> list[str]:
    """Return three cells of the table.

    The cells are the number of equal answers, the number of tokens before the first differences,
    and the largest ratio of the probabilities of the two likeliest tokens at a first difference.
    """
    num_tokens = 0
    ratios = []
    for answer, gaps_of_answer, expected_answer in zip(answers, gaps, expected, strict=True):
        pairs = enumerate(zip(answer, expected_answer, strict=False))
        differences = (index for index, (token, expected_token) in pairs if token != expected_token)
        num_equal = next(differences, min(len(answer), len(expected_answer)))
        num_tokens += num_equal
        # The answer of the engine can end with the end-of-sequence token, which llama.cpp omits.
        if num_equal < len(expected_answer) or len(answer) - num_equal > 1:
            ratios.append(math.exp(gaps_of_answer[num_equal]))
    num_equal_answers = len(answers) - len(ratios)
    return [
        f"{num_equal_answers}/{len(answers)}",
        f"{num_tokens}/{sum(map(len, expected))}",
        f"{max(ratios):.2f}" if ratios else "",
    ]


def compare(kind: str, folder: Path, prompts: list[str]) -> list[list[str]]:
    """Return two rows of the table: one for prepack=False, and one for the default settings."""
    path = write_file(kind, folder)
    server = LlamaServer(path)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    prompts_ids, expected_answers, num_equal_prompts = [], [], 0
    for prompt in prompts:
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        expected_prompt_ids, expected_answer = server.generate(prompt)
        prompts_ids.append(prompt_ids)
        expected_answers.append(expected_answer)
        num_equal_prompts += prompt_ids == expected_prompt_ids
    rows = []
    for prepack in (False, True):
        engine = open_engine(path, block_size=16, prepack=prepack, kv_cache_memory="64MiB")
        answers, gaps = generate(engine, prompts_ids)
        engine.close()
        cells = compare_answers(answers, gaps, expected_answers)
        name = "default" if prepack else "prepack=False"
        rows.append([kind, name, f"{num_equal_prompts}/{len(prompts)}", *cells])
    return rows


def main() -> None:
    """Compare the requested types, and print the table."""
    parser = argparse.ArgumentParser(description="Compare greedy tokens with llama.cpp.")
    parser.add_argument("kinds", nargs="*", default=[*KINDS, *_NARROW])
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in QUESTIONS
    ]
    rows = []
    with tempfile.TemporaryDirectory(prefix="nereid-llama-") as temporary_folder:
        shutil.copytree(DEMO, Path(temporary_folder) / "chat")
        for kind in arguments.kinds:
            rows += compare(kind, Path(temporary_folder), prompts)
            sys.stderr.write(f"{rows[-2:]}\n")
    head = [
        "type",
        "engine",
        "equal prompts",
        "equal answers",
        "tokens before the first difference",
    ]
    text = table([*head, "largest ratio of probabilities at a difference"], rows)
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
