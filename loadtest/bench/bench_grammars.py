"""Measure the cost of grammars: the time to compile and to fill masks, and the engine's speed.

    python -m loadtest.bench.bench_grammars [--model demo/chat] [--parts compile engine]

The grammar libraries are measured on the model's own vocabulary and on a random vocabulary of
151,646 tokens. The engine runs in this process.
"""

import json
import math
import random
import statistics
import string
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from nereid_backend.grammar.backend_interface import Compiled, GrammarBackend
from nereid_backend.grammar.llguidance_backend import LLGuidanceBackend
from nereid_backend.grammar.vocabulary import Vocabulary, load_vocabulary
from nereid_backend.grammar.xgrammar_backend import XGrammarBackend

from loadtest.bench.bench_grammar_engine import SCHEMA, bench_engine, tool_tag
from loadtest.bench.markdown_table import print_table
from loadtest.bench.timing import call_times, seconds_of
from loadtest.command_line import Option, parse_command_line

DEMO = Path(__file__).parents[2] / "demo" / "chat"
# The number of tokens in the random vocabulary.
LARGE = 151_646
BATCH_SIZE = 64
_NUM_WALKED_TOKENS = 60
_PARTS = ["compile", "engine"]

_OPTIONS = {
    "--model": Option(str(DEMO), "folder of the checkpoint"),
    "--parts": Option(_PARTS, "parts to run", _PARTS),
}

EBNF = 'root ::= "[" item ("," item)* "]"\nitem ::= [a-z]+ ":" [0-9]+\n'


def random_vocabulary(size: int) -> Vocabulary:
    """Return a vocabulary of `size` tokens: all single bytes, random words, and an end token.

    The words are the same in every run.
    """
    rng = random.Random(0)
    tokens = {bytes([byte]): byte for byte in range(256)}
    while len(tokens) < size - 1:
        tokens.setdefault(random_word(rng).encode(), len(tokens))
    end = frozenset({size - 1})
    return Vocabulary((*tokens, b"<end>"), end, end, lambda text: [*text.encode()])


def random_word(rng: random.Random) -> str:
    """Return a random word in one of the forms that the tokens of a real vocabulary have.

    Half of the words begin with a space, and some words have a capital letter or the punctuation of
    JSON. Examples: ` tei`, `Noa`, `"ret`, `dae":`.
    """
    word = "".join(rng.choices("etaoinshrdlucmfwypvbgkjqxz", k=rng.randint(2, 8)))
    form = rng.random()
    if form < 0.1:
        return word.title()
    if form < 0.15:
        return f'"{word}'
    if form < 0.18:
        return f'{word}":'
    if form < 0.5:
        return word
    return f" {word}"


def backends(vocabulary: Vocabulary) -> dict[str, GrammarBackend]:
    """Return a backend of each grammar library for one vocabulary, by the library's name."""
    eos_token_ids = (vocabulary.size - 1,)
    return {
        "xgrammar": XGrammarBackend(vocabulary, eos_token_ids, num_threads=2),
        "llguidance": LLGuidanceBackend(vocabulary, eos_token_ids),
    }


class Case(NamedTuple):
    """A grammar that is measured with one grammar library."""

    name: str  # the label in the table
    library: str
    kind: str  # such as "json_schema"
    source: str


def cases() -> Iterator[Case]:
    """Yield each grammar with each library that Nereid could use for its kind."""
    schemas = {
        "schema": SCHEMA,
        "schema, maxLength 500": {"type": "string", "maxLength": 500},
    }
    for name, schema in schemas.items():
        node = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
        yield from both_libraries(name, "json_schema", json.dumps(schema), node)
    for pattern in (r"[a-z]+@[a-z]+\.com", ".{0,20}", ".{0,100}"):
        node = {"type": "regex", "pattern": pattern}
        yield from both_libraries(f"regex {pattern}", "regex", pattern, node)
    choices = [f"{letter}{number}" for letter in string.ascii_letters for number in range(4)]
    elements = [{"type": "const_string", "value": choice} for choice in choices]
    node = {"type": "or", "elements": elements}
    yield from both_libraries("choice of 208", "choice", json.dumps(choices), node)
    for library in ("xgrammar", "llguidance"):
        yield Case("EBNF", library, "ebnf", EBNF)
    for count in (2, 16, 64):
        yield Case(f"{count} tools", "xgrammar", "structural_tag", tool_tag(count))


