"""Finds a chat format by its name. The names match the parser names of vLLM and SGLang.

In a name, `-`, `.` and `_` are equivalent. Each module of this folder declares the formats of some
model families in a dict REASONING, in a dict TOOLS, or in both dicts.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from nereid_parsers.declarations import Messages, Sections, Source
from nereid_parsers.errors import FormatError, UnknownFormatError
from nereid_parsers.format import Format
from nereid_parsers.formats import (
    arrays,
    channels,
    cohere,
    deepseek,
    gemma,
    glm,
    gpt_oss,
    granite,
    hermes,
    kimi,
    llama,
    minimax,
    mistral,
    pythonic,
    qwen,
    step,
    think,
)
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry
from nereid_parsers.policy import LENIENT, Policy

# Descriptions of how models write reasoning (REASONING) and tool calls (TOOLS). The keys are the
# names of the chat formats.
REASONING: dict[str, ReasoningEntry] = (
    arrays.REASONING | channels.REASONING | cohere.REASONING | deepseek.REASONING
    | gemma.REASONING | glm.REASONING | gpt_oss.REASONING | granite.REASONING | kimi.REASONING
    | minimax.REASONING | mistral.REASONING | qwen.REASONING | step.REASONING | think.REASONING
)  # fmt: skip
TOOLS: dict[str, ToolEntry] = (
    arrays.TOOLS | channels.TOOLS | cohere.TOOLS | deepseek.TOOLS | gemma.TOOLS | glm.TOOLS
    | gpt_oss.TOOLS | granite.TOOLS | hermes.TOOLS | kimi.TOOLS | llama.TOOLS | minimax.TOOLS
    | mistral.TOOLS | pythonic.TOOLS | qwen.TOOLS | step.TOOLS
)  # fmt: skip

# Each key is an alias of a chat format, and each value is the registered name of the format.
REASONING_ALIASES = {
    "apertus": "apertus2509",
    "deepseek": "deepseek_r1",
    "deepseek_v3_0324": "deepseek_v3",
    "deepseek_v3_1": "deepseek_v3",
    "hunyuan": "hy_v3",
    "minimax": "minimax_m2",
    "minimax_append_think": "minimax_m2_append_think",
    "muse_glimmer": "muse",
    "musespark1x": "muse",
    "nano_v3": "nemotron_v3",
    "nemotron_3": "nemotron_v3",
    "openai_gptoss": "gpt_oss",
}

TOOL_ALIASES = {
    "apertus2509": "apertus",
    "deepseek": "deepseek_v3",
    "deepseek_r1": "deepseek_v3",
    "deepseek_v3_0324": "deepseek_v3",
    "deepseek_v3_1": "deepseek_v31",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "deepseekv41": "deepseek_v41",
    "glm": "glm45",
    "hunyuan": "hy_v3",
    "llama3": "llama3_json",
    "muse_glimmer": "muse",
    "musespark1x": "muse",
    "openai": "gpt_oss",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
}


def normalize(name: str) -> str:
    """Return the normalised form of a name. Example: `Qwen-2.5` gives `qwen_2_5`."""
    return name.strip().lower().replace("-", "_").replace(".", "_")


@lru_cache(maxsize=1024)
def get_format(
    name: str | None = None,
    *,
    reasoning: str | None = None,
    tools: str | None = None,
    policy: Policy = LENIENT,
) -> Format:
    """Return the chat format `name`, or combine the formats `reasoning` and `tools`.

    A caller passes either `name`, or one or both of `reasoning` and `tools`. Examples:
    `get_format("gpt_oss")`, `get_format(reasoning="qwen3", tools="hermes")`.

    Args:
        name: A name of a reasoning, of tool calls, or of both. The format contains all parts that
            have this name.
        reasoning: The name of the reasoning. If None, the format has the reasoning that the entry
            of the tool calls declares, or no reasoning.
        tools: The name of the tool calls, or None for a format without tool calls.
        policy: The policy of the format.

    Raises:
        UnknownFormatError: A name is not registered.
        FormatError: No name is given, `name` is given together with another name, or the two parts
            cannot be combined.
    """
    _check_names(name, reasoning, tools)
    if name is not None:
        label = name
        entries = _entries_with_name(name)
    else:
        label = "+".join(part for part in (reasoning, tools) if part)
        entries = _entries_of_parts(reasoning, tools)
    return _combine(normalize(label), entries.with_default_reasoning(), policy)


class _Entries(NamedTuple):
    """The description of the reasoning and the description of the tool calls of a format."""

    reasoning: ReasoningEntry | None
    tools: ToolEntry | None

    @property
    def all(self) -> list[ReasoningEntry | ToolEntry]:
        """The entries that are not None."""
        return [entry for entry in self if entry is not None]

    def with_default_reasoning(self) -> _Entries:
        """Return a copy in which a default from `tools` replaces a missing `reasoning`.

        The default is the reasoning of the same model family, or None, see `ToolEntry.reasoning`.
        """
        if self.reasoning is None and self.tools is not None:
            return self._replace(reasoning=self.tools.reasoning)
        return self


def _entries_with_name(name: str) -> _Entries:
    """Return the descriptions of reasoning and of tool calls that have the name or alias `name`.

    Example: "hermes" gives only a description of tool calls.

    Raises:
        UnknownFormatError: There is no description with this name.
    """
    reasoning = REASONING.get(_key(name, REASONING_ALIASES))
    tools = TOOLS.get(_key(name, TOOL_ALIASES))
    if reasoning is None and tools is None:
        raise _unknown_format(name, {**REASONING, **TOOLS})
    return _Entries(reasoning, tools)


def _entries_of_parts(reasoning: str | None, tools: str | None) -> _Entries:
    """Return the description of the reasoning, and the description of the tool calls.

    `reasoning` and `tools` are the names of the two descriptions, or None.

    Raises:
        UnknownFormatError: There is no description with one of the names.
        FormatError: The two descriptions cannot be combined.
    """
    entries = _Entries(
        reasoning=None if reasoning is None else _find_reasoning(reasoning),
        tools=None if tools is None else _find_tools(tools),
    )
    if reasoning is not None and tools is not None:
        _check_combinable(reasoning, tools)
    return entries


def _check_names(name: str | None, reasoning: str | None, tools: str | None) -> None:
    """Raise FormatError if all names are None, or if `name` is combined with another name."""
    has_part_name = reasoning is not None or tools is not None
    if name is None and not has_part_name:
        raise FormatError(
            "get_format() requires the name of a format, for example get_format('hermes') or "
            "get_format(reasoning='qwen3', tools='hermes')"
        )
    if name is not None and has_part_name:
        raise FormatError(
            "get_format() accepts one name, as in get_format('qwen3'), or the keyword "
            "arguments reasoning and tools. Remove the name or the keyword arguments."
        )


def _key(name: str, aliases: Mapping[str, str]) -> str:
    """Return the registered name for a name or an alias: the alias `Qwen25` gives `hermes`.

    A name that is not a key of `aliases` is only normalised, so the result may be a name that is
    not registered.
    """
    normal = normalize(name)
    return aliases.get(normal, normal)


def _find_reasoning(name: str) -> ReasoningEntry:
    """Return the `ReasoningEntry` with the given name, or raise UnknownFormatError."""
    entry = REASONING.get(_key(name, REASONING_ALIASES))
    if entry is None:
        raise _unknown_format(name, REASONING)
    return entry


def _find_tools(name: str) -> ToolEntry:
    """Return the `ToolEntry` with the given name, or raise UnknownFormatError."""
    entry = TOOLS.get(_key(name, TOOL_ALIASES))
    if entry is None:
        raise _unknown_format(name, TOOLS)
    return entry


def format_names() -> list[str]:
    """Return all names that `get_format` accepts, including aliases, in alphabetical order."""
    return sorted({*REASONING, *TOOLS, *REASONING_ALIASES, *TOOL_ALIASES})


@dataclass(frozen=True, slots=True)
class ListedName:
    """The name and the aliases of a chat format, for the tables in the documentation.

    Attributes:
        name: The registered name.
        kind: "reasoning" or "tools".
        aliases: The aliases of the name.
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
    """Return all reasoning formats and then all tool call formats, each group sorted by name."""
    reasoning = [
        ListedName(name, "reasoning", _aliases_of(name, REASONING_ALIASES), entry.source)
        for name, entry in sorted(REASONING.items())
    ]
    tools = [
        ListedName(name, "tools", _aliases_of(name, TOOL_ALIASES), entry.source)
        for name, entry in sorted(TOOLS.items())
    ]
    return reasoning + tools


