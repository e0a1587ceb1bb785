# SPDX-License-Identifier: Apache-2.0
"""Builds the grammar of a request from the fields that constrain the output."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nereid_parsers import ConstraintError, Format
from nereid_parsers.constraints.constrain_answer import answer_node
from nereid_parsers.format import Sections

from nereid_backend.core.grammar import GrammarSpec
from nereid_backend.errors import RequestError
from nereid_backend.grammar.request_spec import grammar_spec, schema_spec
from nereid_backend.request_field_checks import shown
from nereid_backend.serving.tokenizer.output_format import OutputFormat, read_output_format

# The largest size of a grammar. A larger grammar is refused before a grammar library reads it.
MAX_GRAMMAR_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RequestGrammar:
    """The grammar of one request.

    Attributes:
        spec: the grammar in the form that the engine needs; None if the output is unconstrained.
        strict_schema: the JSON text of a schema. The postprocessor validates the complete content
            against this schema. An empty text means no validation.
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
        prompt: the end of the rendered prompt. It determines whether the output begins inside
            reasoning.
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
    # If the content has no markers and there can be no reasoning, the output consists of content
    # alone.
    has_content_markers = not isinstance(fmt.layout, Sections) or fmt.layout.content is not None
    is_bare = not has_content_markers and (gate is None or not gate.may_open)
    if output is not None and not has_calls and is_bare:
        return _request_grammar(output, _build_spec(output, after))
    allows_parallel_calls = _allows_parallel_calls(fields)
    with _convert_errors(output):
        tag = fmt.structural_tag(
            tools,
            choice,
            None if output is None else output.form,
            parallel_tool_calls=allows_parallel_calls,
            prompt=prompt,
            skip_reasoning=bool(after),
        )
    if tag is None:
        return RequestGrammar()
    if output is not None:
        _refuse_lark(output)
    return _request_grammar(output, GrammarSpec("structural_tag", _to_json(tag), after))


def build_text_grammar(fields: Mapping[str, Any]) -> RequestGrammar:
    """Build the grammar for a completion. The grammar applies from the first generated token.

    Raises:
        RequestError: the fields are wrong or contradict each other.
    """
    output = read_output_format(fields)
    return RequestGrammar() if output is None else _request_grammar(output, _build_spec(output, ""))


def _refuse_lark(output: OutputFormat) -> None:
    """Raise a RequestError if the format is a Lark grammar, which structural tags cannot contain.

    Like grammar_spec, this function takes each grammar without "::=" for a Lark grammar.
    """
    if output.form["type"] == "grammar" and "::=" not in output.form["grammar"]:
        raise RequestError(
            f"{output.field}: a grammar in Lark's format is not supported together with tools or "
            "with reasoning that the model may leave out. Write the grammar in EBNF, with rules "
            'such as root ::= "yes" | "no", or turn tools and reasoning off.'
        )


def _build_spec(output: OutputFormat, after: str) -> GrammarSpec:
    """Build the engine's grammar for the format `output`.

    The grammar applies after the model has generated the text `after`, such as "</think>". If
    `after` is empty, the grammar applies from the first token.

    Raises:
        RequestError: the format is not valid, for example because a regex is not a text.
    """
    form_type = output.form["type"]
    if form_type in ("json_object", "json_schema"):
        # `schema_spec` checks the schema itself.
        return schema_spec(output.schema, is_strict=output.is_strict, after=after)
    node = _checked_node(output)
    match form_type:
        case "structural_tag":
            tag = {"type": "structural_tag", "format": node}
            return GrammarSpec("structural_tag", _to_json(tag), after)
        case "regex":
            return GrammarSpec("regex", node["pattern"], after)
        case "grammar":
            return grammar_spec(node["grammar"], after=after)
        case "choice":
            # The engine compiles the list of choices. `node` describes the choices in another way.
            return GrammarSpec("choice", _to_json(output.form["choice"]), after)
    raise AssertionError(f"{form_type} is not a type of an output format")


