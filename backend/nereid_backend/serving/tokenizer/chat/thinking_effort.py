# SPDX-License-Identifier: Apache-2.0
"""Reads the fields that control reasoning.

The fields set variables of the chat template and the budget of reasoning tokens.
"""

import contextlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from nereid_parsers import Format
from nereid_parsers.format import ReasoningGate, Sections

from nereid_backend.core.grammar import ThinkingSpec
from nereid_backend.errors import RequestError
from nereid_backend.request_field_checks import shown

# Chat templates use one of these variables to enable or disable reasoning.
_SWITCHES = ("enable_thinking", "thinking")
_SWITCH_TYPES = ("enabled", "adaptive", "disabled")
_EFFORT = "reasoning_effort"
_NO_EFFORT = "none"
_MAX_EFFORT_CHARS = 32
_UNLIMITED = -1
# A message to the engine cannot contain arbitrarily large numbers. If a request has a reasoning
# budget above `_LARGEST_BUDGET`, replace the budget by `_LARGEST_BUDGET`. The output stays the
# same, because every output has fewer than `_LARGEST_BUDGET` tokens.
_LARGEST_BUDGET = 2**31 - 1


def read_template_kwargs(body: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Return the chat template variables that a request sets.

    The fields `reasoning_effort`, `thinking`, `documents` and `chat_template_kwargs` set variables.
    chat_template_kwargs overrides the other fields. Example: if the template has the variable
    enable_thinking, `{"reasoning_effort": "none"}` returns `{"enable_thinking": False}`.

    Args:
        body: the chat completion's fields.
        template: the source of the chat template. The source determines which variables exist.

    Raises:
        RequestError: a value is wrong, or the template has no variable for a value.
    """
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping):
        raise RequestError(
            "chat_template_kwargs: the value must be an object, but the request has "
            f"{shown(given)}."
        )
    return {
        **_effort_variables(body.get(_EFFORT), template),
        **_thinking_variables(body.get("thinking"), template),
        **_document_variables(body.get("documents"), template),
        **given,
    }


def has_variable(template: str, variable: str) -> bool:
    """Return whether the code of a chat template reads the variable with the name `variable`.

    The name in plain text, in a string literal, in a comment or after a dot does not count, and
    neither does a name to which a value is assigned. Examples for the variable "thinking": `{% if
    thinking %}` returns True. `{{ "thinking" }}`, `{{ message.thinking }}` and `{% set ns =
    namespace(thinking=true) %}` return False.
    """
    return variable in _names_in_code(template)


@lru_cache(maxsize=8)
def _names_in_code(template: str) -> frozenset[str]:
    """Return the names that the code of a chat template reads, including Jinja's keywords.

    Return an empty set if the template has a syntax error. Rendering then reports the error.
    """
    # The module is imported here, because only chat requests need jinja2.
    from jinja2 import Environment, TemplateSyntaxError

    try:
        lexed = list(Environment().lex(template))
    except TemplateSyntaxError:
        return frozenset()
    tokens = [(kind, text) for _line, kind, text in lexed if kind != "whitespace"]
    end = ("", "")
    names = set()
    for before, token, after in zip([end, *tokens], tokens, [*tokens[1:], end], strict=False):
        kind, text = token
        is_attribute = before[1] == "."  # such as `b` in `a.b`
        gets_value = after[1] == "="  # such as `b` in `set b = 1`, or in the call `a(b=1)`
        if kind == "name" and not is_attribute and not gets_value:
            names.add(text)
    return frozenset(names)


def read_thinking_budget(fields: Mapping[str, Any]) -> int | None:
    """Return the largest number of reasoning tokens that a request allows; None for no limit.

    These fields are read: thinking_token_budget (vLLM), custom_params.thinking_budget (SGLang),
    reasoning_budget_tokens (llama.cpp), thinking.budget_tokens (Anthropic).

    Raises:
        RequestError: a value is wrong, or two fields have different values.
    """
    thinking = fields.get("thinking")
    thinking_fields = thinking if isinstance(thinking, Mapping) else {}
    values = {
        "thinking_token_budget": fields.get("thinking_token_budget"),
        "custom_params.thinking_budget": _custom_params(fields).get("thinking_budget"),
        "reasoning_budget_tokens": fields.get("reasoning_budget_tokens"),
        "thinking.budget_tokens": thinking_fields.get("budget_tokens"),
    }
    budgets = {
        name: _read_budget(name, value) for name, value in values.items() if value is not None
    }
    if not budgets:
        return None
    distinct_budgets = set(budgets.values())
    if len(distinct_budgets) > 1:
        raise RequestError(
            f"the fields {' and '.join(budgets)} have different values. Send only one of them."
        )
    return distinct_budgets.pop()


def build_thinking_spec(
    budget: int | None, fmt: Format | None, prompt: str, encode: Callable[[str], list[int]]
) -> ThinkingSpec | None:
    """Convert a reasoning budget to the engine's ThinkingSpec. Return None if there is no budget.

    The engine counts the tokens of the reasoning. If the reasoning reaches the budget, the engine
    forces the tokens that end the reasoning, such as `</think>`, and the model then answers. If the
    answer cannot contain reasoning, the budget has no effect.

    Args:
        budget: the largest number of reasoning tokens.
        fmt: the chat format of the checkpoint; None if the format is not known.
        prompt: the end of the rendered prompt. It determines whether reasoning is already open.
        encode: converts text to token ids. It converts markers to special tokens, and adds no
            tokens.

    Raises:
        RequestError: the text that ends reasoning is not known, so a budget cannot be enforced.
    """
    if budget is None:
        return None
    if fmt is None:
        raise _unknown_marker_error()
    # `gate` contains the markers before and after the reasoning, such as "<think>" and "</think>".
    gate = fmt.reasoning_gate(prompt)
    if gate is None:
        raise _unknown_marker_error()
    # The prompt has begun the reasoning and has not ended it, or the model may begin the reasoning.
    can_contain_reasoning = gate.is_open or gate.may_open
    return ThinkingSpec(
        # Without this marker, the engine never treats a token as reasoning.
        start=gate.start if can_contain_reasoning else "",
        end=gate.end,
        end_token_ids=tuple(encode(_end_of_reasoning(fmt, gate))),
        is_open=gate.is_open,
        budget=budget,
    )


def _unknown_marker_error() -> RequestError:
    """Return the error for a request with a reasoning budget that cannot be enforced.

    The budget cannot be enforced if the marker that ends the reasoning is not known.
    """
    return RequestError(
        "thinking_token_budget: the marker that ends reasoning is not known for this checkpoint, "
        "so a budget cannot be enforced. Set the server's reasoning_parser, or leave the field out."
    )


def _end_of_reasoning(fmt: Format, gate: ReasoningGate) -> str:
    """Return the text, such as "</think>", that the engine inserts to end the reasoning.

    If the layout of the format is not `Sections`, the reasoning is a separate message. The text
    then ends this message and starts the next message.
    """
    if isinstance(fmt.layout, Sections):
        return gate.end
    return gate.end + fmt.layout.start


def _effort_variables(effort: Any, template: str) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    """Return the template variables for `reasoning_effort`.

    The effort "none" sets the template's switches (enable_thinking, thinking) to false. Every other
    effort sets them to true. A template with the variable reasoning_effort also receives the
    effort, unless the effort "none" has set a switch. Examples:

        variables of the template            "none"                    "low"
        enable_thinking                      enable_thinking=False     enable_thinking=True
        reasoning_effort                     reasoning_effort="none"   reasoning_effort="low"
        enable_thinking, reasoning_effort    enable_thinking=False     both variables
    """
    if effort is None:
        return {}
    _check_effort(effort)
    is_on = effort != _NO_EFFORT
    switches = _switch_variables(template, is_on=is_on)
    # If a switch turns off the reasoning, the template does not receive the effort "none", because
    # many templates do not support this effort.
    needs_effort = is_on or not switches
    efforts = {_EFFORT: effort} if needs_effort and has_variable(template, _EFFORT) else {}
    if not switches and not efforts:
        raise RequestError(
            f"{_EFFORT}: this checkpoint's chat template has none of the variables "
            f"{', '.join((_EFFORT, *_SWITCHES))}, so the effort cannot be set. Leave the field out."
        )
    return switches | efforts


def _check_effort(effort: object) -> None:
    """Raise a RequestError if `effort` is not a short, nonempty text."""
    if not isinstance(effort, str) or not 0 < len(effort) <= _MAX_EFFORT_CHARS:
        raise RequestError(
            f"{_EFFORT}: the value must be a word such as none, low or high, but the request has "
            f"{shown(effort)}."
        )


def _thinking_variables(thinking: Any, template: str) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    """Return the template variables for the field `thinking` (SGLang, Anthropic).

    The type "disabled" sets the template's switches (enable_thinking, thinking) to false. The other
    types set them to true. Example: if the template has the variable enable_thinking, `{"type":
    "enabled"}` returns `{"enable_thinking": True}`. The text "enabled" has the same effect as the
    object `{"type": "enabled"}`.

    A template without a switch lets the model reason. "enabled" then returns {}, because nothing
    must be changed, and "disabled" is an error.
    """
    if thinking is None:
        return {}
    kind = thinking.get("type") if isinstance(thinking, Mapping) else thinking
    if kind not in _SWITCH_TYPES:
        raise RequestError(
            f"thinking: type must be one of {', '.join(_SWITCH_TYPES)}, but the request has "
            f"{shown(kind)}. Send other variables of the chat template in chat_template_kwargs."
        )
    is_disabled = kind == "disabled"
    variables = _switch_variables(template, is_on=not is_disabled)
    if is_disabled and not variables:
        raise RequestError(
            "thinking: this checkpoint's chat template has no variable that disables reasoning. "
            "Leave the field out."
        )
    return variables


def _switch_variables(template: str, *, is_on: bool) -> dict[str, Any]:
    """Return the template variables that turn reasoning on or off. The value of each is `is_on`.

    Example: if the template has the variable enable_thinking, and `is_on` is False, the result is
    `{"enable_thinking": False}`.
    """
    return {name: is_on for name in _SWITCHES if has_variable(template, name)}


def _document_variables(documents: Any, template: str) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    """Return the template variable `documents`: the texts that the model may use for its answer."""
    if documents is None:
        return {}
    if not isinstance(documents, list):
        raise RequestError(
            f"documents: the value must be a list, but the request has {shown(documents)}."
        )
    if not has_variable(template, "documents"):
        raise RequestError(
            "documents: this checkpoint's chat template does not read documents. Put their text "
            "into the messages."
        )
    return {"documents": documents}


def _custom_params(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Validate the field `custom_params`, and return its object; {} if the field is missing."""
    custom = fields.get("custom_params")
    if custom is None:
        return {}
    if not isinstance(custom, Mapping):
        raise RequestError(
            f"custom_params: the value must be an object, but the request has {shown(custom)}."
        )
    for name in custom:
        if name != "thinking_budget":
            raise RequestError(
                f"custom_params: the only supported key is thinking_budget, but the request has "
                f"{name}. Remove that key."
            )
    return custom


def _read_budget(name: str, value: Any) -> int | None:  # noqa: ANN401 - any JSON value
    """Validate the token budget `value`, and return it. Return None for -1, which means no limit.

    The value may be a number or the text of a number, such as 100 or "100". A budget that is too
    large for a message to the engine is reduced to `_LARGEST_BUDGET` (2**31 - 1). No output has so
    many tokens, so this has no effect on the output.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = int(value)
    # In Python, True and False are integers, too.
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < _UNLIMITED:
        raise RequestError(
            f"{name}: the value must be a number of tokens (-1 means no limit), but the request "
            f"has {shown(value)}."
        )
    return None if value == _UNLIMITED else min(value, _LARGEST_BUDGET)
