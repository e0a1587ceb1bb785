"""Compares the greedy tokens of the engine with those of transformers for every causal LM type.

    python tests/backend/archs.py                 run the types without a result, print the table
    python tests/backend/archs.py --seconds 200   stop after 200 s; the next run continues
    python tests/backend/archs.py llama mamba     run these types again
    python tests/backend/archs.py --page          print the text of docs/history/exactness.md
    python tests/backend/archs.py --columns int4 int8 LoRA --results build/variants.jsonl
                                                  test only these columns
    python tests/backend/archs.py --tensor-parallel-size 2 --results build/archs-tp.jsonl
                                                  divide each model over two processes

A type is a value of `model_type` in a config.json, such as llama. Each type runs in its own process
with a limit on time and memory. The file `--results` contains one line of JSON for each result.
"""

import argparse
import datetime
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from logging import ERROR, getLogger
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from backend.child_results import append_result, load_results, run_in_child
from backend.exactness import (
    MAX_TOKENS,
    PROMPTS,
    SITUATIONS,
    Answers,
    equal_tokens,
    open_engine,
    reference,
)
from backend.weight_variants import TIE, VARIANTS, NotApplicableError
from nereid_backend import UnsupportedModelError
from nereid_backend.errors import ConfigError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from backend import shrink

# The limits on the wall time and the address space of the process of one type.
_MAX_SECONDS = 90
_MAX_BYTES = 8 * 2**30
_COLUMNS = (*SITUATIONS, *VARIANTS)
_ALL_EQUAL = f"{len(PROMPTS) * MAX_TOKENS}/{len(PROMPTS) * MAX_TOKENS}"
# The forward paths in the order in which the engine tries them.
_TIERS = ("packed", "rows", "padded", "single")


@dataclass
class Result:
    """The result of one type of model.

    Attributes:
        status: "exact", "wrong", "refused" or "not built".
        tier: the forward path that the engine chose in the first situation.
        cells: for each column, the number of equal tokens and of all tokens, such as "96/96". The
            cell is "-" if the type cannot be compared in this column.
        reason: why the type was refused or not built, or the error that ended its process.
        num_distinct: the number of different tokens among the expected tokens.
        seconds: the wall time of the type's process.
    """

    type: str
    status: str = "not built"
    tier: str = ""
    cells: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    num_distinct: int = 0
    seconds: float = 0.0


def examine(size: int, columns: list[str], result: Result) -> None:
    """Test a tiny model of the type `result.type`, and store the outcome in `result`.

    `columns` names the tests to run: each name is a key of `SITUATIONS` or `VARIANTS`. In the tests
    of `SITUATIONS`, the engine divides the model over `size` processes.
    """
    with tempfile.TemporaryDirectory() as temporary_folder:
        folder = shrink.save(result.type, Path(temporary_folder))
        expected = reference(folder)
        result.num_distinct = len({token for answer in expected for token in answer})
        result.status = "wrong"
        for situation in [name for name in SITUATIONS if name in columns]:
            settings, run = SITUATIONS[situation]
            try:
                engine = open_engine(folder, tensor_parallel_size=size, **settings)
            except (UnsupportedModelError, ConfigError) as error:
                result.status, result.reason = "refused", str(error)
                return
            result.tier = result.tier or engine.info.path
            try:
                result.cells[situation] = _cell(expected, run(engine))
            finally:
                engine.close()
        for variant in [name for name in VARIANTS if name in columns]:
            try:
                result.cells[variant] = _cell(*VARIANTS[variant](folder))
            except (ConfigError, NotApplicableError):
                result.cells[variant] = "-"
        if set(result.cells.values()) <= {_ALL_EQUAL, "-"}:
            result.status = "exact"


def _cell(expected: Answers, answers: Answers) -> str:
    """Return the number of equal tokens and the number of all tokens as a text, such as "95/96"."""
    num_equal, num_tokens = equal_tokens(expected, answers)
    return f"{num_equal}/{num_tokens}"


