# SPDX-License-Identifier: Apache-2.0
"""Chooses the chat format that is used to parse the output of a checkpoint."""

import contextlib
import fcntl
import hashlib
import pickle
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import nereid_parsers
from nereid_parsers import LENIENT, STRICT, Format, NereidParsersError, get_format

from nereid_backend.cache_folder import cache_folder
from nereid_backend.errors import ConfigError
from nereid_backend.serving import triton_api
from nereid_backend.serving.chat_template import read_chat_template
from nereid_backend.serving.serving_settings import NO_FORMAT, ServingSettings

_POLICY_OF_SETTING = {"lenient": LENIENT, "strict": STRICT}
# The chat format of a checkpoint is derived from these files.
_FORMAT_FILES = (
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "additional_chat_templates/*.jinja",
)


def choose_format(
    settings: ServingSettings, report: Callable[[str], None] = triton_api.progress
) -> Format | None:
    """Return the chat format of a checkpoint; None if the checkpoint's output is plain text.

    A chat format describes how the model writes reasoning and tool calls, for example with the
    markers <think> and </think> around the reasoning. The format includes a parser policy: the
    rules for unexpected output, such as text around tool calls or invalid arguments.

    Args:
        settings: the settings model, chat_template, reasoning_parser, tool_parser and
            parser_policy ("lenient", "strict", or "" for the policy of the format itself).
        report: called with one line that says how the format was chosen.

    Raises:
        ConfigError: a setting names an unknown chat format, or the checkpoint's files cannot be
            read.
    """
    try:
        fmt = _find_format(settings, report)
    except NereidParsersError as error:
        raise ConfigError(f"reasoning_parser, tool_parser: {error}") from error
    policy = _POLICY_OF_SETTING.get(settings.parser_policy)
    if fmt is None or policy is None:
        return fmt
    return fmt.with_policy(policy)


def _find_format(settings: ServingSettings, report: Callable[[str], None]) -> Format | None:
    """Return the chat format that the settings reasoning_parser and tool_parser select.

        reasoning_parser  tool_parser   result
        ""                ""            the format that is derived from the checkpoint
        "qwen3"           ""            the derived format with the reasoning of qwen3
        "qwen3"           "none"        the reasoning of qwen3; tool calls stay in the content
        ""                "none"        None: the reasoning and the tool calls stay in the content

    The order of the two settings does not matter. In the first, second and fourth case, `report` is
    called with the reason for the result.
    """
    reasoning, tools = settings.reasoning_parser, settings.tool_parser
    if NO_FORMAT not in (reasoning, tools):
        template = read_chat_template(settings)
        fmt, reason = _derive_format(
            _FormatSources(Path(settings.model), template, reasoning, tools)
        )
        report(f"chat format: {reason}")
        return fmt
    # At least one setting is "none", so at most one setting names a format.
    if reasoning not in (NO_FORMAT, ""):
        return get_format(reasoning=reasoning)
    if tools not in (NO_FORMAT, ""):
        return get_format(tools=tools)
    report("chat format: none, because reasoning_parser or tool_parser is none")
    return None


class _FormatSources(NamedTuple):
    """The checkpoint and the settings from which a chat format is derived.

    Attributes:
        model: the folder of the checkpoint.
        template: the chat template that replaces the checkpoint's template; None if the
            checkpoint's template is used.
        reasoning_name: the name of the chat format for reasoning. "" means the derived format.
        tools_name: the name of the chat format for tool calls. "" means the derived format.
    """

    model: Path
    template: str | None
    reasoning_name: str
    tools_name: str


def _derive_format(sources: _FormatSources) -> tuple[Format, str]:
    """Derive the chat format from a checkpoint's files. Also return the reason for this choice.

    The result is stored in the cache folder, because both the tokenizer and the postprocessor need
    the result at each start. The first process locks the file, computes the result, and writes the
    result to the file. The other process waits for the lock, and then reads the result.
    """
    try:
        file = _open_locked(_fingerprint(sources))
    except (OSError, RuntimeError):
        # The cache is not usable: the home folder is unknown, or the cache folder is not writable.
        return _derive_without_cache(sources)
    with file:
        result = _load_result(file)
        if result is None:
            result = _derive_without_cache(sources)
            _store_result(file, result)
        return result


def _open_locked(name: str) -> FileIO:
    """Open or create the file `name` in the cache folder, and wait for the file's lock.

    The lock is released when the file is closed. The file has no buffer, so that an error of the
    disk is raised by `write` and not when the file is closed.

    Raises:
        OSError: the cache folder is not writable, or does not support locks.
        RuntimeError: the home folder is unknown.
    """
    folder = cache_folder() / "chat-formats"
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / name).open("a+b", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        file.close()
        raise
    return file


def _load_result(file: FileIO) -> tuple[Format, str] | None:
    """Return the cached chat format and the reason for this format; None if nothing is cached.

    The file is empty or incomplete if this process has just created it, or if an earlier process
    was killed while writing it. A faulty disk can change the file.
    """
    file.seek(0)
    try:
        result: tuple[Format, str] = pickle.loads(file.read())
    except Exception:  # noqa: BLE001 - damaged bytes can make pickle raise any exception
        return None
    return result


def _store_result(file: FileIO, result: tuple[Format, str]) -> None:
    """Replace the content of a file in the cache folder by a result that `_load_result` can read.

    If the disk is full, the result is not stored completely.
    """
    with contextlib.suppress(OSError):
        file.truncate(0)  # An earlier process may have been killed while it wrote to the file.
        file.write(pickle.dumps(result))  # The mode of the file appends, so no `seek` is needed.


def _derive_without_cache(sources: _FormatSources) -> tuple[Format, str]:
    """Derive the chat format from the checkpoint's files. The cache folder is not used.

    Returns:
        The chat format, and a text for the log that states why this format was chosen.
    """
    # The module is imported only here, because it is rarely needed: the cache usually contains the
    # chat format.
    from nereid_parsers.template import format_for_checkpoint

    chosen = format_for_checkpoint(
        sources.model,
        reasoning=sources.reasoning_name or None,
        tools=sources.tools_name or None,
        chat_template=sources.template,
    )
    return chosen.format, chosen.why


def _fingerprint(sources: _FormatSources) -> str:
    """Return one hash of the checkpoint's files, of the settings, and of the analysis code.

    If a file, a setting or the code changes, the hash changes, and the cached format is no longer
    used. The hash contains the sizes and modification times of the code's files.
    """
    model, *settings = sources
    digest = hashlib.sha256(repr(settings).encode())
    for pattern in _FORMAT_FILES:
        for path in sorted(model.glob(pattern)):
            digest.update(repr((path.name, path.read_bytes())).encode())
    code_folder = Path(nereid_parsers.__file__).parent
    for path in sorted(code_folder.rglob("*.py")):
        status = path.stat()
        digest.update(repr((path.name, status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()
