# SPDX-License-Identifier: Apache-2.0
"""Converts the JSON schema or the grammar text of a request into a GrammarSpec.

This module imports neither torch nor a grammar library.
"""

import json
from collections.abc import Mapping

from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.errors import RequestError

# llguidance reads its own options from this key of a schema, so requests may not set the key.
_OPTIONS = "x-guidance"


def schema_spec(schema: object, *, is_strict: bool, after: str = "") -> GrammarSpec:
    """Return the grammar specification for a JSON schema.

    The schema True (every value is valid) is converted to the equivalent object `{}`.

    Args:
        schema: the schema as a JSON value. It must not be False (no value is valid).
        is_strict: whether a keyword that cannot be enforced is an error. If False, such a keyword
            is ignored.
        after: the text after which the grammar applies; see GrammarSpec.

    Raises:
        RequestError: if the schema is neither an object nor True.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError(
            f"json_schema: the schema must be a JSON object, but it is {type(schema).__name__}."
        )
    # llguidance reads its options from a key of the schema. A request must not set these options,
    # so the key is removed.
    source = {keyword: value for keyword, value in schema.items() if keyword != _OPTIONS}
    if not is_strict:
        # "lenient" ignores unsupported keywords, and "coerce_one_of" treats oneOf as anyOf.
        source[_OPTIONS] = {"lenient": True, "coerce_one_of": True}
    return GrammarSpec("json_schema", json.dumps(source, ensure_ascii=False), after)


def is_lenient(schema: Mapping[str, object]) -> bool:
    """Return whether a schema was converted with is_strict=False; see `schema_spec`.

    Args:
        schema: the source of the specification that `schema_spec` returned, as a JSON object.
    """
    return _OPTIONS in schema


def grammar_spec(source: str, *, after: str = "") -> GrammarSpec:
    """Return the grammar specification for a text in the EBNF or the Lark format.

    EBNF texts contain rules such as `root ::= ...`. Lark texts contain rules such as `start: ...`.

    Args:
        source: the text of the grammar.
        after: the text after which the grammar applies; see GrammarSpec.
    """
    return GrammarSpec("ebnf", source, after)
