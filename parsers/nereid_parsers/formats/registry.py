"""Finds formats by name. The names are the parser names of vLLM and SGLang.

In a name, `-`, `.` and `_` are equivalent. A module of this folder declares one or more model
families in a dict REASONING, a dict TOOLS or both. The module is imported when one of its names is
looked up. names.py maps the names to the modules.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module

from nereid_parsers.declarations import Messages, Sections, Source
from nereid_parsers.errors import FormatError, UnknownFormatError
from nereid_parsers.format import Format
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry
from nereid_parsers.formats.names import (
    REASONING_ALIASES,
    REASONING_MODULES,
    TOOL_ALIASES,
    TOOL_MODULES,
)
from nereid_parsers.policy import LENIENT, Policy


def normalize(name: str) -> str:
    """Return the spelling that the tables use for a name. Example: `Qwen-2.5` gives `qwen_2_5`."""
    return name.strip().lower().replace("-", "_").replace(".", "_")


@lru_cache(maxsize=1024)
def get_format(
    name: str | None = None,
    *,
    reasoning: str | None = None,
    tools: str | None = None,
    policy: Policy = LENIENT,
) -> Format:
    """Return the format with the given name, or combine a reasoning name with a tool name.

    Examples: `get_format("gpt_oss")`, `get_format(reasoning="qwen3", tools="hermes")`.

    Args:
        name: A reasoning name, a tool name, or a name that is both. If it is both, the format
            contains both parts.
        reasoning: The name of the reasoning part.
        tools: The name of the tool calls.
        policy: The policy of the format.

    Raises:
        UnknownFormatError: A name is not registered.
        FormatError: No name is given, `name` is given together with another name, or the two parts
            cannot be combined.
    """
    if name is not None:
        if reasoning is not None or tools is not None:
            raise FormatError(
                "get_format() accepts either one name, as in get_format('qwen3'), or the keyword "
                "arguments reasoning and tools, but not both"
            )
        reasoning = name if _find(name, REASONING_ALIASES, REASONING_MODULES) else None
        tools = name if _find(name, TOOL_ALIASES, TOOL_MODULES) else None
        if reasoning is None and tools is None:
            raise _unknown_format(name, (*REASONING_MODULES, *TOOL_MODULES))
    if reasoning is None and tools is None:
        raise FormatError(
            "get_format() requires the name of a format, for example get_format('hermes') or "
            "get_format(reasoning='qwen3', tools='hermes')"
        )
    label = name or "+".join(part for part in (reasoning, tools) if part)
    reasoning_part = reasoning_entry(reasoning) if reasoning is not None else None
    tool_part = tool_entry(tools) if tools is not None else None
    if reasoning_part is None and tool_part is not None:
        reasoning_part = tool_part.reasoning
    return _combine(normalize(label), reasoning_part, tool_part, policy)


def reasoning_entry(name: str) -> ReasoningEntry:
    """Return the entry of a reasoning name. Raise UnknownFormatError if no entry has this name."""
    key = _find(name, REASONING_ALIASES, REASONING_MODULES)
    if key is None:
        raise _unknown_format(name, REASONING_MODULES)
    entry = import_module(f"nereid_parsers.formats.{REASONING_MODULES[key]}").REASONING[key]
    assert isinstance(entry, ReasoningEntry)
    return entry


def tool_entry(name: str) -> ToolEntry:
    """Return the entry of a tool name. Raise UnknownFormatError if no entry has this name."""
    key = _find(name, TOOL_ALIASES, TOOL_MODULES)
    if key is None:
        raise _unknown_format(name, TOOL_MODULES)
    entry = import_module(f"nereid_parsers.formats.{TOOL_MODULES[key]}").TOOLS[key]
    assert isinstance(entry, ToolEntry)
    return entry


def format_names() -> list[str]:
    """Return all names that `get_format` accepts, including aliases, in alphabetical order."""
    tables = (REASONING_MODULES, TOOL_MODULES, REASONING_ALIASES, TOOL_ALIASES)
    return sorted({name for table in tables for name in table})


@dataclass(frozen=True, slots=True)
class ListedName:
    """A registered name with its description, for the tables in the documentation.

    Attributes:
        name: The name.
        kind: "reasoning" or "tools".
        aliases: Other spellings of the name.
        source: The source of the declaration.
    """

    name: str
    kind: str
    aliases: tuple[str, ...]
    source: Source

    @property
    def label(self) -> str:
        """The name and its aliases, for example `hermes (= qwen, qwen25, qwen3_json)`."""
        return f"{self.name} (= {', '.join(self.aliases)})" if self.aliases else self.name


def listing() -> list[ListedName]:
    """Return all registered names: first the reasoning names, then the tool names, each sorted."""
    rows: list[ListedName] = []
    for name in sorted(REASONING_MODULES):
        aliases = _aliases_of(name, REASONING_ALIASES)
        rows.append(ListedName(name, "reasoning", aliases, reasoning_entry(name).source))
    for name in sorted(TOOL_MODULES):
        aliases = _aliases_of(name, TOOL_ALIASES)
        rows.append(ListedName(name, "tools", aliases, tool_entry(name).source))
    return rows


def _aliases_of(name: str, aliases: dict[str, str]) -> tuple[str, ...]:
    """Return the aliases of a name, in alphabetical order."""
    return tuple(sorted(alias for alias, target in aliases.items() if target == name))


def _find(name: str, aliases: dict[str, str], modules: dict[str, str]) -> str | None:
    """Return the registered name for a name or an alias, or None."""
    spelling = normalize(name)
    key = aliases.get(spelling, spelling)
    return key if key in modules else None


def _unknown_format(name: str, names: Iterable[str]) -> UnknownFormatError:
    """Return the error for a name that is not registered. Its message lists similar names."""
    similar = difflib.get_close_matches(normalize(name), list(names), n=4, cutoff=0.5)
    hint = f" Similar names: {', '.join(similar)}." if similar else ""
    return UnknownFormatError(
        f"There is no format with the name {name!r}.{hint} nereid_parsers.format_names() returns "
        "all names."
    )


def _combine(
    label: str,
    reasoning: ReasoningEntry | None,
    tools: ToolEntry | None,
    policy: Policy,
) -> Format:
    """Return the format that consists of a reasoning entry, a tool entry, or both."""
    entries = [entry for entry in (reasoning, tools) if entry is not None]
    sources = tuple(dict.fromkeys(entry.source for entry in entries))
    ends = tuple(dict.fromkeys(end for entry in entries for end in entry.ends))
    message_layouts = {entry.part for entry in entries if isinstance(entry.part, Messages)}
    if message_layouts:
        layout = message_layouts.pop()
        if any(entry.part != layout for entry in entries):
            has_reasoning_layout = reasoning is not None and isinstance(reasoning.part, Messages)
            reasoning_name, _, tool_name = label.partition("+")
            name = reasoning_name if has_reasoning_layout else tool_name
            raise FormatError(
                f"The formats in {label} cannot be combined, because {name} describes whole "
                "messages, including their reasoning and their tool calls. Use this format alone: "
                f"get_format({name!r})."
            )
        return Format(label, layout, policy, ends, sources=sources)
    sections = Sections(
        reasoning=reasoning.part if reasoning else None,  # type: ignore[arg-type]  # no Messages
        content=reasoning.content if reasoning else None,
        tools=tools.part if tools else None,  # type: ignore[arg-type]  # no Messages
    )
    return Format(label, sections, policy, ends, sources=sources)
