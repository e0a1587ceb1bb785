"""Read the code blocks of Markdown pages, and run a block against a test server.

A fenced block is run if its language is `bash` or `python`. A `json` or `text` block that follows
shows the expected output. An HTML comment on the line before a block changes this:

    <!-- test: serves -->              the block starts a server; later blocks of the page use it
    <!-- test: printed -->             the server printed these lines when it started
    <!-- test: main -->                this block and later ones use the server of `make serve`
    <!-- test: skip, needs docker -->  the block is not run, for this reason
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from warm_python import run_python

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

_RUNNABLE = ("bash", "python")
_OUTPUT = ("json", "text")
_NOT_CODE = ("mermaid",)
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- test: (\w+)(?:, (.*?))? -->\s*\Z")
_TIMEOUT_S = 120


@dataclass(frozen=True)
class Ports:
    """The ports of the test server, which replace the ports that are printed on the pages."""

    openai: int = 9000
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    def put_into(self, text: str) -> str:
        """Return `text` with the documented addresses replaced.

        Example: "curl http://127.0.0.1:9000/v1/models" -> "curl http://127.0.0.1:41234/v1/models".
        The port 9100, on which some pages start a second frontend, is replaced like the port 9000.
        """
        documented = {8000: self.http, 8001: self.grpc, 8002: self.metrics}
        documented |= {9000: self.openai, 9100: self.openai}
        return re.sub(
            r"\b127\.0\.0\.1:(9[01]00|800[012])\b",
            lambda match: f"127.0.0.1:{documented[int(match[1])]}",
            text,
        )


@dataclass(frozen=True)
class Block:
    """One fenced code block.

    Attributes:
        page: the page's path, relative to the repository.
        line: the line of the opening fence.
        language: the word after the fence.
        text: the lines between the fences, without their common indentation.
        mark: `serves`, `printed`, `main`, `skip`, or an empty string.
        reason: why the block is skipped.
        output: the block after this one if it shows the output.
    """

    page: str
    line: int
    language: str
    text: str
    mark: str
    reason: str
    output: "Block | None" = None

    @property
    def place(self) -> str:
        """The page and the line of the block, such as `README.md:31`."""
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        """True if a test runs the block."""
        return self.language in _RUNNABLE and self.mark != "skip"


def read_blocks(page: Path) -> list[Block]:
    """Return the code blocks of a Markdown page in order.

    A `json` or `text` block becomes the `output` of the block before it if at most one paragraph is
    between the two blocks.
    """
    source = page.read_text(encoding="utf-8")
    blocks: list[Block] = []
    end_of_last = 0
    for match in _FENCE.finditer(source):
        indent, language, text = match[1], match[2], match[3]
        if indent:
            text = re.sub(f"^{indent}", "", text, flags=re.MULTILINE)
        mark = _MARK.search(source[: match.start()])
        text_between = source[end_of_last : match.start()].strip()
        end_of_last = match.end()
        block = Block(
            page.relative_to(ROOT).as_posix(),
            source.count("\n", 0, match.start()) + 1,
            language,
            text,
            mark[1] if mark else "",
            (mark[2] or "") if mark else "",
        )
        is_output = language in _OUTPUT and not block.mark and "\n\n" not in text_between
        if blocks and blocks[-1].is_run and not blocks[-1].output and is_output:
            blocks[-1] = replace(blocks[-1], output=block)
        else:
            blocks.append(block)
    return blocks


def unaccounted(block: Block) -> str:
    """Return an error if a block is neither run nor skipped with a reason, else an empty string."""
    if block.mark not in ("", "serves", "printed", "main", "skip"):
        return f"{block.place}: the mark {block.mark!r} is unknown"
    if block.mark == "skip" and len(block.reason.split()) < 2:
        return f"{block.place}: a skipped block needs a reason of at least two words"
    is_checked = block.is_run or block.mark in ("printed", "skip")
    if not is_checked and block.language not in _NOT_CODE:
        return f"{block.place}: a block of {block.language!r} needs <!-- test: skip, REASON -->"
    return ""


def run_block(block: Block, ports: Ports, folder: Path) -> str:
    """Run a block as printed, in the root of the repository, and return its stdout.

    Args:
        block: a block of bash or Python.
        ports: the ports of the server for the block.
        folder: the folder that replaces `/tmp/nereid`, into which the pages write files.

    Raises: AssertionError with the block's output if it fails or prints something unexpected.
    """
    text = printed(block.text, ports, folder)
    environment = os.environ | _addresses(ports)
    if block.language == "python":
        done = run_python(["-c", text], environment, ROOT, _TIMEOUT_S)
    else:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 0, f"{block.place} failed:\n{done.stderr}\n{done.stdout}"
    if '{"error"' in done.stdout and '"error"' not in (block.output.text if block.output else ""):
        raise AssertionError(f"{block.place} got an error:\n{done.stdout}")
    if block.output is not None:
        problem = difference(block.output, done.stdout)
        assert not problem, f"{block.output.place}: {problem}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def printed(text: str, ports: Ports, folder: Path) -> str:
    """Return the text of a block with the programs of this environment, `ports` and `folder`."""
    text = ports.put_into(text).replace("/tmp/nereid", str(folder))
    return re.sub(r"(?<![\w/])\.venv/bin/", f"{BIN}/", text)


def _addresses(ports: Ports) -> dict[str, str]:
    """Return the variables from which the programs in client/examples read the server's address."""
    return {
        "OPENAI_BASE_URL": f"http://127.0.0.1:{ports.openai}/v1",
        "HTTP_URL": f"http://127.0.0.1:{ports.http}",
        "NEREID_GRPC_URL": f"127.0.0.1:{ports.grpc}",
    }


