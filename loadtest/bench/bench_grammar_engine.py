"""The part of `bench_grammars` that measures the engine with and without grammars."""

import json
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from nereid_backend import Engine, EngineConfig, SamplingParams
from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.grammar.request_spec import schema_spec
from nereid_parsers import get_format

_BATCH_SIZE = 16
_NUM_PAIRS = 25
_PROMPT = list(range(10, 42))
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


def tools(count: int, name_suffix: str = "") -> list[dict[str, object]]:
    """Return `count` definitions of tools with four parameters.

    Example: with the suffix "_3", the names are "tool_0_3", "tool_1_3" and so on.
    """
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}{name_suffix}",
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


def tool_tag(count: int, name_suffix: str = "") -> str:
    """Return a structural tag as JSON. The tag forces a call of one of `count` tools."""
    tag = get_format("hermes").structural_tag(tools(count, name_suffix), "required")
    return json.dumps(tag)


def bench_engine(model: str) -> None:
    """Print the engine's speed and its time to the first token with and without grammars."""
    config = EngineConfig(model, num_threads=1, max_model_len=1024, num_speculative_tokens=0)
    engine = Engine(config)
    print_throughput(measure_rates(engine))
    print_first_token(engine)
    engine.close()


class Rates(NamedTuple):
    """The tokens per second of CPU time with and without a schema, in two successive runs."""

    with_schema: float
    without_schema: float


def measure_rates(engine: Engine) -> list[Rates]:
    """Measure pairs of runs: the first run of a pair has a schema, and the second has none."""
    # The array cannot end before max_tokens, so both runs generate the same number of tokens.
    spec = schema_spec({"type": "array", "items": SCHEMA, "minItems": 100}, is_strict=True)
    constrained = SamplingParams(temperature=1.0, seed=1, max_tokens=64, grammar=spec)
    free = SamplingParams(temperature=1.0, seed=1, max_tokens=64, ignore_eos=True)
    rates = [
        Rates(batch_rate(engine, constrained), batch_rate(engine, free))
        for _ in range(1 + _NUM_PAIRS)
    ]
    return rates[1:]  # The first pair is ignored, because it loads code and compiles the grammar.


def print_throughput(rates: Sequence[Rates]) -> None:
    """Print the median speeds, and the distribution of the ratios of all pairs."""
    with_schema, without_schema = map(statistics.median, zip(*rates, strict=True))
    ratios = [pair.with_schema / pair.without_schema for pair in rates]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"Batch of {_BATCH_SIZE}: the engine generates {without_schema:.0f} tokens per second of "
        f"CPU time without a schema and {with_schema:.0f} with a schema for each request. The "
        f"ratio is {middle:.2f} in the median of {len(rates)} pairs of runs (quartiles {low:.2f} "
        f"and {high:.2f}, minimum {min(ratios):.2f}, maximum {max(ratios):.2f}). The target is 0.9."
    )


def batch_rate(engine: Engine, params: SamplingParams) -> float:
    """Answer a batch of requests, and return the tokens per second of CPU time.

    The CPU time is the sum over all threads. Other work on the machine affects CPU time little.
    """
    for number in range(_BATCH_SIZE):
        engine.add_request(str(number), _PROMPT, params)
    started, num_tokens = time.process_time(), 0
    while engine.has_work():
        num_tokens += sum(len(update.new_token_ids) for update in engine.step())
    return num_tokens / (time.process_time() - started)


def print_first_token(engine: Engine) -> None:
    """Print how much a new and a cached grammar of 16 tools delay the first token."""
    free = SamplingParams(max_tokens=8, ignore_eos=True)
    free_ms = statistics.median(first_token_ms(engine, free) for _ in range(9))
    new, cached = [], []
    for number in range(5):
        spec = GrammarSpec("structural_tag", tool_tag(16, name_suffix=f"_{number}"))
        params = SamplingParams(max_tokens=8, grammar=spec)
        new.append(first_token_ms(engine, params) - free_ms)
        cached += [first_token_ms(engine, params) - free_ms for _ in range(3)]
    print(
        f"First token: it takes {free_ms:.1f} ms without a grammar. A new grammar of 16 tools adds "
        f"{statistics.median(new):.1f} ms (target: 100). A cached grammar adds "
        f"{statistics.median(cached):.2f} ms (target: 5)."
    )


def first_token_ms(engine: Engine, params: SamplingParams) -> float:
    """Add a request, return the milliseconds to its first token, and abort the request."""
    engine.add_request("one", _PROMPT, params)
    started = time.perf_counter()
    while not any(update.new_token_ids or update.finish_reason for update in engine.step()):
        pass
    spent_s = time.perf_counter() - started
    engine.abort("one")
    engine.step()
    return spent_s * 1e3
