# SPDX-License-Identifier: Apache-2.0
"""Finds the part of a structural tag that xgrammar refuses.

xgrammar reports an error of a schema or a pattern, but not its position. The structural
tag of a request with tools contains a schema for each tool, so a client could not find the tool.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nereid_backend.grammar.schema_parts import path_of_problem

# The largest number of nodes of a structural tag that are compiled to locate an error.
_MAX_NODES = 2000
# The text before a part is shortened to at most twice this number of characters.
_MAX_SIDE = 100
# In an error message, this character represents text that is not constant, or that is omitted.
_OTHER_TEXT = "…"

_Node = Mapping[str, Any]


def place_of_problem(source: str, has_problem: Callable[[str], bool]) -> str:
    """Return the place of the part that xgrammar refuses, or "" if the place is not found.

    The place consists of the constant text before the part, and of the path in a schema. Example:
    `after the text '{"name": "f", "arguments": ', in the schema at $.properties.city`.

    Args:
        source: the structural tag, as a JSON text.
        has_problem: compiles a structural tag, and returns whether xgrammar refuses this tag with
            the same error.
    """
    num_nodes = 0

    def is_refused(node: _Node) -> bool:
        nonlocal num_nodes
        num_nodes += 1
        return num_nodes <= _MAX_NODES and has_problem(
            json.dumps({"type": "structural_tag", "format": node})
        )

    node: _Node = json.loads(source)["format"]
    text_before = ""
    while found := next((pair for pair in _inner_nodes(node) if is_refused(pair[1])), None):
        text, node = found
        text_before = (text_before + text).lstrip(_OTHER_TEXT)
    places = [f"after the text {_shortened(text_before)!r}"] if text_before else []
    if node.get("type") == "json_schema":
        path = path_of_problem(
            node["json_schema"], lambda part: is_refused({**node, "json_schema": part})
        )
        places.append(f"in the schema at {path}")
    return ", ".join(places)


def _inner_nodes(node: _Node) -> Iterator[tuple[str, _Node]]:
    """Yield each node directly inside a node, and the constant text before this inner node.

    Example: the sequence of the texts `<f>` and `(` and a schema yields the schema with the text
    `<f>(`. In the result, the text `…` represents a node whose text is not constant.
    """
    text = node["begin"] if isinstance(node.get("begin"), str) else ""
    if isinstance(node.get("content"), dict):
        yield text, node["content"]
    for tag in node.get("tags", []):
        yield "", tag
    for element in node.get("elements", []):
        yield text, element
        if node.get("type") == "sequence":
            is_constant = element.get("type") == "const_string"
            text += element["value"] if is_constant else _OTHER_TEXT


def _shortened(text: str) -> str:
    """Return `text`, or its start and its end with `…` between them if `text` is long."""
    return (
        text
        if len(text) <= 2 * _MAX_SIDE
        else f"{text[:_MAX_SIDE]}{_OTHER_TEXT}{text[-_MAX_SIDE:]}"
    )
