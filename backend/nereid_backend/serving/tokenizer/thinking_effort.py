# SPDX-License-Identifier: Apache-2.0
"""How much a request lets the model think: effort and switches of the template, token budgets."""

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from nereid_parsers import Format
from nereid_parsers.format import Sections

from nereid_backend.core.grammar import ThinkingSpec
from nereid_backend.errors import RequestError

# Variables with which chat templates switch thinking on and off.
_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_OFF = "none"
_MAX_EFFORT_CHARS = 32
_CODE = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


def template_kwargs(body: Mapping[str, Any], template: str) -> dict[str, Any]:
    """What the template is given for `reasoning_effort`, `thinking` and `chat_template_kwargs`.

    What chat_template_kwargs says itself goes first.

    Args:
        body: the chat completion's fields.
        template: the chat template's source, whose variables decide.

    Raises:
        RequestError: a wrong value, or one for which this template has no variable.
    """
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping):
        raise RequestError(f"chat_template_kwargs: must be an object, got {given!r}")
    found = _of_effort(body.get(_EFFORT), template) | _of_switch(body.get("thinking"), template)
    documents = body.get("documents")
    if documents is not None:
        if not isinstance(documents, list) or not knows(template, "documents"):
            raise RequestError(
                "documents: must be a list, and this checkpoint's chat template must read it; "
                "put them into the messages"
            )
        found["documents"] = documents
    return found | dict(given)


def knows(template: str, variable: str) -> bool:
    """Whether a template's source has a variable of this name, in its code and not in its text."""
    code = _STRING.sub("''", " ".join(_CODE.findall(template)))
    return re.search(rf"(?<![\w.]){variable}(?!\w)", code) is not None


def budget_of(fields: Mapping[str, Any]) -> int | None:
    """The most tokens that reasoning may have, under any of its names; None for no limit.

    Names: thinking_token_budget (vLLM), custom_params.thinking_budget (SGLang),
    reasoning_budget_tokens (llama.cpp), thinking.budget_tokens (Anthropic).

    Raises:
        RequestError: a wrong value, or several that differ.
    """
    said = {
        "thinking_token_budget": fields.get("thinking_token_budget"),
        "custom_params.thinking_budget": _custom(fields).get("thinking_budget"),
        "reasoning_budget_tokens": fields.get("reasoning_budget_tokens"),
        "thinking.budget_tokens": _inner(fields, "thinking", "budget_tokens"),
    }
    found = {name: _budget(name, value) for name, value in said.items() if value is not None}
    if len(set(found.values())) > 1:
        raise RequestError(f"{', '.join(found)}: say different budgets; send one of them")
    return next(iter(found.values()), None)


def thinking_spec(
    budget: int | None, fmt: Format | None, prompt: str, encode: Callable[[str], list[int]]
) -> ThinkingSpec | None:
    """How the engine keeps a budget; None where there is none to keep.

    Args:
        budget: at most so many tokens of reasoning.
        fmt: how the checkpoint writes.
        prompt: the rendered prompt.
        encode: text to token ids, markers as special tokens, nothing added.

    Raises:
        RequestError: the format has no reasoning whose end could be forced.
    """
    if budget is None:
        return None
    gate = None if fmt is None else fmt.reasoning_gate(prompt)
    if gate is None:
        raise RequestError(
            "thinking_token_budget: this checkpoint's chat format has no reasoning whose end is "
            "known (see reasoning_parser); leave it out"
        )
    end = gate.end
    if fmt is not None and not isinstance(fmt.layout, Sections):
        # Behind the end of a message the next one begins.
        end += fmt.layout.start
    return ThinkingSpec(
        start=gate.start if gate.is_open or gate.may_open else "",
        end=gate.end,
        end_token_ids=tuple(encode(end)),
        is_open=gate.is_open,
        budget=budget,
    )


def _of_effort(effort: Any, template: str) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    if effort is None:
        return {}
    if not isinstance(effort, str) or not 0 < len(effort) <= _MAX_EFFORT_CHARS:
        raise RequestError(f"{_EFFORT}: must be a word such as none, low or high, got {effort!r}")
    switches = [name for name in _SWITCHES if knows(template, name)]
    found: dict[str, Any] = dict.fromkeys(switches, effort != _OFF)
    if knows(template, _EFFORT) and not (effort == _OFF and switches):
        found[_EFFORT] = effort
    if not found:
        raise RequestError(
            f"{_EFFORT}: this checkpoint's chat template has no variable for it "
            f"({', '.join((_EFFORT, *_SWITCHES))}); leave it out"
        )
    return found


def _of_switch(thinking: Any, template: str) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    """`thinking: {"type": "enabled"}` as SGLang and Anthropic write it."""
    if thinking is None:
        return {}
    kind = thinking.get("type") if isinstance(thinking, Mapping) else thinking
    if kind not in ("enabled", "adaptive", "disabled"):
        raise RequestError(
            f"thinking: type must be enabled, adaptive or disabled, got {kind!r}; switches of the "
            "chat template go into chat_template_kwargs"
        )
    switches = [name for name in _SWITCHES if knows(template, name)]
    if not switches and kind == "disabled":
        raise RequestError("thinking: this checkpoint's chat template has no switch for it")
    return dict.fromkeys(switches, kind != "disabled")


def _custom(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    custom = fields.get("custom_params")
    if custom is None:
        return {}
    if not isinstance(custom, Mapping):
        raise RequestError(f"custom_params: must be an object, got {custom!r}")
    unknown = [name for name in custom if name != "thinking_budget"]
    if unknown:
        raise RequestError(
            f"custom_params: {unknown[0]} is not supported; only thinking_budget is known"
        )
    return custom


def _inner(fields: Mapping[str, Any], name: str, key: str) -> Any:  # noqa: ANN401 - any JSON value
    value = fields.get(name)
    return value.get(key) if isinstance(value, Mapping) else None


def _budget(name: str, value: Any) -> int | None:  # noqa: ANN401 - any JSON value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise RequestError(f"{name}: must be a number of tokens (-1 for no limit), got {value!r}")
    return None if value == -1 else value
