# SPDX-License-Identifier: Apache-2.0
"""Builds one grammar for the engine from the fields with which a request constrains its output."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nereid_parsers import ConstraintError, Format
from nereid_parsers.constrain_answer import answer_node
from nereid_parsers.format import ReasoningGate, Sections

from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.errors import RequestError
from nereid_backend.field_checks import shown
from nereid_backend.grammar.request_spec import grammar_spec, schema_spec

# A longer grammar is refused before a grammar library reads it.
MAX_GRAMMAR_BYTES = 1 << 20

_FIELDS = ("response_format", "structured_outputs", "regex", "ebnf", "json_schema", "grammar")
_FORMAT_TYPES = ("text", "json_object", "json_schema", "structural_tag")


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The format that a request requires for the generated content.

    Several fields can require a format. All of them are converted to an object in the form of
    response_format. Example: the field `regex: "a+"` becomes
    `{"type": "regex", "pattern": "a+"}`.

    Attributes:
        field: the name of the request's field. Error messages begin with this name.
        form: the object. Its type is json_object, json_schema, structural_tag, regex, grammar or
            choice.
    """

    field: str
    form: Mapping[str, Any]

    @property
    def schema(self) -> object:
        """The JSON schema of the format; `{}` if the format has no schema."""
        if self.form["type"] == "json_object":
            return {"type": "object"}
        inner = self.form.get("json_schema")
        return inner.get("schema", {}) if isinstance(inner, Mapping) else {}

    @property
    def is_strict(self) -> bool:
        """Whether every keyword of the schema must be enforced."""
        inner = self.form.get("json_schema")
        return isinstance(inner, Mapping) and bool(inner.get("strict"))


@dataclass(frozen=True, slots=True)
class RequestGrammar:
    """The grammar of one request.

    Attributes:
        spec: the grammar for the engine; None if the output is unconstrained.
        strict_schema: the JSON text of a schema. The postprocessor validates the complete content
            against this schema. Empty if the content is not validated.
        field: the request's field from which the grammar was built, for error messages.
    """

    spec: GrammarSpec | None = None
    strict_schema: str = ""
    field: str = ""


def build_chat_grammar(
    fields: Mapping[str, Any],
    fmt: Format | None,
    prompt: str,
    tools: list[dict[str, Any]] | None,
) -> RequestGrammar:
    """Build the grammar for the output of a chat completion.

    The grammar describes the reasoning, the content and the tool calls.

    Args:
        fields: the request's body.
        fmt: the chat format of the checkpoint; None if the checkpoint writes only plain text.
        prompt: the end of the rendered prompt. It determines whether reasoning is already open.
        tools: the tools that the model may call.

    Raises:
        RequestError: the fields are wrong, contradict each other, or require something that the
            chat format cannot express.
    """
    output = read_output_format(fields)
    choice = fields.get("tool_choice")
    _check_tool_choice(choice)
    has_calls = bool(tools) or choice not in (None, "auto", "none")
    if fmt is None:
        if has_calls:
            _refuse_calls_without_format(choice)
        return build_text_grammar(fields)
    gate = fmt.reasoning_gate(prompt)
    # If the prompt ends inside reasoning, the grammar applies only to the text after the reasoning.
    after = gate.end.strip() if gate is not None and gate.is_open else ""
    if output is not None and not has_calls and _content_is_bare(fmt, gate):
        return _request_grammar(output, _build_spec(output, after))
    parallel = fields.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise RequestError(
            "parallel_tool_calls: the value must be true or false, but the request has "
            f"{shown(parallel)}."
        )
    tag = _with_request_field(
        output,
        lambda: fmt.structural_tag(
            tools,
            choice,
            None if output is None else output.form,
            parallel_tool_calls=parallel is not False,
            prompt=prompt,
            skip_reasoning=bool(after),
        ),
    )
    if tag is None:
        return RequestGrammar()
    return _request_grammar(output, GrammarSpec("structural_tag", _to_json(tag), after))


def build_text_grammar(fields: Mapping[str, Any]) -> RequestGrammar:
    """Build the grammar of a plain completion. The grammar applies from the first generated token.

    Raises:
        RequestError: the fields are wrong or contradict each other.
    """
    output = read_output_format(fields)
    return RequestGrammar() if output is None else _request_grammar(output, _build_spec(output, ""))


def read_output_format(fields: Mapping[str, Any]) -> OutputFormat | None:
    """Return the format that a request requires for its output; None for unconstrained text.

    These fields are read: response_format (OpenAI), structured_outputs (vLLM), regex, ebnf and
    json_schema (SGLang), json_schema and grammar (llama.cpp).

    Raises:
        RequestError: a field has a wrong value, or the request has more than one of these fields.
    """
    formats = [
        output for name in _FIELDS if (output := _read_field(name, fields.get(name))) is not None
    ]
    if len(formats) > 1:
        raise RequestError(
            f"{formats[1].field}: the request constrains its output with both {formats[0].field} "
            f"and {formats[1].field}. Send only one of the two."
        )
    return formats[0] if formats else None


