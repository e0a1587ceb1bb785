"""Builds the documentation site into the folder site/: `make docs`.

The build fails if a page links to a missing page or heading, or if the site would load a script,
a style sheet, a font or an image from another server.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "site"

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_POSITION = re.compile(r"^\s*╭─\[ (\S+) \]")
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["'](https?://[^"']+)"""
    r"""|<link\b(?=[^>]*\brel=["'](?:stylesheet|preload|icon)["'])[^>]*\bhref=["'](https?://[^"']+)"""
)


def main() -> int:
    """Build the site and return the exit code: 0 for a site without problems, otherwise 1."""
    problems = build() or loaded_from_elsewhere(SITE)
    for problem in problems:
        print(problem, file=sys.stderr)  # noqa: T201 - the output of a command
    if not problems:
        print(f"docs: the site is in {SITE.relative_to(ROOT)}/index.html")  # noqa: T201
    return int(bool(problems))


def build() -> list[str]:
    """Run the site generator and return one line for each problem.

    Example of a line: "docs/how-to/deploy.md:12:5: page does not exist".
    """
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # the generator imports docs_tools
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    output = _COLOUR.sub("", done.stdout + done.stderr)
    if done.returncode == 0:
        return []
    return _problems(output) or [output]


def _problems(output: str) -> list[str]:
    """Return the problems in the generator's output as lines of file, position and message.

    Example of output: "Warning: page does not exist", then "   ╭─[ index.md:2:41 ]".
    """
    found = []
    message = ""
    for line in output.splitlines():
        if line.startswith("Warning: "):
            message = line.removeprefix("Warning: ")
        elif position := _POSITION.match(line):
            found.append(f"docs/{position[1]}: {message}")
    return found


def loaded_from_elsewhere(site: Path) -> list[str]:
    """Return one line for each resource that a page would load from another server."""
    return [
        f"{page.relative_to(site)}: loads {match[1] or match[2]} from another server"
        for page in sorted(site.rglob("*.html"))
        for match in _LOADED.finditer(page.read_text(encoding="utf-8"))
    ]


if __name__ == "__main__":
    sys.exit(main())
