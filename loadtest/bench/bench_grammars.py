# SPDX-License-Identifier: Apache-2.0
"""What constraints cost: compiling, filling masks, and tokens per second in the engine.

    python -m loadtest.bench.bench_grammars [--model demo/chat] [--parts compile,masks,engine]

The grammar libraries are measured on the model's own vocabulary and on a made-up one of 151,646
tokens. The engine runs in this process.
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
    """All bytes and random words; seeded."""
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
    """Tools with four arguments each."""
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
    """The structural tag that forces a call of one of so many tools."""
    tag = get_format("hermes").structural_tag(tools(count, salt), "required")
    return json.dumps(tag)


def milliseconds(work: Callable[[], object], times: int = 1) -> float:
    """Median time of some runs."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        found.append(1e3 * (time.perf_counter() - started))
    return statistics.median(found)


def backends(vocabulary: Vocabulary) -> dict[str, GrammarBackend]:
    """Both libraries over one vocabulary."""
    from nereid_backend.grammar.llguidance_backend import LLGuidanceBackend
    from nereid_backend.grammar.xgrammar_backend import XGrammarBackend

    eos = (vocabulary.size - 1,)
    return {
        "xgrammar": XGrammarBackend(vocabulary, eos, 2),
        "llguidance": LLGuidanceBackend(vocabulary, eos),
    }


def cases() -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    """(name, what each library is given: a structural tag where it has no other door)."""

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
    """Compile each case with both libraries, and fill masks along a walk."""
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
    """Times in ms to fill the masks of a random legal walk."""
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
    """Fill the masks of a batch, one after another, as one thread would."""
    rows = np.zeros((BATCH, -(-vocab_size // 32)), np.int32)
    for row, matcher in zip(rows, [compiled.matcher() for _ in rows], strict=True):
        matcher.fill(row)


# ---- the engine ----------------------------------------------------------------------------------


def bench_engine(model: str) -> None:
    """Tokens per second with and without a schema, and what a tool grammar adds to the first."""
    from nereid_backend import Engine, EngineConfig

    engine = Engine(EngineConfig(model=model, num_threads=1, max_model_len=1024))
    prompt = list(range(10, 42))
    free = SamplingParams(temperature=1.0, seed=1, max_tokens=64, ignore_eos=True)
    # An array that cannot end early: both runs generate as many tokens.
    asked = {"type": "array", "items": SCHEMA, "minItems": 100}
    held = SamplingParams(
        temperature=1.0, seed=1, max_tokens=64, grammar=schema_spec(asked, is_strict=True)
    )
    for params in (held, free):
        run(engine, prompt, params, 16)
    # CPU time, of all threads: what else runs on the machine counts little there. The two alternate
    # and are compared pair by pair.
    plain, limited = [], []
    for _ in range(25):
        plain.append(run(engine, prompt, free, 16))
        limited.append(run(engine, prompt, held, 16))
    ratios = [ours / other for ours, other in zip(limited, plain, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"batch 16: {statistics.median(plain):.0f} tokens a second of CPU time without, "
        f"{statistics.median(limited):.0f} with a schema on each: {middle:.2f} of it in the median "
        f"of 25 pairs (half of them {low:.2f} to {high:.2f}, all {min(ratios):.2f} to "
        f"{max(ratios):.2f}; target 0.9)"
    )
    bench_first_token(engine, prompt)
    engine.close()


def run(engine, prompt, params, count):  # noqa: ANN001, ANN201 - Engine is imported late
    """Tokens of a batch of requests per second of CPU time."""
    for number in range(count):
        engine.add_request(f"r{number}", prompt, params)
    started, tokens, left = time.process_time(), 0, count
    while left:
        for update in engine.step():
            tokens += len(update.new_token_ids)
            left -= update.finish_reason is not None
    return tokens / (time.process_time() - started)


def bench_first_token(engine, prompt) -> None:  # noqa: ANN001 - as above
    """What a grammar of 16 tools adds to the time to the first token, cold and warm."""

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
        f"first token of 16 tools: {free:.1f} ms unconstrained; cold adds "
        f"{statistics.median(cold):.1f} ms (target 100), warm {statistics.median(warm):.2f} ms "
        "(target 5)"
    )


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model = Path(__file__).parents[2] / "demo" / "chat"
    parser.add_argument("--model", default=str(model), help="folder of the checkpoint")
    parser.add_argument("--parts", default="compile,engine", help="compile, engine")
    asked = parser.parse_args()
    if "compile" in asked.parts:
        width = json.loads((Path(asked.model) / "config.json").read_text())["vocab_size"]
        print(
            f"| vocabulary | library | grammar | compile ms | mask ms | most | {BATCH} masks ms |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for vocabulary in (load_vocabulary(asked.model, width), made_up(LARGE)):
            bench_compile(vocabulary)
    if "engine" in asked.parts:
        bench_engine(asked.model)


if __name__ == "__main__":
    main()
