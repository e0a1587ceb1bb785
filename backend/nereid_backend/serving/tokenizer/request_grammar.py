# SPDX-License-Identifier: Apache-2.0
"""From a request's many ways to say what the answer must be to one grammar for the engine."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nereid_parsers import ConstraintError, Format
from nereid_parsers.constrain_answer import answer_node
from nereid_parsers.format import ReasoningGate, Sections

from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.errors import RequestError
from nereid_backend.grammar.request_spec import grammar_spec, schema_spec

# A grammar beyond this is refused before anything reads it.
MAX_GRAMMAR_BYTES = 1 << 20

_NAMES = ("response_format", "structured_outputs", "regex", "ebnf", "json_schema", "grammar")


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """What the text of an answer must be.

    Attributes:
        field: the request's field that says it, for messages.
        form: the same as a response_format, whose types here are json_object, json_schema,
            structural_tag, regex, grammar and choice.
    """

    field: str
    form: Mapping[str, Any]

    @property
    def schema(self) -> object:
        """The JSON schema, where it is one."""
        if self.form["type"] == "json_object":
            return {"type": "object"}
        inner = self.form.get("json_schema")
        return inner.get("schema", {}) if isinstance(inner, Mapping) else {}

    @property
    def is_strict(self) -> bool:
        """Whether the schema must be enforced to the letter."""
        inner = self.form.get("json_schema")
        return isinstance(inner, Mapping) and bool(inner.get("strict"))


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a request's answer is held to.

    Attributes:
        spec: for the engine; None where it is free.
        strict_schema: JSON text of the schema that the finished content is checked against; empty
            for none.
        field: the request's field that made it, for messages.
    """

    spec: GrammarSpec | None = None
    strict_schema: str = ""
    field: str = ""


def grammar_of_chat(
    fields: Mapping[str, Any],
    fmt: Format | None,
    prompt: str,
    tools: list[dict[str, Any]] | None,
) -> Grammar:
    """The grammar of a chat completion: its answer, its calls, and reasoning before them.

    Args:
        fields: the request's body.
        fmt: how the checkpoint writes; None for text alone.
        prompt: the rendered prompt.
        tools: those that may be called.

    Raises:
        RequestError: the fields are wrong, contradict each other, or ask for what the checkpoint's
            format cannot write.
    """
    rule = read_rule(fields)
    choice = fields.get("tool_choice")
    if fmt is None:
        if tools or choice not in (None, "auto", "none"):
            _refuse_calls_without_format(choice, tools)
        return grammar_of_text(fields)
    gate = fmt.reasoning_gate(prompt)
    after = gate.end.strip() if gate is not None and gate.is_open else ""
    has_calls = bool(tools) or choice not in (None, "auto", "none")
    if rule is not None and not has_calls and _is_plain(fmt, gate):
        return _checked(rule, _plain(rule, after))
    parallel = fields.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise RequestError(f"parallel_tool_calls: must be true or false, got {parallel!r}")
    tag = _told(
        rule,
        lambda: fmt.structural_tag(
            tools,
            choice,
            None if rule is None else rule.form,
            parallel_tool_calls=parallel is not False,
            prompt=prompt,
            skip_reasoning=bool(after),
        ),
    )
    if tag is None:
        return Grammar()
    spec = GrammarSpec("structural_tag", _text(tag), after)
    return _checked(rule, spec)


def grammar_of_text(fields: Mapping[str, Any]) -> Grammar:
    """The grammar of a plain completion: it holds from the first token.

    Raises:
        RequestError: the fields are wrong or contradict each other.
    """
    rule = read_rule(fields)
    return Grammar() if rule is None else _checked(rule, _plain(rule, ""))


def read_rule(fields: Mapping[str, Any]) -> AnswerRule | None:
    """What the answer must be, under whichever name the request says it; None for free text.

    Names: response_format (OpenAI), structured_outputs (vLLM), regex, ebnf and json_schema
    (SGLang), json_schema and grammar (llama.cpp).

    Raises:
        RequestError: a wrong value, or more than one of them.
    """
    found = [rule for name in _NAMES if (rule := _read(name, fields.get(name))) is not None]
    if len(found) > 1:
        raise RequestError(
            f"{found[1].field}: says what the answer must be, and {found[0].field} does too; "
            "send one of them"
        )
    return found[0] if found else None


def _read(name: str, value: Any) -> AnswerRule | None:  # noqa: ANN401 - any JSON value
    if value is None or value in ({}, ""):
        return None
    if name == "response_format":
        return _read_response_format(value)
    if name == "structured_outputs":
        return _read_structured_outputs(value)
    if name == "json_schema":
        return AnswerRule(name, _schema_form(name, value))
    if not isinstance(value, str):
        raise RequestError(f"{name}: must be a string, got {_short(value)}")
    if name == "regex":
        return AnswerRule(name, {"type": "regex", "pattern": value})
    return AnswerRule(name, {"type": "grammar", "grammar": value})


