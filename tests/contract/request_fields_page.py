"""Generate the pages on request fields from the declarations of the fields.

The pages are docs/reference/request-fields.md and docs/history/refused-fields.md. To write them:

PYTHONPATH=tests python tests/contract/request_fields_page.py
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from nereid_backend.serving.tokenizer.unsupported_fields import _REFUSALS as BACKEND
from nereid_client.protocol import refused
from nereid_client.protocol.common_fields import GenerationRequest, Origin
from nereid_client.protocol.generation_requests import ChatCompletionRequest, CompletionRequest
from nereid_client.protocol.responses_request import REFUSED_IN_RESPONSES, ResponsesRequest
from nereid_client.protocol.responses_tools import REFUSED_IN_TOOLS
from pydantic import BaseModel
from pydantic.fields import FieldInfo

TARGET = Path(__file__).parents[2] / "docs" / "reference" / "request-fields.md"

REFUSED_TARGET = TARGET.parents[1] / "history" / "refused-fields.md"

REFUSED_HEAD = """# Refused request fields

A request with one of these fields gets status 400. The error message contains the text of the column "Reason". A request with a value of the column "Accepted values", or with `null`, is accepted.

| Field | Refused by | Accepted values | Reason |
|---|---|---|---|
"""  # noqa: E501 - one line of the page for each paragraph

HEAD = """# Request fields

The tables list every field that `/v1/chat/completions`, `/v1/completions` and `/v1/responses` accept or reject.

- The column "Origin" names the API that introduced the field, if this is not OpenAI's API.
- A request with a wrong value or a rejected field gets status 400.
- A field with the value `null` counts as omitted.
- A whole number may have a decimal point, for example `5.0`.
- Unknown fields are ignored. However, a name that is almost the name of a known field is rejected, for example `max_token` or `maxTokens`.
- Triton clients send the same fields in the tensors `chat_request` and `sampling_parameters`. There, numbers and booleans can be given as text, such as `"0.7"`, and unknown fields in `sampling_parameters` are rejected.
"""  # noqa: E501 - one line of the page for each paragraph

GRAMMARS = """
Only one of `response_format`, `structured_outputs`, `regex`, `ebnf`, `json_schema` and `grammar` can be used in a request. The page [Constrain output](../how-to/constrain-output.md) has examples.
"""  # noqa: E501 - as above

RESPONSES = """
`/v1/responses` also accepts {shared} with the values of a chat request, and the sampling fields of the first table.
"""  # noqa: E501 - as above

REJECTED = """
## Rejected fields

Nereid rejects these fields, because ignoring a field could change the meaning of the request. The error message gives the reason or an alternative. Values that turn a feature off, such as `false` or `[]`, are accepted.

"""  # noqa: E501 - as above

ANSWER = """
## Fields of the answer

| Field | Origin | Meaning |
|---|---|---|
| `finish_reason` |  | The reason why generation ended: `stop`, `length`, `tool_calls` or `abort`. |
| `stop_reason`, `matched_stop` | vLLM, SGLang | The stop string or token id that ended generation. |
| `reasoning`, `reasoning_content` | vLLM, SGLang | The reasoning text, under both names. |
| `usage` |  | Token counts, including `cached_tokens` and `reasoning_tokens`. |
| `error` |  | An object with `message`, `type`, `param` and `code`. |
"""  # noqa: E501 - as above

TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "text",
    list: "list",
    dict: "object",
}


def own_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields that a request class declares, without the fields that it inherits."""
    names = model.__annotations__
    return {name: field for name, field in model.model_fields.items() if name in names}


