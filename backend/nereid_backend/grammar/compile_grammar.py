# SPDX-License-Identifier: Apache-2.0
"""Compiles a grammar with llguidance or xgrammar, depending on the kind of the grammar.

llguidance compiles JSON schemas, regular expressions, choices and Lark grammars. xgrammar compiles
structural tags and EBNF grammars. docs/history/sampling-and-constraints.md gives the measurements
that are the reason for this division.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.errors import RequestError
from nereid_backend.grammar.backend_interface import Compiled, GrammarBackend
from nereid_backend.grammar.compile_cost import check_cost, compile_time_s
from nereid_backend.grammar.schema_parts import parse_json
from nereid_backend.grammar.vocabulary import Vocabulary

# An object in a structural tag can have these fields in addition to the field "json_schema". The
# fields change the form of the JSON text that the tag allows. Only xgrammar supports these fields.
_XGRAMMAR_OPTIONS = frozenset({"style", "excludes", "any_order"})


@dataclass(frozen=True)
class Libraries:
    """The vocabulary of the model, and one backend for each grammar library."""

    vocabulary: Vocabulary
    llguidance: GrammarBackend
    xgrammar: GrammarBackend


def load_libraries(
    vocabulary: Vocabulary, eos_token_ids: tuple[int, ...], num_threads: int
) -> Libraries:
    """Import the two grammar libraries and create a backend for each.

    Args:
        vocabulary: the tokens of the model.
        eos_token_ids: the checkpoint's stop tokens.
        num_threads: the largest number of threads that one compilation with xgrammar starts.

    Raises:
        RequestError: if the checkpoint has no stop token.
    """
    if not eos_token_ids:
        raise RequestError(
            "grammar: grammars and thinking budgets cannot be used with this checkpoint, because "
            "it has no end-of-sequence token. Set eos_token_id in its generation_config.json."
        )
    # The modules are imported only here, because the libraries take seconds to load and most
    # servers never use them.
    from nereid_backend.grammar.llguidance_backend import LLGuidanceBackend
    from nereid_backend.grammar.xgrammar_backend import XGrammarBackend

    return Libraries(
        vocabulary,
        LLGuidanceBackend(vocabulary, eos_token_ids),
        XGrammarBackend(vocabulary, eos_token_ids, num_threads),
    )


def compile_grammar(libraries: Libraries, spec: GrammarSpec, limit_s: float) -> Compiled:
    """Compile a grammar with llguidance or xgrammar, depending on the kind of the grammar.

    Args:
        libraries: the vocabulary and the grammar libraries.
        spec: the grammar.
        limit_s: the largest accepted estimate of xgrammar's compile time, in seconds.

    Raises:
        RequestError: if the grammar is not valid, takes too long to compile, or contains keywords
            that cannot be enforced.
    """
    match spec.kind:
        case "structural_tag":
            return _compile_tag(libraries, spec.source, limit_s)
        case "ebnf":
            return _compile_ebnf(libraries, spec.source, limit_s)
        case "json_schema" | "choice":
            # Raise a RequestError if the text is not JSON. The parsed value is not needed, because
            # llguidance parses the text itself.
            parse_json(spec.kind, spec.source)
            return libraries.llguidance.compile(spec.kind, spec.source)
        case _:  # "regex"
            return libraries.llguidance.compile(spec.kind, spec.source)


def _compile_tag(libraries: Libraries, source: str, limit_s: float) -> Compiled:
    """Compile a structural tag with xgrammar, or with llguidance if the tag is simple.

    A structural tag is a JSON value that describes an answer with schemas, patterns and text. A
    tag is simple if it contains nothing but one schema or one regular expression, which llguidance
    compiles much faster.

    Args:
        libraries: the grammar libraries and the vocabulary.
        source: the structural tag, as a JSON text.
        limit_s: the largest accepted estimate of xgrammar's compile time, in seconds.

    Raises:
        RequestError: if the tag is refused or not supported.
    """
    simple = _simple_grammar(parse_json("structural_tag", source))
    if simple is not None:
        simple_kind, simple_source = simple
        try:
            return libraries.llguidance.compile(simple_kind, simple_source)
        except RequestError:
            # xgrammar can accept the tag, because it ignores some keywords that llguidance rejects.
            pass
    check_cost("structural_tag", source, libraries.vocabulary.size, limit_s)
    return libraries.xgrammar.compile("structural_tag", source)


def _compile_ebnf(libraries: Libraries, source: str, limit_s: float) -> Compiled:
    """Compile an EBNF grammar with xgrammar, or with llguidance if xgrammar would be too slow.

    A grammar without "::=" is a Lark grammar, which only llguidance can compile.

    Args:
        libraries: the grammar libraries and the vocabulary.
        source: the text of the grammar.
        limit_s: the largest accepted estimate of xgrammar's compile time, in seconds.

    Raises:
        RequestError: if the grammar is invalid or not supported.
    """
    is_lark = "::=" not in source
    if is_lark or compile_time_s("ebnf", source, libraries.vocabulary.size) > limit_s:
        return libraries.llguidance.compile("ebnf", source)
    return libraries.xgrammar.compile("ebnf", source)


def _simple_grammar(tag: object) -> tuple[str, str] | None:
    """If a structural tag is just one grammar, return the kind and the text of this grammar.

    Return None if the tag contains anything else, such as text around the grammar, or an option
    that only xgrammar supports (`_XGRAMMAR_OPTIONS`). Example: the tag
    `{"format": {"type": "regex", "pattern": "a+"}}` gives `("regex", "a+")`.
    """
    node = tag.get("format") if isinstance(tag, Mapping) else None
    if not isinstance(node, Mapping):
        return None
    if node.get("type") == "json_schema" and _XGRAMMAR_OPTIONS.isdisjoint(node):
        return "json_schema", json.dumps(node.get("json_schema"))
    if node.get("type") == "regex" and isinstance(node.get("pattern"), str):
        return "regex", node["pattern"]
    return None


def special_ids_in(vocabulary: Vocabulary, spec: GrammarSpec) -> frozenset[int]:
    """Return the ids of the special tokens that the text of a grammar contains.

    All other special tokens are forbidden in the answer. Only structural tags can contain special
    tokens. Example: a tag that begins with "<tool_call>" contains the special token <tool_call>.
    """
    if spec.kind != "structural_tag":
        return frozenset()
    # The separator prevents the text of a special token from being found across two texts. Example:
    # the texts "<tool" and "_call>" do not contain the special token <tool_call>.
    tag_text = "\0".join(_texts(json.loads(spec.source)))
    return frozenset(
        token_id
        for token_id in vocabulary.special_ids
        if (text := vocabulary.tokens[token_id].decode()) and text in tag_text
    )


def _texts(node: object) -> Iterator[str]:
    """Yield all strings of a structural tag, except the strings inside JSON schemas."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, list):
        for part in node:
            yield from _texts(part)
    elif isinstance(node, Mapping):
        for key, part in node.items():
            if key not in ("json_schema", "excludes", "type"):
                yield from _texts(part)
