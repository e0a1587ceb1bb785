"""Reads and validates the fields with which an OpenAI request constrains the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nereid_parsers.constraints.constrain_answer import answer_node
from nereid_parsers.constraints.constrain_nodes import Node
from nereid_parsers.constraints.enforceable_schema import rewrite_for_xgrammar
from nereid_parsers.constraints.schema_merging import CannotMergeError, merge_schemas
from nereid_parsers.errors import ConstraintError, shorten
from nereid_parsers.stream.values.argument_types import follow_references


@dataclass(frozen=True, slots=True)
class ObjectSchema:
    """The JSON schema of an object, for example of the object that contains a tool's arguments.

    Attributes:
        schema: The JSON schema. It contains the definitions to which its references refer.
    """

    schema: Mapping[str, Any]

    def schema_of(self, key: str) -> Mapping[str, Any]:
        """Return the JSON schema of the property `key`, which must be declared.

        Example: `ObjectSchema({"properties": {"a": {"type": "string"}}}).schema_of("a")` gives
        `{"type": "string"}`.
        """
        return inner_schema(self.schema["properties"][key], root=self.schema)

    @property
    def required_keys(self) -> list[str]:
        """The names of the required properties, in the order of the schema."""
        required = self.schema.get("required")
        if not isinstance(required, list):
            return []
        # A set, because a client may send tens of thousands of names.
        required_names = {name for name in required if isinstance(name, str)}
        return [key for key in self._keys() if key in required_names]

    @property
    def optional_keys(self) -> list[str]:
        """The names of the optional properties, in the order of the schema."""
        required_names = set(self.required_keys)
        return [key for key in self._keys() if key not in required_names]

    def _keys(self) -> list[str]:
        """Return the names of all declared properties, in the order of the schema."""
        properties = self.schema.get("properties")
        return list(properties) if isinstance(properties, Mapping) else []


def inner_schema(schema: object, *, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Copy a schema out of the schema `root` that contains it.

    If the inner schema is a reference, the definition is returned. The definitions of `root` are
    added to the result, because the result may refer to them. Example: the inner schema
    `{"$ref": "#/$defs/T"}` and the root `{"$defs": {"T": {"type": "array"}}, ..}` give
    `{"$defs": {"T": {"type": "array"}}, "type": "array"}`.

    An inner schema that is not an object, such as `true`, gives `{}`, which accepts any value.
    """
    if not isinstance(schema, Mapping):
        return {}
    keywords_of_definitions = [keyword for keyword in ("$defs", "definitions") if keyword in root]
    definitions = {keyword: root[keyword] for keyword in keywords_of_definitions}
    return {**definitions, **follow_references(schema, root=root)}


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """One tool of the request.

    Attributes:
        name: The name of the function.
        parameters: The JSON schema of the function's arguments.
        is_strict: Whether the request demands that the whole schema is enforced.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False

    @classmethod
    def of(cls, tool: Mapping[str, Any]) -> ToolSchema:
        """Create a ToolSchema from one tool of an OpenAI request.

        `tool` is `{"type": "function", "function": {"name": "f", "parameters": {..}}}`, or only the
        inner object `{"name": "f", "parameters": {..}}`. The schema under `parameters` is rewritten
        so that xgrammar enforces more of its keywords.

        Raises:
            ConstraintError: The tool has no function name, or `parameters` is not an object.
        """
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise ConstraintError(
                f"tools: the tool {shorten(dict(tool))} has no function name. Set function.name."
            )
        declared = function.get("parameters") or {"type": "object", "properties": {}}
        parameters = _object(declared, f"tools: `parameters` of the function {name!r:.80}")
        is_strict = bool(function.get("strict") or tool.get("strict"))
        return cls(name, follow_references(rewrite_for_xgrammar(parameters)), is_strict)

    @property
    def arguments(self) -> ObjectSchema:
        """The schema of the object that contains the arguments of a call."""
        return ObjectSchema(self.parameters)

    def alternatives(self) -> list[ToolSchema]:
        """Return a tool for each member of the `anyOf` or `oneOf` of the parameters.

        Formats that do not write the arguments as one JSON object need the properties of each
        member. Example: for the parameters `{"anyOf": [A, B]}`, the result contains two tools with
        the same name. Their parameters are A and B. Without such a keyword, or if a member cannot
        be merged with the other keywords of the parameters, the result contains only this tool.
        """
        for keyword in ("anyOf", "oneOf"):
            members = self.parameters.get(keyword)
            if isinstance(members, list) and members:
                common = {key: value for key, value in self.parameters.items() if key != keyword}
                try:
                    merged = [
                        merge_schemas(common, follow_references(member, root=self.parameters))
                        for member in members
                    ]
                except (CannotMergeError, TypeError, AttributeError):
                    # The schema comes from a client, so its values may have any type.
                    return [self]
                return [replace(self, parameters=parameters) for parameters in merged]
        return [self]


@dataclass(frozen=True, slots=True)
class Request:
    """The validated constraints that an OpenAI request places on the output.

    Attributes:
        tools: The tools that the model may call, in the order of the request. If `tool_choice`
            excludes all tools, the tuple is empty.
        must_call: Whether the model must make at least one tool call.
        is_single: Whether the model may make at most one tool call.
        answer: The grammar node that the content must match, or None for free text.
    """

    tools: tuple[ToolSchema, ...] = ()
    must_call: bool = False
    is_single: bool = False
    answer: Node | None = None

    @classmethod
    def of(
        cls,
        tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: str | Mapping[str, Any] | None,
        response_format: Mapping[str, Any] | None,
        *,
        parallel_tool_calls: bool,
    ) -> Request:
        """Create a `Request` from the fields of an OpenAI request.

        Example: if the fields contain the tools f and g, and `tool_choice` names f, the `Request`
        contains only f, and the model must call f exactly once.

        Raises:
            ConstraintError: A field is invalid, or `tool_choice` contradicts `tools`.
        """
        offered_tools = tuple(ToolSchema.of(tool) for tool in tools or ())
        choice = _parse_tool_choice(tool_choice, has_tools=bool(offered_tools))
        allowed_tools = choice.allowed_tools(offered_tools)
        if choice.mode == "required" and not allowed_tools:
            raise ConstraintError(
                "tool_choice: a tool call is required, but tools is empty. Add a function to "
                "tools, or set tool_choice to auto."
            )
        return cls(
            tools=allowed_tools,
            must_call=choice.mode == "required",
            is_single=choice.names_one_function or not parallel_tool_calls,
            answer=answer_node(response_format),  # The grammar of the content.
        )

    @property
    def is_constrained(self) -> bool:
        """Whether the request forbids some outputs.

        A request that only offers tools allows any output. The output is constrained if the request
        demands a tool call or a form of the answer, if a tool is strict, or if the model may make
        at most one tool call.
        """
        demands_form_of_answer = self.answer is not None
        has_strict_tool = any(tool.is_strict for tool in self.tools)
        limits_number_of_calls = bool(self.tools) and self.is_single
        return self.must_call or demands_form_of_answer or has_strict_tool or limits_number_of_calls


@dataclass(frozen=True, slots=True)
class _ToolChoice:
    """The value of the OpenAI field `tool_choice`.

    Attributes:
        mode: "auto", "required" or "none".
        names: The names of the functions that the model may call, or None for all functions.
        names_one_function: Whether the request names one function that the model must call exactly
            once.
    """

    mode: str
    names: frozenset[str] | None = None
    names_one_function: bool = False

    def allowed_tools(self, tools: tuple[ToolSchema, ...]) -> tuple[ToolSchema, ...]:
        """Return the members of `tools` that the model may call.

        Examples for the tools f and g: the names {"f"} give f. The names None give f and g. The
        mode "none" gives an empty tuple.

        Raises:
            ConstraintError: This choice names a function that `tools` does not contain.
        """
        if self.mode == "none":
            return ()
        if self.names is None:
            return tools
        offered_names = {tool.name for tool in tools}
        missing = self.names - offered_names
        if missing:
            raise ConstraintError(
                f"tool_choice: the request has no tool with the name {sorted(missing)[0]!r}"
            )
        return tuple(tool for tool in tools if tool.name in self.names)


def _parse_tool_choice(choice: str | Mapping[str, Any] | None, *, has_tools: bool) -> _ToolChoice:
    """Parse the OpenAI field `tool_choice`, which defines whether the model calls tools.

    Example: `{"type": "function", "function": {"name": "f"}}` gives
    `_ToolChoice(mode="required", names={"f"}, names_one_function=True)`. If the field is missing,
    the mode is "auto" for a request with tools, and "none" for a request without tools.
    """
    if choice is None:
        return _ToolChoice(mode="auto" if has_tools else "none")
    if isinstance(choice, str):
        if choice not in ("auto", "required", "none"):
            raise ConstraintError(
                f"tool_choice: the value must be auto, required, none or an object, but is "
                f"{shorten(choice)}"
            )
        return _ToolChoice(mode=choice)
    kind = _object(choice, "tool_choice").get("type")
    if kind == "function":
        names = frozenset({_function_name(choice)})
        return _ToolChoice(mode="required", names=names, names_one_function=True)
    if kind == "allowed_tools":
        # Chat Completions encloses `mode` and `tools` in an object `allowed_tools`. The Responses
        # API writes `mode` and `tools` next to `type`.
        return _parse_allowed_tools(choice.get("allowed_tools", choice))
    raise ConstraintError(
        f"tool_choice: type must be function or allowed_tools, but is {shorten(kind)}"
    )


def _parse_allowed_tools(value: object) -> _ToolChoice:
    """Parse the object `allowed_tools` in the OpenAI field `tool_choice`.

    With this object, a client allows only some of the request's tools. Example:
    `{"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}` gives
    `_ToolChoice(mode="auto", names={"f"})`.
    """
    allowed = _object(value, "tool_choice.allowed_tools")
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise ConstraintError(
            f'tool_choice: allowed_tools.mode must be "auto" or "required", but it is '
            f"{shorten(mode)}"
        )
    tools = allowed.get("tools", [])
    if not isinstance(tools, list):
        raise ConstraintError(
            f"tool_choice: allowed_tools.tools must be a list, but it is {shorten(tools)}"
        )
    names = frozenset(
        _function_name(_object(tool, "each item of tool_choice.allowed_tools.tools"))
        for tool in tools
    )
    return _ToolChoice(mode, names)


def _object(value: object, place: str) -> Mapping[str, Any]:
    """Return `value` unchanged. Raise ConstraintError if `value` is not a JSON object.

    `place` is the name of the value in the error message, such as "tool_choice".
    """
    if not isinstance(value, Mapping):
        raise ConstraintError(f"{place} must be an object, but it is {shorten(value)}")
    return value


def _function_name(choice: Mapping[str, Any]) -> str:
    """Return the name of the function in `choice`, an object from the field `tool_choice`.

    Examples: `{"function": {"name": "f"}}` and `{"name": "f"}` give "f".
    """
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ConstraintError(
            f"tool_choice: the object {shorten(dict(choice))} has no function name. Set "
            "function.name."
        )
    return name