def field_table(fields: Mapping[str, FieldInfo]) -> str:
    """Return a Markdown table that describes the fields."""
    lines = ["| Field | Origin | Value | Meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        origins = [item.value for item in field.metadata if isinstance(item, Origin)]
        meaning = " ".join((field.description or "").split())
        lines.append(f"| `{name}` | {', '.join(origins)} | {value_of(field)} | {meaning} |")
    return "\n".join(lines) + "\n"


def value_of(field: FieldInfo) -> str:
    """Return the type and the range of a field's value, for example "integer, 1 … 64"."""
    if field.annotation is Any:  # the field has no type, because the backend checks its value
        return ""
    is_union = get_origin(field.annotation) in (Union, UnionType)
    alternatives = get_args(field.annotation) if is_union else (field.annotation,)
    names = []
    for alternative in alternatives:
        is_annotated = get_origin(alternative) is Annotated
        type_ = get_args(alternative)[0] if is_annotated else alternative
        if get_origin(type_) is Literal:
            type_ = str  # all Literal values are strings
        if type_ is not type(None):
            names.append(TYPES.get(get_origin(type_) or type_, "object"))
    return f"{' or '.join(names)}{range_of(field)}"


def range_of(field: FieldInfo) -> str:
    """Return the range of a numeric field, for example ", 1 … 64" or " > 0"."""
    limits = {
        name: getattr(constraint, name)
        for constraint in field.metadata
        for name in ("ge", "gt", "le", "lt")
        if getattr(constraint, name, None) is not None
    }
    # The limits of 32-bit and 64-bit integers only prevent overflows, so the page omits them.
    limits = {name: limit for name, limit in limits.items() if abs(limit) < 2**31}
    match limits:
        case {"ge": low, "le": high}:
            return f", {low} … {high}"
        case {"gt": low, "le": high}:
            return f" > {low}, ≤ {high}"
        case {"ge": low}:
            return f" ≥ {low}"
        case {"gt": low}:
            return f" > {low}"
    return ""


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _rejected_fields() -> dict[str, Iterable[str]]:
    """Return the fields that are rejected: names of the routes -> names of the fields."""
    in_chat = refused.REFUSED_IN_CHAT.keys()
    in_responses = REFUSED_IN_RESPONSES.keys() | REFUSED_IN_TOOLS.keys()
    accepted_in_responses = ResponsesRequest.model_fields.keys()
    return {
        "chat, completions and responses": [*refused.REFUSED, *refused.REFUSED_BY_BACKEND],
        "chat and responses": in_chat - accepted_in_responses,
        "chat": in_chat & accepted_in_responses,
        "completions": refused.REFUSED_IN_COMPLETIONS,
        "responses": in_responses - in_chat,
    }


def text() -> str:
    """Return the text of docs/reference/request-fields.md."""
    responses, chat = own_fields(ResponsesRequest), own_fields(ChatCompletionRequest)
    shared = {
        name
        for name, field in responses.items()
        if name in chat and field.description == chat[name].description
    }
    sections = [
        HEAD,
        f"\n## Chat and completions\n\n{field_table(own_fields(GenerationRequest))}",
        GRAMMARS,
        f"\n## Chat only\n\n{field_table(chat)}",
        f"\n## Completions only\n\n{field_table(own_fields(CompletionRequest))}",
        f"\n## Responses only\n"
        f"{RESPONSES.format(shared=_quoted(shared))}\n"
        f"{field_table({name: responses[name] for name in responses if name not in shared})}",
        REJECTED,
        *(f"- By {routes}: {_quoted(names)}.\n" for routes, names in _rejected_fields().items()),
        ANSWER,
    ]
    return "".join(sections)


def refused_text() -> str:
    """Return the text of docs/history/refused-fields.md, which gives a reason for each refusal."""
    tables = (
        ("all three endpoints", refused.REFUSED),
        ("all three endpoints", {name: BACKEND[name] for name in refused.REFUSED_BY_BACKEND}),
        ("chat", refused.REFUSED_IN_CHAT),
        ("completions", refused.REFUSED_IN_COMPLETIONS),
        ("responses", REFUSED_IN_RESPONSES),
        ("tools of responses", REFUSED_IN_TOOLS),
    )
    # A field that several endpoints refuse for the same reason has only one row.
    endpoints_of: dict[tuple[str, str, str], list[str]] = {}
    for endpoint, table in tables:
        for name, refusal in table.items():
            accepted = getattr(refusal, "harmless", None) or getattr(refusal, "accepted", ())
            values = ", ".join(f"`{json.dumps(value)}`" for value in accepted)
            endpoints_of.setdefault((name, values, refusal.reason), []).append(endpoint)
    rows = (
        f"| `{name}` | {', '.join(endpoints)} | {values} | {reason} |\n"
        for (name, values, reason), endpoints in sorted(endpoints_of.items())
    )
    return REFUSED_HEAD + "".join(rows)


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
    REFUSED_TARGET.write_text(refused_text(), encoding="utf-8")