def _read_response_format(value: Any) -> AnswerRule | None:  # noqa: ANN401 - any JSON value
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema", "structural_tag"):
        raise RequestError(
            "response_format: type must be text, json_object, json_schema or structural_tag, got "
            f"{_short(kind if isinstance(value, Mapping) else value)}"
        )
    name = next((name for name in ("schema", "value") if value.get(name) is not None), None)
    if kind == "json_object" and name is not None:
        # llama.cpp's and TGI's way of giving a schema.
        if not isinstance(value[name], Mapping | bool):
            raise RequestError(
                f"response_format: {name} must be a JSON schema, got {_short(value[name])}"
            )
        kind, value = "json_schema", {"schema": value[name], "strict": value.get("strict")}
    if kind == "json_schema":
        inner = value.get("json_schema", value)
        if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping | bool):
            raise RequestError(
                "response_format: json_schema.schema must be a JSON schema, got "
                f"{_short(inner.get('schema') if isinstance(inner, Mapping) else inner)}"
            )
        value = {"type": kind, "json_schema": inner}
    return AnswerRule("response_format", value)


def _read_structured_outputs(value: Any) -> AnswerRule | None:  # noqa: ANN401 - any JSON value
    name = "structured_outputs"
    if not isinstance(value, Mapping):
        raise RequestError(f"{name}: must be an object, got {_short(value)}")
    said = {key: one for key, one in value.items() if one not in (None, False)}
    if not said:
        return None
    readers: dict[str, Callable[[Any], Mapping[str, Any]]] = {
        "json": lambda one: _schema_form(f"{name}.json", one),
        "json_object": lambda _: {"type": "json_object"},
        "regex": lambda one: {"type": "regex", "pattern": one},
        "grammar": lambda one: {"type": "grammar", "grammar": one},
        "choice": lambda one: {"type": "choice", "choice": one},
        "structural_tag": lambda one: _tag_form(f"{name}.structural_tag", one),
    }
    unknown = [key for key in said if key not in readers]
    if unknown:
        raise RequestError(f"{name}: {unknown[0]} is not supported; known are {', '.join(readers)}")
    if len(said) > 1:
        raise RequestError(f"{name}: must hold one of {', '.join(readers)}, got {', '.join(said)}")
    ((key, one),) = said.items()
    return AnswerRule(name, readers[key](one))


def _schema_form(name: str, value: Any) -> Mapping[str, Any]:  # noqa: ANN401 - any JSON value
    schema = _json(name, value)
    if not isinstance(schema, Mapping | bool):
        raise RequestError(f"{name}: must be a JSON schema, got {_short(schema)}")
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _tag_form(name: str, value: Any) -> Mapping[str, Any]:  # noqa: ANN401 - any JSON value
    tag = _json(name, value)
    if not isinstance(tag, Mapping):
        raise RequestError(f"{name}: must be a structural tag, got {_short(tag)}")
    return {**tag, "type": "structural_tag"}


def _json(name: str, value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name}: is no JSON: {error}") from None


def _is_plain(fmt: Format, gate: ReasoningGate | None) -> bool:
    """Whether the answer is bare text, behind reasoning that is open or cannot come any more."""
    may_open = gate is not None and gate.may_open
    return isinstance(fmt.layout, Sections) and fmt.layout.content is None and not may_open


def _plain(rule: AnswerRule, after: str) -> GrammarSpec:
    kind = rule.form["type"]
    if kind in ("json_object", "json_schema"):
        return schema_spec(rule.schema, is_strict=rule.is_strict, after=after)
    # The node is read for its errors, which say where.
    node = _told(rule, lambda: answer_node(rule.form))
    if kind == "regex":
        return GrammarSpec("regex", rule.form["pattern"], after)
    if kind == "grammar":
        return grammar_spec(rule.form["grammar"], after=after)
    if kind == "choice":
        return GrammarSpec("choice", _text(rule.form["choice"]), after)
    return GrammarSpec("structural_tag", _text({"type": "structural_tag", "format": node}), after)


def _told(
    rule: AnswerRule | None, make: Callable[[], dict[str, Any] | None]
) -> dict[str, Any] | None:
    """What `make` gives, its errors under the name of the request's own field."""
    try:
        return make()
    except ConstraintError as error:
        message = str(error)
        if rule is not None and message.startswith("response_format"):
            message = rule.field + message.removeprefix("response_format")
        raise RequestError(message) from error


def _checked(rule: AnswerRule | None, spec: GrammarSpec) -> Grammar:
    size = len(spec.source.encode("utf-8"))
    if size > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"{rule.field if rule else 'tools'}: makes a grammar of {size} bytes; the limit is "
            f"{MAX_GRAMMAR_BYTES}; send a smaller one"
        )
    strict = rule is not None and rule.is_strict
    schema = _text(rule.schema) if rule is not None and strict else ""
    return Grammar(spec, schema, rule.field if rule else "tools")


def _refuse_calls_without_format(choice: object, tools: object) -> None:
    if choice in (None, "auto"):
        # Offered, but how a call is written is not known: what comes is text.
        return
    asked = "tool_choice" if choice is not None else "tools"
    raise RequestError(
        f"{asked}: {_short(choice or tools)} needs a chat format that writes tool calls; this "
        "checkpoint's is not known (see tool_parser)"
    )


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
