"""Formats by name: the reasoning and tool keys of vLLM and SGLang, `-` and `_` being equal.

Declarations live in one small module per family, found through the two tables below and imported
when a name of theirs is asked for. Each module has a `REASONING` and/or a `TOOLS` dict by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module

from nereid_parsers.errors import FormatError, UnknownFormatError
from nereid_parsers.format import LENIENT, Format, Messages, Policy, Sections, Source
from nereid_parsers.formats.entry import ReasoningEntry, ToolEntry
from nereid_parsers.formats.names import (
    REASONING_ALIASES,
    REASONING_MODULES,
    TOOL_ALIASES,
    TOOL_MODULES,
)


def normal(name: str) -> str:
    """The spelling under which a name is looked up."""
    return name.strip().lower().replace("-", "_").replace(".", "_")


@lru_cache(maxsize=1024)
def get_format(
    name: str | None = None,
    *,
    reasoning: str | None = None,
    tools: str | None = None,
    policy: Policy = LENIENT,
) -> Format:
    """The format of a name, or of a reasoning name and a tool name together.

    A single name that stands for both a way to reason and a way to call means both.

    Raises: UnknownFormatError for an unknown name; FormatError for two names that do not combine.
    """
    if name is not None:
        if reasoning is not None or tools is not None:
            raise FormatError("get_format: give a name, or reasoning= and tools=, not both")
        reasoning = name if _find(name, REASONING_ALIASES, REASONING_MODULES) else None
        tools = name if _find(name, TOOL_ALIASES, TOOL_MODULES) else None
        if reasoning is None and tools is None:
            raise _unknown(name, (*REASONING_MODULES, *TOOL_MODULES))
    if reasoning is None and tools is None:
        raise FormatError("get_format: needs a name")
    label = name or "+".join(part for part in (reasoning, tools) if part)
    thinking = reasoning_entry(reasoning) if reasoning is not None else None
    calling = tool_entry(tools) if tools is not None else None
    if thinking is None and calling is not None:
        thinking = calling.reasoning
    return _combine(normal(label), thinking, calling, policy)


def reasoning_entry(name: str) -> ReasoningEntry:
    """What is registered under a reasoning name. Raises: UnknownFormatError."""
    found = _find(name, REASONING_ALIASES, REASONING_MODULES)
    if found is None:
        raise _unknown(name, REASONING_MODULES)
    entry = import_module(f"nereid_parsers.formats.{REASONING_MODULES[found]}").REASONING[found]
    assert isinstance(entry, ReasoningEntry)
    return entry


def tool_entry(name: str) -> ToolEntry:
    """What is registered under a tool name. Raises: UnknownFormatError."""
    found = _find(name, TOOL_ALIASES, TOOL_MODULES)
    if found is None:
        raise _unknown(name, TOOL_MODULES)
    entry = import_module(f"nereid_parsers.formats.{TOOL_MODULES[found]}").TOOLS[found]
    assert isinstance(entry, ToolEntry)
    return entry


def format_names() -> list[str]:
    """Every name that `get_format` takes, aliases included, sorted."""
    tables = (REASONING_MODULES, TOOL_MODULES, REASONING_ALIASES, TOOL_ALIASES)
    return sorted({name for table in tables for name in table})


@dataclass(frozen=True, slots=True)
class Listed:
    """A registered name as a table shows it: `aliases` are other spellings of `name`."""

    name: str
    kind: str
    aliases: tuple[str, ...]
    source: Source

    @property
    def label(self) -> str:
        """The name, and its other spellings behind it."""
        return f"{self.name} (= {', '.join(self.aliases)})" if self.aliases else self.name


def listing() -> list[Listed]:
    """Every registered name: reasoning first, then tools, each sorted."""
    rows: list[Listed] = []
    for name in sorted(REASONING_MODULES):
        others = tuple(sorted(a for a, of in REASONING_ALIASES.items() if of == name))
        rows.append(Listed(name, "reasoning", others, reasoning_entry(name).source))
    for name in sorted(TOOL_MODULES):
        others = tuple(sorted(a for a, of in TOOL_ALIASES.items() if of == name))
        rows.append(Listed(name, "tools", others, tool_entry(name).source))
    return rows


def _find(name: str, aliases: dict[str, str], modules: dict[str, str]) -> str | None:
    spelled = normal(name)
    found = aliases.get(spelled, spelled)
    return found if found in modules else None


def _unknown(name: str, known: Iterable[str]) -> UnknownFormatError:
    near = difflib.get_close_matches(normal(name), list(known), n=4, cutoff=0.5)
    hint = f"; near names: {', '.join(near)}" if near else ""
    return UnknownFormatError(f"no format is called {name!r}{hint} (format_names() lists all)")


def _combine(
    label: str, thinking: ReasoningEntry | None, calling: ToolEntry | None, policy: Policy
) -> Format:
    entries = [entry for entry in (thinking, calling) if entry is not None]
    sources = tuple(dict.fromkeys(entry.source for entry in entries))
    ends = tuple(dict.fromkeys(end for entry in entries for end in entry.ends))
    layouts = {entry.part for entry in entries if isinstance(entry.part, Messages)}
    if layouts:
        layout = layouts.pop()
        if layouts or any(entry.part != layout for entry in entries):
            raise FormatError(f"{label}: these two names do not combine: one writes whole messages")
        return Format(label, layout, policy, ends, sources=sources)
    sections = Sections(
        reasoning=thinking.part if thinking else None,  # type: ignore[arg-type]  # no Messages here
        content=thinking.content if thinking else None,
        tools=calling.part if calling else None,  # type: ignore[arg-type]  # nor here
    )
    return Format(label, sections, policy, ends, sources=sources)
