"""Finds private words and typing errors in the prose of the repository: `make prose`.

Prose is the text of Markdown pages, and the docstrings, comments and messages of Python files. The
program removes all other code and runs codespell on the rest, with its own dictionary of typing
errors and with private_terms.txt, which gives the field's term for each private word.
"""

import io
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TERMS = Path(__file__).parent / "private_terms.txt"
PHRASES = {
    r"so many (?:as|at|besides|of|that|to)\b": "this number of",
    r"in so many words": "explicitly",
    r"in work\b": "in progress, running",
    r"of each an?\b": "one for each",
    r"\bbesides?[.,]": "also, in addition",
    r"\bwhere nobody\b": "if nobody",
}
"""Phrases with a private meaning, as regular expressions, and the field's words for each."""

# Tests quote wrong words and the outputs of models, and docs_tools contains the private words.
SKIPPED = ("tests/", "demo/lessons/", "docs_tools/")
ALLOWED = {
    (
        "backend/nereid_backend/pooling/inputs/text_prompts.py",
        "judge",
    ): "the prompt of a model",
    ("client/nereid_client/responses/output_items.py", "hel"): "an example of text in pieces",
    ("client/nereid_client/supervise/warmup.py", "get's"): "the possessive of the method GET",
    ("client/nereid_client/protocol/rerank_requests.py", "judge"): "what a reranker does",
    ("demo/README.md", "recipes"): "recipes for food",
    ("demo/train.py", "recipe"): "the recipe of a training run",
    ("demo/train_see.py", "recipe"): "the recipe of a training run",
    ("docs/history/reliability.md", "checkpoin"): "a recorded message, which is cut",
}
"""Words that are right in one file, with the reason."""


def main() -> int:
    """Print each private word with its place, and return 1 if there is one, otherwise 0."""
    prose = {path: text_of(ROOT / path) for path in files()}
    with tempfile.TemporaryDirectory() as folder:
        for path, text in prose.items():
            copy = Path(folder) / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "codespell_lib", "--dictionary=-", f"--dictionary={TERMS}"]
        done = subprocess.run([*command, "."], cwd=folder, capture_output=True, text=True)
    if done.stderr.strip():
        print(done.stderr, file=sys.stderr)  # noqa: T201 - the output of a command
    words = [line.removeprefix("./") for line in done.stdout.splitlines()]
    found = [line for line in words if not _is_allowed(line)]
    problems = sorted([*found, *(line for path in prose for line in phrases(path, prose[path]))])
    for problem in problems:
        print(problem)  # noqa: T201 - the output of a command
    print(f"prose: {len(prose)} files, {len(problems)} private words or typing errors")  # noqa: T201
    return int(bool(problems) or done.returncode not in (0, 65))


def _is_allowed(line: str) -> bool:
    """Return whether ALLOWED contains the word of a line "file:number: word ==> replacement"."""
    place, _, rest = line.partition(": ")
    return (place.rpartition(":")[0], rest.split(" ==> ")[0].lower()) in ALLOWED


def files() -> list[str]:
    """Return the Markdown and Python files that git knows and that are not skipped."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", "*.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [
        path
        for path in done.stdout.splitlines()
        if not path.startswith(SKIPPED) and (ROOT / path).is_file()
    ]


def text_of(path: Path) -> str:
    """Return the prose of a file. Everything else is replaced by spaces, so lines keep their place.

    Example: `x = 1  # the door` becomes `         # the door`.
    """
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return _without(source, _markdown_code(source))
    lines = [[" "] * len(line) for line in source.splitlines()]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (token.type in _STRINGS and _is_prose(token.string)):
            _copy(source, token.start, token.end, lines)
    return "\n".join(map("".join, lines)) + "\n"


_STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def _is_prose(literal: str) -> bool:
    """Return whether a string literal is a text for people: it contains at least three words."""
    return len(re.findall(r"\s[A-Za-z]", literal)) >= 2


def _copy(
    source: str, start: tuple[int, int], end: tuple[int, int], lines: list[list[str]]
) -> None:
    """Copy the characters of one token into `lines`, without code in backquotes."""
    rows = source.splitlines()
    for number in range(start[0] - 1, end[0]):
        begin = start[1] if number == start[0] - 1 else 0
        stop = end[1] if number == end[0] - 1 else len(rows[number])
        text = re.sub(r"`[^`]*`", lambda code: " " * len(code[0]), rows[number][begin:stop])
        lines[number][begin:stop] = text


def _markdown_code(source: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each code block, code span and link target."""
    for match in re.finditer(
        r"^```.*?^```|`[^`\n]+`|\]\([^)]*\)", source, re.DOTALL | re.MULTILINE
    ):
        yield match.span()


def _without(source: str, spans: Iterator[tuple[int, int]]) -> str:
    characters = list(source)
    for begin, end in spans:
        characters[begin:end] = [one if one == "\n" else " " for one in source[begin:end]]
    return "".join(characters)


def phrases(path: str, text: str) -> Iterator[str]:
    """Yield one line for each private phrase, in the form that codespell prints."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, instead in PHRASES.items():
            for match in re.finditer(pattern, line, re.IGNORECASE):
                yield f"{path}:{number}: {match[0]} ==> {instead}"


if __name__ == "__main__":
    sys.exit(main())
