"""Measure the cost of grammars: compile times, mask times, and tokens per second of the engine.

    python -m loadtest.bench.bench_grammars [--model demo/chat] [--parts compile,engine]

The grammar libraries are measured on the model's own vocabulary and on a random vocabulary of
151,646 tokens. The engine runs in this process.
"""

import argparse
import json
import random
import statistics
import string
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.core.sampling_params import SamplingParams
from nereid_backend.grammar.backend_interface import Compiled, GrammarBackend
from nereid_backend.grammar.request_spec import schema_spec
from nereid_backend.grammar.vocabulary import Vocabulary, load_vocabulary
from nereid_parsers import get_format

LARGE = 151_646
BATCH = 64
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "home": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "code": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
EBNF = 'root ::= "[" item ("," item)* "]"\nitem ::= [a-z]+ ":" [0-9]+\n'


def made_up(size: int) -> Vocabulary:
    """Return a vocabulary of `size` tokens: all single bytes, random words, and an end token.

    The words are the same in every run.
    """
    rng = random.Random(0)
    tokens = {bytes([byte]): byte for byte in range(256)}
    while len(tokens) < size - 1:
        word = "".join(rng.choices("etaoinshrdlucmfwypvbgkjqxz", k=rng.randint(2, 8)))
        draw = rng.random()
        word = word.title() if draw < 0.1 else word
        word = f" {word}" if draw > 0.5 else word
        word = f'"{word}' if 0.1 < draw < 0.15 else word
        word = f'{word}":' if 0.15 < draw < 0.18 else word
        tokens.setdefault(word.encode(), len(tokens))
    return Vocabulary(
        (*tokens, b"<end>"),
        frozenset({size - 1}),
        frozenset({size - 1}),
        lambda text: [*text.encode()],
    )


def tools(count: int, salt: str = "") -> list[dict[str, object]]:
    """Return `count` definitions of tools with four parameters. `salt` makes their names unique."""
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}{salt}",
                "strict": True,
                "parameters": {
                    "type": "object",
                    "properties": {
                        "place": {"type": "string"},
                        "days": {"type": "integer"},
                        "unit": {"enum": ["metric", "imperial"]},
                        "near": {"type": "array", "items": {"type": "string"}},
                    },
                    "required": ["place"],
                    "additionalProperties": False,
                },
            },
        }
        for number in range(count)
    ]


def tool_tag(count: int, salt: str = "") -> str:
    """Return the structural tag that forces a call of one of `count` tools, as JSON."""
    tag = get_format("hermes").structural_tag(tools(count, salt), "required")
    return json.dumps(tag)


def milliseconds(work: Callable[[], object], times: int = 1) -> float:
    """Return the median milliseconds of `times` calls."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        found.append(1e3 * (time.perf_counter() - started))
    return statistics.median(found)


def backends(vocabulary: Vocabulary) -> dict[str, GrammarBackend]:
    """Return a backend of each grammar library for one vocabulary, by the library's name."""
    from nereid_backend.grammar.llguidance_backend import LLGuidanceBackend
    from nereid_backend.grammar.xgrammar_backend import XGrammarBackend

    eos = (vocabulary.size - 1,)
    return {
        "xgrammar": XGrammarBackend(vocabulary, eos, 2),
        "llguidance": LLGuidanceBackend(vocabulary, eos),
    }


def cases() -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    """Yield the name of each grammar, and the arguments of `compile` for each library.

    xgrammar gets a structural tag for every grammar except EBNF.
    """

    def both(kind: str, source: str, node: dict[str, object]) -> dict[str, tuple[str, str]]:
        tag = json.dumps({"type": "structural_tag", "format": node})
        return {"xgrammar": ("structural_tag", tag), "llguidance": (kind, source)}

    for name, schema in (
        ("schema", SCHEMA),
        ("schema, maxLength 500", {"type": "string", "maxLength": 500}),
    ):
        node = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
        yield name, both("json_schema", json.dumps(schema), node)
    for pattern in (r"[a-z]+@[a-z]+\.com", ".{0,20}", ".{0,100}"):
        yield f"regex {pattern}", both("regex", pattern, {"type": "regex", "pattern": pattern})
    choices = [f"{letter}{number}" for letter in string.ascii_letters for number in range(4)]
    parts = [{"type": "const_string", "value": one} for one in choices]
    yield "choice of 208", both("choice", json.dumps(choices), {"type": "or", "elements": parts})
    yield "EBNF", {"xgrammar": ("ebnf", EBNF), "llguidance": ("ebnf", EBNF)}
    for count in (2, 16, 64):
        yield f"{count} tools", {"xgrammar": ("structural_tag", tool_tag(count))}


def bench_compile(vocabulary: Vocabulary) -> None:
    """Compile each case with both libraries, measure the masks, and print one row for each case."""
    rng = random.Random(1)
    for backend, compiler in backends(vocabulary).items():
        for name, given in cases():
            if backend not in given:
                continue
            compiled: list[Compiled] = []
            took = milliseconds(lambda: compiled.append(compiler.compile(*given[backend])))  # noqa: B023
            fills = walk(compiled[0], vocabulary, rng)
            full = milliseconds(lambda: fill_batch(compiled[0], vocabulary.size), 3)  # noqa: B023
            print(
                f"| {vocabulary.size} | {backend} | {name} | {took:.2f} | "
                f"{statistics.median(fills):.3f} | {max(fills):.2f} | {full:.2f} |"
            )