def _read_field(name: str, value: Any) -> OutputFormat | None:  # noqa: ANN401 - any JSON value
    """Return the format that the field `name` requires; None if its value requires no format."""
    if value is None or value in ({}, ""):
        return None
    if name == "response_format":
        return _read_response_format(value)
    if name == "structured_outputs":
        return _read_structured_outputs(value)
    if name == "json_schema":
        return OutputFormat(name, _schema_form(name, value))
    if not isinstance(value, str):
        raise RequestError(
            f"{name}: the value must be a string, but the request has {shown(value)}."
        )
    if name == "regex":
        return OutputFormat(name, {"type": "regex", "pattern": value})
    assert name in ("ebnf", "grammar")
    return OutputFormat(name, {"type": "grammar", "grammar": value})


def _read_response_format(value: Any) -> OutputFormat | None:  # noqa: ANN401 - any JSON value
    """Return the format that the field response_format requires; None for the type text."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind not in _FORMAT_TYPES:
        raise RequestError(
            f"response_format: type must be one of {', '.join(_FORMAT_TYPES)}, but the request has "
            f"{shown(kind if isinstance(value, Mapping) else value)}."
        )
    if kind == "json_object":
        return OutputFormat("response_format", _json_object_form(value))
    if kind == "json_schema":
        return OutputFormat("response_format", _json_schema_form(value))
    return OutputFormat("response_format", value)


def _json_object_form(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a response_format of the type json_object.

    llama.cpp and TGI accept a schema inside json_object, with the name `schema` or `value`. Such an
    object becomes a json_schema. Example: `{"type": "json_object", "schema": {}}` becomes
    `{"type": "json_schema", "json_schema": {"schema": {}, "strict": None}}`.
    """
    name = next((name for name in ("schema", "value") if value.get(name) is not None), None)
    if name is None:
        return value
    schema = value[name]
    if not isinstance(schema, Mapping | bool):
        raise RequestError(
            f"response_format: {name} must be a JSON schema (an object, true or false), but the "
            f"request has {shown(schema)}."
        )
    inner = {"schema": schema, "strict": value.get("strict")}
    return {"type": "json_schema", "json_schema": inner}