def both_libraries(
    name: str, kind: str, source: str, node: Mapping[str, object]
) -> tuple[Case, Case]:
    """Return a case with xgrammar and a case with llguidance for the same grammar.

    xgrammar gets the grammar as the node `node` of a structural tag, and llguidance gets `source`.
    """
    tag = json.dumps({"type": "structural_tag", "format": node})
    return (
        Case(name, "xgrammar", "structural_tag", tag),
        Case(name, "llguidance", kind, source),
    )


def compile_rows(vocabularies: Iterable[Vocabulary]) -> Iterator[list[str]]:
    """Yield a row of the table for each vocabulary and each case."""
    for vocabulary in vocabularies:
        rng = random.Random(1)
        for library, backend in backends(vocabulary).items():
            for case in [case for case in cases() if case.library == library]:
                yield compile_row(case, backend, vocabulary, rng)


def compile_row(
    case: Case, backend: GrammarBackend, vocabulary: Vocabulary, rng: random.Random
) -> list[str]:
    """Compile a grammar, measure its masks, and return its row of the table."""
    started = time.perf_counter()
    compiled = backend.compile(case.kind, case.source)
    compile_s = time.perf_counter() - started
    mask_times = list(walk(compiled, vocabulary, rng))
    batch_times = call_times(lambda: fill_batch(compiled, vocabulary.size), num_calls=3)
    return [
        str(vocabulary.size),
        case.library,
        case.name,
        f"{compile_s * 1e3:.2f}",
        f"{statistics.median(mask_times) * 1e3:.3f}",
        f"{max(mask_times) * 1e3:.2f}",
        f"{statistics.median(batch_times) * 1e3:.2f}",
    ]


def walk(compiled: Compiled, vocabulary: Vocabulary, rng: random.Random) -> Iterator[float]:
    """Accept up to 60 random tokens that the grammar allows.

    Before each token, yield the time in seconds that filling the mask takes.
    """
    matcher = compiled.matcher()
    mask = empty_masks(1, vocabulary.size)[0]
    for _ in range(_NUM_WALKED_TOKENS):
        yield seconds_of(lambda: matcher.fill(mask))
        # The last token of the vocabulary is the end token.
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: vocabulary.size - 1]
        allowed = np.flatnonzero(bits)
        if not len(allowed) or not matcher.accept(int(rng.choice(allowed))):
            break


def fill_batch(compiled: Compiled, vocab_size: int) -> None:
    """Start BATCH_SIZE sequences, and fill one mask for each of them, one after another."""
    masks = empty_masks(BATCH_SIZE, vocab_size)
    matchers = [compiled.matcher() for _ in masks]
    for mask, matcher in zip(masks, matchers, strict=True):
        matcher.fill(mask)


def empty_masks(count: int, vocab_size: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """Return masks for `count` sequences, [count, words], with one bit for each token."""
    return np.zeros((count, math.ceil(vocab_size / 32)), np.int32)


def main() -> None:
    """Run the parts that the command line selects."""
    args = parse_command_line(__doc__, _OPTIONS)
    if "compile" in args.parts:
        vocab_size = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
        vocabularies = (load_vocabulary(args.model, vocab_size), random_vocabulary(LARGE))
        head = ["vocabulary", "library", "grammar", "compile ms", "median mask ms"]
        head += ["longest mask ms", f"{BATCH_SIZE} masks ms"]
        print_table(head, compile_rows(vocabularies))
    if "engine" in args.parts:
        bench_engine(args.model)


if __name__ == "__main__":
    main()
