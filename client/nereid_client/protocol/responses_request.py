"""The body of `POST /v1/responses`: the cheap checks. Shapes: OpenAI's API reference, 2026-11.

Sampling fields beyond OpenAI's are those of chat completions and are passed on as there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from nereid_client.errors import shown
from nereid_client.protocol.field_checks import (
    check_response_format,
    check_tool_choice,
    plain_response_format,
)
from nereid_client.protocol.generation_requests import (
    MAX_LOGPROBS,
    GenerationRequest,
    StreamOptions,
)
from nereid_client.protocol.refused import REFUSED_IN_CHAT, Refusal, refuse

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_INT64 = 2**63
_MAX_METADATA = 16
_MAX_METADATA_KEY_CHARS = 64
_MAX_METADATA_VALUE_CHARS = 512

_OFF = (False,)
_IN_CHAT = "not given out here; /v1/chat/completions gives it"

REFUSED_IN_RESPONSES = {
    **{name: why for name, why in REFUSED_IN_CHAT.items() if name != "store"},
    # OpenAI, of this API
    "conversation": Refusal("conversations are not kept as such; use previous_response_id"),
    "prompt": Refusal("prompt templates are not kept; send instructions and input"),
    "context_management": Refusal("conversations are not shortened; send what is to be read"),
    "access_programs": Refusal("there are no such programs here"),
    "image": Refusal("the served model writes and reads text only"),
    # of chat completions
    "messages": Refusal("is called input here"),
    "max_tokens": Refusal("is called max_output_tokens here"),
    "max_completion_tokens": Refusal("is called max_output_tokens here"),
    "response_format": Refusal("is called text.format here"),
    "reasoning_effort": Refusal("is called reasoning.effort here"),
    "logprobs": Refusal(f'asked for as include ["{LOGPROBS}"] here', _OFF),
    "n": Refusal("a response is one answer; send as many requests", (1,)),
    "stream_reasoning": Refusal("reasoning has events of its own", (True,)),
    "prompt_logprobs": Refusal(_IN_CHAT),
    "return_token_ids": Refusal(_IN_CHAT, _OFF),
    "return_prompt_token_ids": Refusal(_IN_CHAT, _OFF),
    "return_tokens_as_token_ids": Refusal(_IN_CHAT, _OFF),
    "request_id": Refusal("the server names responses; send the header X-Request-Id"),
    "rid": Refusal("the server names responses; send the header X-Request-Id"),
}
"""Fields of other APIs, and of OpenAI's own, that a response does not take."""

REFUSED_IN_TOOLS = {
    "async": Refusal("calls are the caller's to run, when it likes", _OFF),
    "defer_loading": Refusal("tools are not searched for; send those that may be called", _OFF),
    "allowed_callers": Refusal("only the model calls", (["direct"], [])),
    "output_schema": Refusal("what a function gives back is not checked"),
}
_NO_SUMMARY = "nothing here sums up; auto and detailed give the whole reasoning as the summary"
_REFUSED_IN_REASONING = {
    "mode": Refusal("there is one mode", ("standard",)),
    "context": Refusal("the chat template decides what earlier reasoning is read", ("auto",)),
    "summary": Refusal(_NO_SUMMARY, ("auto", "detailed")),
    "generate_summary": Refusal(_NO_SUMMARY, ("auto", "detailed")),
}
_REFUSED_IN_TEXT = {"verbosity": REFUSED_IN_CHAT["verbosity"]}


class ResponseStreamOptions(StreamOptions):
    """`stream_options`: usage always comes at the end, so nothing asks for anything here."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    include_obfuscation: bool | None = False


class FunctionTool(BaseModel):
    """A function that the caller runs."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_chat(self) -> Json:
        """The tool as a chat completion has it; without nulls."""
        given = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }
        function = {name: value for name, value in given.items() if value is not None}
        return {"type": "function", "function": function}