def walk(compiled: Compiled, vocabulary: Vocabulary, rng: random.Random) -> list[float]:
    """Accept up to 60 allowed random tokens. Return the milliseconds of each token's mask."""
    matcher = compiled.matcher()
    row = np.zeros(-(-vocabulary.size // 32), np.int32)
    found = []
    for _ in range(60):
        started = time.perf_counter()
        matcher.fill(row)
        found.append(1e3 * (time.perf_counter() - started))
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: vocabulary.size - 1]
        legal = np.flatnonzero(bits)
        if not len(legal) or not matcher.accept(int(rng.choice(legal))):
            break
    return found


def fill_batch(compiled: Compiled, vocab_size: int) -> None:
    """Fill the masks of a batch of BATCH sequences, one after another."""
    rows = np.zeros((BATCH, -(-vocab_size // 32)), np.int32)
    for row, matcher in zip(rows, [compiled.matcher() for _ in rows], strict=True):
        matcher.fill(row)


# ---- the engine ----------------------------------------------------------------------------------


def bench_engine(model: str) -> None:
    """Print the engine's tokens per second with and without a schema, and the TTFT."""
    from nereid_backend import Engine, EngineConfig

    config = EngineConfig(model, num_threads=1, max_model_len=1024, num_speculative_tokens=0)
    engine = Engine(config)
    prompt = list(range(10, 42))
    free = SamplingParams(temperature=1.0, seed=1, max_tokens=64, ignore_eos=True)
    # The array cannot end before max_tokens, so both runs generate the same number of tokens.
    schema = {"type": "array", "items": SCHEMA, "minItems": 100}
    constrained = SamplingParams(
        temperature=1.0, seed=1, max_tokens=64, grammar=schema_spec(schema, is_strict=True)
    )
    for params in (constrained, free):
        run(engine, prompt, params, 16)
    # The clock is the CPU time of all threads, because other work on the machine affects it little.
    # Runs with and without the schema alternate, and each pair of runs gives one ratio.
    plain, limited = [], []
    for _ in range(25):
        plain.append(run(engine, prompt, free, 16))
        limited.append(run(engine, prompt, constrained, 16))
    ratios = [ours / other for ours, other in zip(limited, plain, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"Batch of 16: the engine generates {statistics.median(plain):.0f} tokens per second of "
        f"CPU time without a schema and {statistics.median(limited):.0f} with a schema for each "
        f"request. The ratio is {middle:.2f} in the median of 25 pairs of runs (quartiles "
        f"{low:.2f} and {high:.2f}, minimum {min(ratios):.2f}, maximum {max(ratios):.2f}). The "
        "target is 0.9."
    )
    bench_first_token(engine, prompt)
    engine.close()


def run(engine, prompt, params, count):  # noqa: ANN001, ANN201 - Engine is imported late
    """Run a batch of `count` requests, and return the tokens per second of CPU time."""
    for number in range(count):
        engine.add_request(f"r{number}", prompt, params)
    started, tokens, left = time.process_time(), 0, count
    while left:
        for update in engine.step():
            tokens += len(update.new_token_ids)
            left -= update.finish_reason is not None
    return tokens / (time.process_time() - started)


def bench_first_token(engine, prompt) -> None:  # noqa: ANN001 - as above
    """Print how much a new and a cached grammar of 16 tools delay the first token."""

    def first(params: SamplingParams) -> float:
        engine.add_request("one", prompt, params)
        started = time.perf_counter()
        while not any(one.new_token_ids or one.finish_reason for one in engine.step()):
            pass
        took = 1e3 * (time.perf_counter() - started)
        engine.abort("one")
        engine.step()
        return took

    free = statistics.median(first(SamplingParams(max_tokens=8, ignore_eos=True)) for _ in range(9))
    cold, warm = [], []
    for number in range(5):
        params = SamplingParams(
            max_tokens=8, grammar=GrammarSpec("structural_tag", tool_tag(16, f"_{number}"))
        )
        cold.append(first(params) - free)
        warm += [first(params) - free for _ in range(3)]
    print(
        f"First token: it takes {free:.1f} ms without a grammar. A new grammar of 16 tools adds "
        f"{statistics.median(cold):.1f} ms (target: 100). A cached grammar adds "
        f"{statistics.median(warm):.2f} ms (target: 5)."
    )


def main() -> None:
    """Run the parts that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model = Path(__file__).parents[2] / "demo" / "chat"
    parser.add_argument("--model", default=str(model), help="folder of the checkpoint")
    parser.add_argument(
        "--parts",
        default="compile,engine",
        help="parts to run, separated by commas: compile, engine (default: %(default)s)",
    )
    args = parser.parse_args()
    if "compile" in args.parts:
        width = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
        print(
            "| vocabulary | library | grammar | compile ms | median mask ms | longest mask ms "
            f"| {BATCH} masks ms |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for vocabulary in (load_vocabulary(args.model, width), made_up(LARGE)):
            bench_compile(vocabulary)
    if "engine" in args.parts:
        bench_engine(args.model)


if __name__ == "__main__":
    main()