def _aliases_of(name: str, aliases: dict[str, str]) -> tuple[str, ...]:
    """Return the aliases of a name, in alphabetical order."""
    return tuple(sorted(alias for alias, target in aliases.items() if target == name))


def _unknown_format(name: str, names: Iterable[str]) -> UnknownFormatError:
    """Return the error for a name that is not registered. The error message lists similar names."""
    similar = difflib.get_close_matches(normalize(name), list(names), n=4, cutoff=0.5)
    hint = f" Similar names: {', '.join(similar)}." if similar else ""
    return UnknownFormatError(
        f"There is no format with the name {name!r}.{hint} The command `python -m nereid_parsers "
        "formats` lists all names."
    )


def _combine(label: str, entries: _Entries, policy: Policy) -> Format:
    """Combine a description of reasoning and a description of tool calls into one `Format`.

    Example: the entries of "qwen3" and "hermes" give a format with the reasoning of "qwen3" and the
    tool calls of "hermes". The format has the sources and the end-of-turn tokens of both entries.
    `label` is the name of the format.
    """
    # A source is the document from which an entry was derived. `dict.fromkeys` removes duplicates
    # and keeps the order.
    sources = dict.fromkeys(entry.source for entry in entries.all)
    ends = dict.fromkeys(token for entry in entries.all for token in entry.ends)
    layout = _layout_of(entries)
    return Format(label, layout, policy=policy, ends=tuple(ends), sources=tuple(sources))


