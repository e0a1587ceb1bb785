"""What a request says of its answer's text, as a node of a structural tag."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from nereid_parsers.constrain_calls import Node, const, json_schema, one_of
from nereid_parsers.constrain_schema import unenforced
from nereid_parsers.errors import ConstraintError

log = logging.getLogger(__name__)

# xgrammar 0.2.8's formats, and under which keys each holds others.
_FORMATS: dict[str, tuple[str, ...]] = {
    "const_string": (), "json_schema": (), "any_text": (), "token": (), "exclude_token": (),
    "any_tokens": (), "grammar": (), "regex": (), "qwen_xml_parameter": (),
    "sequence": ("elements",), "or": ("elements",), "tag": ("content",),
    "triggered_tags": ("tags",), "token_triggered_tags": ("tags",),
    "tags_with_separator": ("tags",), "optional": ("content",), "plus": ("content",),
    "star": ("content",), "repeat": ("content",), "dispatch": ("rules",),
    "token_dispatch": ("rules",),
}  # fmt: skip


def answer_node(response_format: Mapping[str, Any] | None) -> Node | None:
    """The node that content must match; None where it is free.

    Besides OpenAI's types: structural_tag (xgrammar's format, or the older structures and
    triggers), regex (`pattern`), grammar (`grammar`, EBNF) and choice (`choice`, strings).

    Raises: ConstraintError for what is none of these; the message says where.
    """
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_schema({"type": "object"})
    if kind == "json_schema":
        return _schema(response_format)
    if kind == "structural_tag":
        return _tag(response_format)
    if kind == "regex":
        return {"type": "regex", "pattern": _text(response_format, "pattern")}
    if kind == "grammar":
        return {"type": "grammar", "grammar": _text(response_format, "grammar")}
    if kind == "choice":
        return _choice(response_format.get("choice"))
    raise ConstraintError(
        f"response_format: type {kind!r} is not text, json_object, json_schema, structural_tag, "
        "regex, grammar or choice"
    )


def report(schema: Any, is_strict: bool, where: str) -> None:  # noqa: ANN401  # JSON
    """Say which keywords of a schema would not be enforced: an error if the request is strict."""
    found = unenforced(schema)
    if found and is_strict:
        raise ConstraintError(f"{where}: strict, but not enforced: {'; '.join(found)}")
    if found:
        log.warning("%s: not enforced: %s", where, "; ".join(found))


def _schema(response_format: Mapping[str, Any]) -> Node:
    spec = response_format.get("json_schema", response_format)
    if not isinstance(spec, Mapping):
        raise ConstraintError("response_format: json_schema must be an object")
    schema = spec.get("schema", {})
    if not isinstance(schema, Mapping | bool):
        raise ConstraintError("response_format: json_schema.schema must be an object")
    report(schema, bool(spec.get("strict")), "response_format")
    return json_schema(schema)


def _text(response_format: Mapping[str, Any], word: str) -> str:
    value = response_format.get(word)
    if not isinstance(value, str) or not value:
        raise ConstraintError(f"response_format: {word} must be a text, got {value!r}")
    return value


def _choice(choices: object) -> Node:
    if not isinstance(choices, list) or not choices:
        raise ConstraintError("response_format: choice must be a list of at least one string")
    for number, one in enumerate(choices):
        if not isinstance(one, str) or not one:
            raise ConstraintError(f"response_format: choice[{number}] must be a text, got {one!r}")
    return one_of(*map(const, dict.fromkeys(choices)))


def _tag(response_format: Mapping[str, Any]) -> Node:
    if "structures" in response_format or "triggers" in response_format:
        return _legacy_tag(response_format)
    node = response_format.get("format")
    _check(node, "response_format.format")
    assert isinstance(node, Mapping)
    return dict(node)


def _check(node: object, path: str) -> None:
    kind = node.get("type") if isinstance(node, Mapping) else None
    if not isinstance(node, Mapping) or not isinstance(kind, str):
        raise ConstraintError(f"{path}: must be an object with a type, got {node!r:.80}")
    if kind not in _FORMATS:
        known = ", ".join(sorted(_FORMATS))
        raise ConstraintError(f"{path}.type: {kind!r} is not one of {known}")
    if kind == "json_schema":
        report(node.get("json_schema"), bool(node.get("strict")), f"{path}.json_schema")
    for word in _FORMATS[kind]:
        inner = node.get(word)
        if word in ("elements", "tags"):
            if not isinstance(inner, list) or not inner:
                raise ConstraintError(f"{path}.{word}: must be a list of at least one format")
            for number, part in enumerate(inner):
                _check(part, f"{path}.{word}[{number}]")
        elif word == "content":
            _check(inner, f"{path}.{word}")


def _legacy_tag(response_format: Mapping[str, Any]) -> Node:
    """`{"structures": [{"begin", "schema", "end"}], "triggers": [...]}` in today's form."""
    structures, triggers = response_format.get("structures"), response_format.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(map(_is_text, triggers)):
        raise ConstraintError("response_format.triggers: must be a list of at least one text")
    if not isinstance(structures, list) or not structures:
        raise ConstraintError("response_format.structures: must be a list of at least one object")
    tags: list[Node] = []
    for number, one in enumerate(structures):
        where = f"response_format.structures[{number}]"
        if not isinstance(one, Mapping) or not _is_text(one.get("begin")):
            raise ConstraintError(f"{where}: must be an object with the text begin")
        if not isinstance(one.get("end"), str):
            raise ConstraintError(f"{where}.end: must be a text, got {one.get('end')!r}")
        if not any(one["begin"].startswith(trigger) for trigger in triggers):
            raise ConstraintError(f"{where}.begin: {one['begin']!r} starts with no trigger")
        schema = one.get("schema", {})
        report(schema, False, f"{where}.schema")
        node: Node = {"type": "tag", "begin": one["begin"], "content": json_schema(schema)}
        tags.append({**node, "end": one["end"]})
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": tags}


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)