def summary(results: dict[str, Result]) -> str:
    """Return sentences with the number of types for each status and each forward path."""
    tiers = Counter(r.tier for r in results.values() if r.status == "exact")
    statuses = Counter(r.status for r in results.values())
    by_tier = ", ".join(f'{tiers[tier]} with the forward path "{tier}"' for tier in _TIERS)
    return (
        f"{len(results)} of {len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)} types were tested. "
        f"{statuses['exact']} types give equal tokens: {by_tier}. {statuses['wrong']} types give "
        f"different tokens. The engine rejects {statuses['refused']} types. "
        f"{statuses['not built']} types cannot be built as test models. "
        f"{_variant_summary(results)}".strip()
    )


def _variant_summary(results: dict[str, Result]) -> str:
    """Return a sentence for each column of rounded weights and adapters that was tested."""
    sentences = []
    for name in VARIANTS:
        cells = Counter(r.cells[name] for r in results.values() if name in r.cells)
        if cells:
            num_wrong = cells.total() - cells[_ALL_EQUAL] - cells["-"]
            sentences.append(
                f"Column {name}: {cells[_ALL_EQUAL]} types give equal tokens, {num_wrong} types "
                f"give different tokens, and {cells['-']} types cannot be compared."
            )
    return " ".join(sentences)


def table(results: dict[str, Result]) -> str:
    """Return a Markdown table with one line for each type."""
    columns = [name for name in _COLUMNS if any(name in r.cells for r in results.values())]
    lines = [f"| Type | Forward path | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for result in sorted(results.values(), key=lambda r: r.type):
        if result.status in ("exact", "wrong"):
            cells = " | ".join(result.cells.get(name, result.reason) for name in columns)
        else:
            reason = result.reason.replace("|", "/").replace("\n", " ")[:200]
            cells = f"{result.status}: {reason}" + " |" * (len(columns) - 1)
        lines.append(f"| {result.type} | {result.tier} | {cells} |")
    return "\n".join(lines)


def _commit() -> str:
    """Return the short hash of the checked-out commit."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    folder = Path(__file__).parent
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.strip()


def page(results: dict[str, Result]) -> str:
    """Return the text of docs/history/exactness.md."""
    head = (Path(__file__).parent / "exactness_page.md").read_text()
    values = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "num_prompts": len(PROMPTS),
        "shortest": min(map(len, PROMPTS)),
        "longest": max(map(len, PROMPTS)),
        "max_tokens": MAX_TOKENS,
        "window": shrink.WINDOW,
        "longest_sequence": 160,
        "tie": TIE,
        "summary": summary(results),
        "table": table(results),
    }
    return head.format(**values)


def main() -> None:
    """Run the requested types, then print the table."""
    parser = argparse.ArgumentParser(
        description="Compare greedy tokens with transformers for each type of model."
    )
    parser.add_argument(
        "types", nargs="*", help="types to run again; by default all types without a result"
    )
    parser.add_argument("--results", type=Path, default=Path("build/archs.jsonl"))
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after this many seconds"
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        help="divide each model over this number of processes",
    )
    parser.add_argument(
        "--columns", nargs="+", choices=_COLUMNS, help="the columns to test (default: all)"
    )
    parser.add_argument(
        "--page", action="store_true", help="print the text of docs/history/exactness.md and exit"
    )
    arguments = parser.parse_args()
    results = load_results(arguments.results, Result)
    if arguments.page:
        sys.stdout.write(page(results))
        return
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    getLogger("nereid_backend").setLevel(ERROR)
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    columns = arguments.columns or list(
        _COLUMNS if arguments.tensor_parallel_size == 1 else ["mixed"]
    )
    deadline = time.monotonic() + arguments.seconds
    for model_type in arguments.types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if (model_type in results and not arguments.types) or time.monotonic() > deadline:
            continue
        result = results[model_type] = run_in_child(
            lambda result: examine(arguments.tensor_parallel_size, columns, result),
            Result(model_type),
            _MAX_SECONDS,
            _MAX_BYTES,
        )
        append_result(arguments.results, result)
        outcome = " ".join(result.cells.values()) or result.reason
        sys.stderr.write(f"{model_type}: {result.status} {result.tier} {outcome}\n")
    sys.stdout.write(f"{table(results)}\n\n{summary(results)}\n")
    sys.exit(any(result.status == "wrong" for result in results.values()))


if __name__ == "__main__":
    main()