def _layout_of(entries: _Entries) -> Sections | Messages:
    """Return the layout of a format: the markers of the reasoning, content and tool calls.

    If an entry describes whole messages, including reasoning and tool calls, its `Messages` are the
    layout. The part that the other entry describes is then not used.
    """
    reasoning_part = entries.reasoning.part if entries.reasoning is not None else None
    tools_part = entries.tools.part if entries.tools is not None else None
    if isinstance(reasoning_part, Messages):
        return reasoning_part
    if isinstance(tools_part, Messages):
        return tools_part
    content = entries.reasoning.content if entries.reasoning is not None else None
    return Sections(reasoning=reasoning_part, content=content, tools=tools_part)


def _check_combinable(reasoning: str, tools: str) -> None:
    """Raise FormatError if the formats with the names `reasoning` and `tools` cannot be combined.

    A format that describes whole messages declares both the reasoning and the tool calls, so it
    cannot be combined with another format.
    """
    reasoning_part = _find_reasoning(reasoning).part
    tools_part = _find_tools(tools).part
    if reasoning_part == tools_part:  # Both names select the same format.
        return
    for name, part in ((reasoning, reasoning_part), (tools, tools_part)):
        if isinstance(part, Messages):
            raise FormatError(
                f"The formats in {normalize(f'{reasoning}+{tools}')} cannot be combined, because "
                f"{normalize(name)} describes whole messages, including their reasoning and their "
                f"tool calls. Use this format alone: get_format({normalize(name)!r})."
            )
