"""Which format a checkpoint has: chosen, declared, inferred, or plain content."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereid_parsers.errors import FormatError, NereidParsersError
from nereid_parsers.format import Format, Sections, Source
from nereid_parsers.formats.registry import get_format
from nereid_parsers.template.analysis import TemplateAnalysis, analyze_template
from nereid_parsers.template.response_template import format_of_response_template

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 64_000_000


@dataclass(frozen=True, slots=True)
class ChosenFormat:
    """A checkpoint's format, and why it is this one.

    source     "chosen" by the user, "response_template", "template" (inferred) or "plain".
    why        in words, with what spoke against the sources before it.
    analysis   where the template was analysed.
    """

    format: Format
    source: str
    why: str
    analysis: TemplateAnalysis | None = None


@dataclass(frozen=True, slots=True)
class CheckpointText:
    """What a checkpoint's files say of its chat format.

    template            the chat template, None if there is none.
    response_template   transformers' declaration, None if there is none.
    """

    template: str | None = None
    response_template: dict[str, Any] | None = None
    bos_token: str = ""
    eos_token: str = ""


def read_checkpoint(path: str | Path) -> CheckpointText:
    """Read what a checkpoint's folder, or a file with a template alone, says.

    As transformers does it, chat_template.jinja goes before chat_template.json, and that before
    the entry in tokenizer_config.json; of several named templates "tool_use" is taken, else
    "default".

    Raises: FormatError for a path that is neither, or a file that is no JSON.
    """
    path = Path(path)
    if path.is_file():
        return CheckpointText(_text(path))
    if not path.is_dir():
        raise FormatError(f"{path} is neither a checkpoint's folder nor a template")
    config = _json(path / "tokenizer_config.json")
    template = config.get("chat_template")
    named = _named_files(path)
    if (path / "chat_template.json").is_file():
        template = _json(path / "chat_template.json").get("chat_template", template)
    if (path / "chat_template.jinja").is_file():
        named.setdefault("default", _text(path / "chat_template.jinja"))
    declared = config.get("response_template")
    return CheckpointText(
        _one_template(named or template),
        declared if isinstance(declared, dict) else None,
        _token(config.get("bos_token")),
        _token(config.get("eos_token")),
    )


def _named_files(path: Path) -> dict[str, str]:
    folder = path / "additional_chat_templates"
    return {file.stem: _text(file) for file in sorted(folder.glob("*.jinja"))}


def _one_template(found: object) -> str | None:
    """Of several templates the one that knows tools."""
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
    if isinstance(found, dict):
        found = found.get("tool_use", found.get("default", next(iter(found.values()), None)))
    return found if isinstance(found, str) else None


def _token(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _text(path: Path) -> str:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise FormatError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    return path.read_text(encoding="utf-8")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(_text(path))
    except ValueError as error:
        raise FormatError(f"{path} is no JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def format_for_checkpoint(
    path: str | Path,
    *,
    reasoning: str | None = None,
    tools: str | None = None,
    name: str | None = None,
) -> ChosenFormat:
    """The format of a checkpoint: the user's choice, its response_template, its chat template.

    `name`, or `reasoning` and `tools`, are names of the registry, and are the user's choice. If
    nothing can be learned, it is plain content, and a warning is logged. A choice of one half
    leaves the other half to the other sources. It takes some 30 ms: callers keep the result.

    Raises: FormatError for an unknown name, or a path that is no checkpoint.
    """
    if name is not None:
        return ChosenFormat(get_format(name), "chosen", f"the name {name!r} was chosen")
    if reasoning is not None and tools is not None:
        fmt = get_format(reasoning=reasoning, tools=tools)
        return ChosenFormat(fmt, "chosen", f"the names {reasoning!r} and {tools!r} were chosen")
    found = _unchosen(read_checkpoint(path))
    if reasoning is None and tools is None:
        return found
    return _half_chosen(found, reasoning, tools)


def _half_chosen(found: ChosenFormat, reasoning: str | None, tools: str | None) -> ChosenFormat:
    chosen = get_format(reasoning=reasoning, tools=tools)
    one, other = chosen.layout, found.format.layout
    word = f"the name {reasoning or tools!r} was chosen"
    if not isinstance(one, Sections) or not isinstance(other, Sections):
        return ChosenFormat(chosen, "chosen", f"{word}; it stands for whole messages")
    layout = Sections(
        one.reasoning if reasoning is not None else other.reasoning or one.reasoning,
        one.content or other.content,
        one.tools if tools is not None else other.tools,
    )
    fmt = Format(
        f"{chosen.name}+{found.format.name}", layout,
        ends=(*chosen.ends, *found.format.ends), turn=found.format.turn,
        sources=(*chosen.sources, *found.format.sources),
    )  # fmt: skip
    return ChosenFormat(fmt, "chosen", f"{word}; the rest: {found.why}", found.analysis)


def _unchosen(text: CheckpointText) -> ChosenFormat:
    against: list[str] = []
    if text.response_template is not None:
        try:
            fmt = format_of_response_template(text.response_template)
        except FormatError as error:
            against.append(str(error))
        else:
            return ChosenFormat(fmt, "response_template", "the tokenizer's config declares it")
    if text.template is None:
        against.append("the checkpoint has no chat template")
    else:
        try:
            analysis = analyze_template(text.template, text.bos_token, text.eos_token)
        except NereidParsersError as error:
            against.append(str(error))
        else:
            why = "; ".join([*against, "inferred from the chat template"])
            return ChosenFormat(analysis.format, "template", why, analysis)
    why = "; ".join([*against, "plain content it is"])
    log.warning("no chat format is known, so tool calls and reasoning stay text: %s", why)
    plain = Format("plain", Sections(), sources=(Source("nothing is known of the format"),))
    return ChosenFormat(plain, "plain", why)
