"""Write the output of each `--help` into docs/reference/command-line.md.

    make settings                                     # write the page
    python docs_tools/write_command_line.py --check   # fail if the page is not up to date

A code block of the page has the command as its title, for example `title="nereid chat --help"`.
The text inside the block is the output of this command.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "command-line.md"
_BLOCK = re.compile(r'(^```text title="([^"]+)"\n).*?(^```$)', re.MULTILINE | re.DOTALL)


def main() -> int:
    """Write or check the page, and return the exit code."""
    text = PAGE.read_text(encoding="utf-8")
    filled = _BLOCK.sub(lambda block: f"{block[1]}{help_text(block[2])}{block[3]}", text)
    if "--check" in sys.argv:
        if text != filled:
            sys.stdout.write(f"{PAGE.relative_to(ROOT)} is not up to date. Run `make settings`.\n")
        return int(text != filled)
    PAGE.write_text(filled, encoding="utf-8")
    return 0


def help_text(command: str) -> str:
    """Return the output of a command with `--help`, in lines of at most 80 characters.

    Args:
        command: for example "nereid chat --help" or "python -m nereid_parsers --help".
    """
    name, *arguments = command.split()
    program = [sys.executable] if name == "python" else [str(Path(sys.executable).parent / name)]
    environment = os.environ | {"COLUMNS": "80", "TYPER_USE_RICH": "0", "NO_COLOR": "1"}
    result = subprocess.run(
        [*program, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    lines = [line.rstrip() for line in result.stdout.strip("\n").splitlines()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