def _json_schema_form(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a response_format of the type json_schema.

    OpenAI's API has the schema in the object `json_schema`. Other clients send the schema without
    that object: `{"type": "json_schema", "schema": {}}`.
    """
    inner = value.get("json_schema", value)
    schema = inner.get("schema") if isinstance(inner, Mapping) else inner
    if not isinstance(inner, Mapping) or not isinstance(schema, Mapping | bool):
        raise RequestError(
            "response_format: json_schema.schema must be a JSON schema (an object, true or false), "
            f"but the request has {shown(schema)}."
        )
    return {"type": "json_schema", "json_schema": inner}


def _read_structured_outputs(value: Any) -> OutputFormat | None:  # noqa: ANN401 - any JSON value
    """Return the format that the field structured_outputs requires; None for an empty object.

    Keys with the value null or false count as missing, because clients of vLLM send all keys.
    Example: `{"regex": "a+", "json_object": false}` returns an OutputFormat with the form
    `{"type": "regex", "pattern": "a+"}`.
    """
    name = "structured_outputs"
    if not isinstance(value, Mapping):
        raise RequestError(
            f"{name}: the value must be an object, but the request has {shown(value)}."
        )
    given = {
        key: content
        for key, content in value.items()
        if content is not None and content is not False
    }
    if not given:
        return None
    readers: dict[str, Callable[[Any], Mapping[str, Any]]] = {
        "json": lambda schema: _schema_form(f"{name}.json", schema),
        "json_object": lambda _: {"type": "json_object"},
        "regex": lambda pattern: {"type": "regex", "pattern": pattern},
        "grammar": lambda grammar: {"type": "grammar", "grammar": grammar},
        "choice": lambda choices: {"type": "choice", "choice": choices},
        "structural_tag": lambda tag: _tag_form(f"{name}.structural_tag", tag),
    }
    unknown = [key for key in given if key not in readers]
    if unknown:
        raise RequestError(
            f"{name}: this server does not support the key {unknown[0]}. Use one of "
            f"{', '.join(readers)}."
        )
    if len(given) > 1:
        raise RequestError(
            f"{name}: the object must have only one of the keys {', '.join(readers)}, but the "
            f"request has {', '.join(given)}."
        )
    ((key, content),) = given.items()
    return OutputFormat(name, readers[key](content))


def _schema_form(name: str, value: Any) -> Mapping[str, Any]:  # noqa: ANN401 - any JSON value
    """Convert a JSON schema to a response_format object. The schema may be JSON text."""
    schema = _parse_json(name, value)
    if not isinstance(schema, Mapping | bool):
        raise RequestError(
            f"{name}: the value must be a JSON schema (an object, true or false), but the request "
            f"has {shown(schema)}."
        )
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _tag_form(name: str, value: Any) -> Mapping[str, Any]:  # noqa: ANN401 - any JSON value
    """Convert a structural tag to a response_format object. The tag may be JSON text."""
    tag = _parse_json(name, value)
    if not isinstance(tag, Mapping):
        raise RequestError(
            f"{name}: the value must be a structural tag (an object), but the request has "
            f"{shown(tag)}."
        )
    return {**tag, "type": "structural_tag"}


def _parse_json(name: str, value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Parse `value` if it is text. Return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name}: the text is not valid JSON: {error}") from None


def _content_is_bare(fmt: Format, gate: ReasoningGate | None) -> bool:
    """Return whether the output consists of the content alone, without markers and reasoning.

    This is the case if the format has no markers around content, and no reasoning can begin.
    """
    may_open = gate is not None and gate.may_open
    return isinstance(fmt.layout, Sections) and fmt.layout.content is None and not may_open


def _build_spec(output: OutputFormat, after: str) -> GrammarSpec:
    """Build the engine's grammar for the format `output`.

    The grammar applies after the model has generated the text `after`. If `after` is empty, the
    grammar applies from the first token (see GrammarSpec).
    """
    kind = output.form["type"]
    if kind in ("json_object", "json_schema"):
        return schema_spec(output.schema, is_strict=output.is_strict, after=after)
    # `answer_node` is called for every type of `form`, because it raises an error that names an
    # invalid part of `form`. Only structural tags use the returned node.
    node = _with_request_field(output, lambda: answer_node(output.form))
    if kind == "regex":
        return GrammarSpec("regex", output.form["pattern"], after)
    if kind == "grammar":
        return grammar_spec(output.form["grammar"], after=after)
    if kind == "choice":
        return GrammarSpec("choice", _to_json(output.form["choice"]), after)
    tag = {"type": "structural_tag", "format": node}
    return GrammarSpec("structural_tag", _to_json(tag), after)


def _with_request_field(
    output: OutputFormat | None, build: Callable[[], dict[str, Any] | None]
) -> dict[str, Any] | None:
    """Call `build` and return its result. Correct the field name in error messages.

    Example: the parser library's error "response_format: choice must be ..." becomes
    "structured_outputs: choice must be ..." if the request has structured_outputs.
    """
    try:
        return build()
    except ConstraintError as error:
        message = str(error)
        if output is not None and message.startswith("response_format"):
            message = output.field + message.removeprefix("response_format")
        raise RequestError(message) from error


def _request_grammar(output: OutputFormat | None, spec: GrammarSpec) -> RequestGrammar:
    """Return the RequestGrammar for the engine's grammar `spec`.

    Args:
        output: the format from which the grammar was built; None for a grammar of tool calls alone.
        spec: the grammar for the engine.

    Raises:
        RequestError: the grammar's text is longer than MAX_GRAMMAR_BYTES.
    """
    field = "tools"
    strict_schema = ""
    if output is not None:
        field = output.field
        strict_schema = _to_json(output.schema) if output.is_strict else ""
    size = len(spec.source.encode("utf-8"))
    if size > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"{field}: the grammar built from this field has {size} bytes, but the limit is "
            f"{MAX_GRAMMAR_BYTES} bytes. Shorten the value of this field."
        )
    return RequestGrammar(spec, strict_schema, field)


def _check_tool_choice(choice: object) -> None:
    """Raise a RequestError if `tool_choice` is neither text nor an object that names functions."""
    if choice is None or isinstance(choice, str):
        return
    allowed = choice.get("allowed_tools", choice) if isinstance(choice, Mapping) else None
    tools = allowed.get("tools", []) if isinstance(allowed, Mapping) else None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError(
            "tool_choice: the value must be auto, required, none or an object that names "
            f"functions, but the request has {shown(choice)}."
        )


def _refuse_calls_without_format(choice: object) -> None:
    """Raise a RequestError if `tool_choice` requires a tool call or forbids tool calls.

    The form in which the checkpoint writes tool calls is not known. A request may still contain
    tools with the tool_choice "auto". The model's output is then plain text.
    """
    if choice in (None, "auto"):
        return
    raise RequestError(
        f"tool_choice: the request has {shown(choice)}, but the chat format with which this "
        "checkpoint writes tool calls is not known. Set the server's tool_parser, or leave "
        "tool_choice out."
    )


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