def _checked_node(output: OutputFormat) -> dict[str, Any]:
    """Validate a format that is not JSON, and return the format as a grammar node of xgrammar.

    Example: the format `{"type": "regex", "pattern": "a+"}` returns the same keys and values.
    """
    with _convert_errors(output):
        node = answer_node(output.form)
    assert node is not None, "only the type text has no node"
    return node


@contextlib.contextmanager
def _convert_errors(output: OutputFormat | None) -> Iterator[None]:
    """In a `with` block, convert each ConstraintError to a RequestError.

    A client can send the output format in the field response_format or in another field, such as
    structured_outputs. The messages of the parser library always begin with "response_format". The
    RequestError begins with the client's field instead. Example: "response_format: choice must be
    ..." becomes "structured_outputs: choice must be ...".

    `output` is the client's output format; None if the request has none.
    """
    try:
        yield
    except ConstraintError as error:
        message = str(error)
        library_field = "response_format"
        if output is not None and message.startswith(library_field):
            message = output.field + message.removeprefix(library_field)
        raise RequestError(message) from error


def _request_grammar(output: OutputFormat | None, spec: GrammarSpec) -> RequestGrammar:
    """Build the RequestGrammar of a request from `spec`, the grammar for the engine.

    Args:
        output: the output format from which the grammar was built; None if the grammar only
            describes tool calls.
        spec: the grammar for the engine.

    Raises:
        RequestError: the grammar's text is longer than MAX_GRAMMAR_BYTES.
    """
    if output is None:
        field, strict_schema = "tools", ""
    else:
        field = output.field
        strict_schema = _to_json(output.schema) if output.is_strict else ""
    size = len(spec.source.encode("utf-8"))
    if size > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"{field}: the grammar built from this field has {size} bytes, but the limit is "
            f"{MAX_GRAMMAR_BYTES} bytes. Shorten the value of this field."
        )
    return RequestGrammar(spec, strict_schema, field)


def _allows_parallel_calls(fields: Mapping[str, Any]) -> bool:
    """Return whether one message may contain several tool calls. The default is True.

    Raises:
        RequestError: the field parallel_tool_calls is not a boolean.
    """
    parallel = fields.get("parallel_tool_calls")
    if parallel is None:
        return True
    if not isinstance(parallel, bool):
        raise RequestError(
            "parallel_tool_calls: the value must be true or false, but the request has "
            f"{shown(parallel)}."
        )
    return parallel


def _check_tool_choice(choice: object) -> None:
    """Raise a RequestError if `choice` is neither a text nor an object that names functions.

    Examples of valid values: "auto", `{"type": "function", "function": {"name": "add"}}`, and
    `{"type": "allowed_tools", "allowed_tools": {"tools": [...]}}`.
    """
    if choice is None or isinstance(choice, str) or _names_functions(choice):
        return
    raise RequestError(
        "tool_choice: the value must be auto, required, none or an object that names "
        f"functions, but the request has {shown(choice)}."
    )


def _names_functions(choice: object) -> bool:
    """Return whether `choice` is an object whose list of tools, if any, contains only objects.

    The list is the key `tools` of the object `allowed_tools`, or of `tool_choice` itself.
    """
    if not isinstance(choice, Mapping):
        return False
    object_with_list = choice.get("allowed_tools", choice)
    if not isinstance(object_with_list, Mapping):
        return False
    tools = object_with_list.get("tools", [])
    return isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)


def _refuse_calls_without_format(choice: object) -> None:
    """Raise a RequestError if `tool_choice` requires a tool call or forbids tool calls.

    The checkpoint has no chat format, so tool calls in the output cannot be recognised. Therefore
    calls can be neither required nor removed from the output (tool_choice "none"). Tools with the
    tool_choice "auto" are still accepted. The model's output is then plain text.
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