def difference(expected: Block, output: str) -> str:
    """Return how `output` differs from the output on the page, or an empty string.

    JSON is compared by `shape_difference`. In a text, `...` matches any text, and a number matches
    any number. If the text on the page ends in `...`, it may be only the beginning of the output.
    """
    if expected.language == "json":
        return shape_difference(json.loads(expected.text), json.loads(output))
    is_equal = re.fullmatch(_pattern(expected.text.strip()), output.strip(), re.DOTALL)
    return "" if is_equal else "the block printed something else than the page shows"


def unprinted_lines(expected: Block, output: str) -> list[str]:
    """Return the lines of the page that a server did not print. Numbers may differ."""
    return [
        line
        for line in expected.text.splitlines()
        if not re.search(f"^{_pattern(line)}$", output, re.MULTILINE)
    ]


def _pattern(text: str) -> str:
    """Return a regular expression in which `...` matches any text and a number any number."""
    pattern = re.escape(text)
    pattern = pattern.replace(re.escape("..."), ".*")
    return re.sub(r"(?:\\-)?\d+(?:\\\.\d+)?", r"-?[0-9.]+", pattern)


def shape_difference(expected: Any, actual: Any, path: str = "$") -> str:
    """Return the first place where `actual` lacks a key or has another type than `expected`.

    Keys that the page leaves out are ignored, and so are the lengths of lists.
    Example: `{"id": "x", "n": [1]}` has the shape of `{"n": [5, 7]}`.
    """
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        for key, value in expected.items():
            if key not in actual:
                return f"{path}.{key} is missing"
            if problem := shape_difference(value, actual[key], f"{path}.{key}"):
                return problem
        return ""
    if isinstance(expected, list) and isinstance(actual, list):
        if expected and not actual:
            return f"{path} is empty"
        return shape_difference(expected[0], actual[0], f"{path}[0]") if expected else ""
    is_number = isinstance(expected, int | float) and isinstance(actual, int | float)
    if is_number or type(expected) is type(actual):
        return ""
    return f"{path} is {actual!r}, where the page shows {expected!r}"