class ResponsesRequest(GenerationRequest):
    """The body of `POST /v1/responses`."""

    refused = (REFUSED_IN_RESPONSES,)

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=_INT64)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1, lt=_INT64)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncation: str | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    stream_options: ResponseStreamOptions | None = None

    @field_validator("input")
    @classmethod
    def _something(cls, value: str | list[Json]) -> str | list[Json]:
        if not value:
            raise ValueError(f"must not be empty, got {shown(value)}")
        return value

    @field_validator("include")
    @classmethod
    def _known(cls, value: list[str] | None) -> list[str] | None:
        for wanted in value or ():
            if wanted not in (LOGPROBS, ENCRYPTED):
                raise ValueError(
                    f"{shown(wanted)} is of what is not offered here; use {LOGPROBS} or {ENCRYPTED}"
                )
        return value

    @field_validator("truncation")
    @classmethod
    def _known_truncation(cls, value: str | None) -> str | None:
        if value not in (None, "auto", "disabled"):
            raise ValueError(f"must be auto or disabled, got {shown(value)}")
        return value

    @field_validator("metadata")
    @classmethod
    def _small(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        if value is not None and len(value) > _MAX_METADATA:
            raise ValueError(f"must have at most {_MAX_METADATA} pairs, got {len(value)}")
        for key, text in (value or {}).items():
            if len(key) > _MAX_METADATA_KEY_CHARS:
                raise ValueError(
                    f"keys have at most {_MAX_METADATA_KEY_CHARS} characters, got {shown(key)}"
                )
            if len(text) > _MAX_METADATA_VALUE_CHARS:
                raise ValueError(
                    f"values have at most {_MAX_METADATA_VALUE_CHARS} characters, got {len(text)} "
                    f"for {shown(key)}"
                )
        return value

    @model_validator(mode="after")
    def _parts_are_known(self) -> Self:
        _refuse_within("reasoning", self.reasoning, _REFUSED_IN_REASONING)
        _refuse_within("text", self.text, _REFUSED_IN_TEXT)
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise ValueError(
                "stream_options.include_obfuscation: events are not padded, got true; leave it out"
            )
        if self.effort is not None and not isinstance(self.effort, str):
            raise ValueError(f"reasoning.effort: must be a string, got {shown(self.effort)}")
        return self

    @model_validator(mode="after")
    def _known_constraints(self) -> Self:
        if self.response_format_of_text is not None:
            _renamed("text.format", check_response_format, self.response_format_of_text)
        tools = self.chat_tools
        names = [tool["function"]["name"] for tool in tools or ()]
        for name in named_in_chat(self.tools or ()):
            if names.count(name) > 1:
                raise ValueError(f"tools: several are called {shown(name)}; rename one")
        if self.tool_choice is not None:
            check_tool_choice(self._choice(), tools or ())
        return self

    @model_validator(mode="after")
    def _kept_when_in_the_background(self) -> Self:
        if self.background and self.store is False:
            raise ValueError(
                "background: needs store, for its answer is fetched later; got store false, leave "
                "it out"
            )
        return self

    @property
    def effort(self) -> Any:  # noqa: ANN401 - as sent
        """How much the model shall think, None when nothing is said."""
        return (self.reasoning or {}).get("effort")

    @property
    def summary(self) -> str | None:
        """As what kind of summary reasoning is wanted; None: as its text."""
        given = self.reasoning or {}
        asked = given.get("summary") or given.get("generate_summary")
        return None if asked is None else str(asked)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text's tokens come with log-probabilities; a number of them asks too."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def format(self) -> Json:
        """`text.format`, plain text by default."""
        given = (self.text or {}).get("format")
        if given is None:
            return {"type": "text"}
        if not isinstance(given, dict):
            raise ValueError(f"text.format: must be an object, got {shown(given)}")
        return given

    @property
    def response_format_of_text(self) -> Json | None:
        """`text.format` as a chat completion's `response_format`; None for plain text."""
        given = self.format
        if given.get("type") == "text":
            return None
        if given.get("type") != "json_schema":
            return plain_response_format(given)
        schema = {name: value for name, value in given.items() if name != "type"}
        return {"type": "json_schema", "json_schema": schema}

    @property
    def chat_tools(self) -> list[Json] | None:
        """`tools` as a chat completion has them."""
        if self.tools is None:
            return None
        functions = [_functions(tool, f"tools[{at}]") for at, tool in enumerate(self.tools)]
        return [function.as_chat() for several in functions for function in several]

    @property
    def chat_tool_choice(self) -> str | Json | None:
        """`tool_choice` as a chat completion has it."""
        return None if self.tool_choice is None else self._choice()

    def _choice(self) -> str | Json:
        choice = self.tool_choice or "auto"
        if isinstance(choice, str) or "function" in choice or "allowed_tools" in choice:
            return choice
        if choice.get("type") == "function":
            return {"type": "function", "function": {"name": choice.get("name")}}
        if choice.get("type") == "allowed_tools":
            tools = choice.get("tools")
            listed = [_named(tool) for tool in tools] if isinstance(tools, list) else tools
            allowed = {"mode": choice.get("mode"), "tools": listed}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        raise ValueError(
            "tool_choice: must be none, auto, required, {type: function, name} or "
            f"{{type: allowed_tools, mode, tools}}, got {shown(choice)}"
        )

    def passed_on(self, body: Mapping[str, Any]) -> Json:
        """The body's fields that go to the tokenizer step under their own names."""
        return {
            name: value
            for name, value in body.items()
            if value is not None and name not in _TRANSLATED
        }


_TRANSLATED = frozenset(ResponsesRequest.__annotations__) - {"parallel_tool_calls"}
_TRANSLATED |= {"stream", "service_tier"}
"""Fields that the frontend acts on, or says in a chat completion's words."""


def chat_name(namespace: str | None, name: str) -> str:
    """What a function is called in the chat, which knows no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def named_in_chat(tools: Sequence[Json]) -> dict[str, tuple[str, str]]:
    """The name in the chat of each function that stands in a namespace -> namespace and name."""
    return {
        chat_name(tool["name"], function["name"]): (tool["name"], function["name"])
        for tool in tools
        if tool["type"] == "namespace"
        for function in tool["tools"]
    }


def _functions(tool: Json, place: str) -> list[FunctionTool]:
    """The functions of a tool: itself, or those of a namespace, each with what is said of that."""
    if tool.get("type") != "namespace":
        return [_tool(tool, place)]
    namespace, said, inner = (tool.get(name) for name in ("name", "description", "tools"))
    for name, value, kind, wanted in (
        ("name", namespace, str, "a string that is not empty"),
        ("tools", inner, list, "a list of at least one function"),
    ):
        if not value or not isinstance(value, kind):
            raise ValueError(f"{place}.{name}: must be {wanted}, got {shown(value)}")
    if not isinstance(said, str | None):
        raise ValueError(f"{place}.description: must be a string, got {shown(said)}")
    functions = []
    for at, given in enumerate(inner or ()):
        if not isinstance(given, dict):
            raise ValueError(f"{place}.tools[{at}]: must be an object, got {shown(given)}")
        function = _tool(given, f"{place}.tools[{at}]")
        description = "\n\n".join(filter(None, (said, function.description)))
        update = {"name": chat_name(namespace, function.name), "description": description or None}
        functions.append(function.model_copy(update=update))
    return functions


def _tool(tool: Json, place: str) -> FunctionTool:
    kind = tool.get("type")
    if kind != "function":
        raise ValueError(
            f"{place}.type: {shown(kind)} is not offered; only functions are, alone or in a "
            "namespace, which the caller runs"
        )
    _refuse_within(place, tool, REFUSED_IN_TOOLS)
    for name, types in (("name", str), ("description", str), ("parameters", dict)):
        value = tool.get(name)
        if (not value and name == "name") or not isinstance(value, types | None):
            wanted = {"name": "a string that is not empty", "parameters": "an object"}
            raise ValueError(
                f"{place}.{name}: must be {wanted.get(name, 'a string')}, got {shown(value)}"
            )
    if not isinstance(tool.get("strict"), bool | None):
        raise ValueError(f"{place}.strict: must be true or false, got {shown(tool['strict'])}")
    return FunctionTool.model_validate(tool)


def _named(tool: object) -> object:
    """A function of `allowed_tools` as a chat completion names it."""
    if isinstance(tool, dict) and tool.get("type") == "function" and "name" in tool:
        return {"type": "function", "function": {"name": tool["name"]}}
    return tool


def _refuse_within(place: str, value: Json | None, table: Mapping[str, Refusal]) -> None:
    if value is not None:
        refuse(
            {f"{place}.{name}": inner for name, inner in value.items()},
            {f"{place}.{name}": refusal for name, refusal in table.items()},
        )


def _renamed(name: str, check: Callable[[Json], None], value: Json) -> None:
    """Run a check of a chat completion's field and speak of it by this API's name."""
    try:
        check(value)
    except ValueError as error:
        raise ValueError(f"{name}: {str(error).replace('json_schema.schema', 'schema')}") from None
