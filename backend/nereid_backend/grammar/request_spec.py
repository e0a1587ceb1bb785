# SPDX-License-Identifier: Apache-2.0
"""Grammars as text, from what a request says. Imports neither torch nor a grammar library."""

import json

from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.errors import RequestError

_OPTIONS = "x-guidance"  # where a schema may carry llguidance's options


def schema_spec(schema: object, *, is_strict: bool, after: str = "") -> GrammarSpec:
    """The grammar of a JSON schema.

    Args:
        schema: the schema, as JSON values.
        is_strict: whether a keyword that cannot be enforced is an error; else it is passed over.
        after: see GrammarSpec.

    Raises:
        RequestError: the schema is neither an object nor a boolean.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise RequestError(f"json_schema: must be an object, got {type(schema).__name__}")
    plain = {word: value for word, value in schema.items() if word != _OPTIONS}
    if not is_strict:
        plain[_OPTIONS] = {"lenient": True, "coerce_one_of": True}
    return GrammarSpec("json_schema", json.dumps(plain, ensure_ascii=False), after)


def grammar_spec(source: str, *, after: str = "") -> GrammarSpec:
    """The grammar of an EBNF (GBNF, `root ::= ...`) or Lark (`start: ...`) text."""
    return GrammarSpec("ebnf", source, after)
