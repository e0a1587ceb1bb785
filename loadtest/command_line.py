"""The command lines of the programs in this package."""

import argparse
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Option(NamedTuple):
    """An option of a command line.

    The default shows which values the option takes: several values if it is a list, no value if it
    is False, and otherwise one value. If it is None or an empty list, `value_type` is necessary for
    values that are not texts.
    """

    default: Any
    help: str
    choices: Collection[str] | None = None
    value_type: Callable[[str], object] | None = None


def parse_command_line(
    description: str | None, options: Mapping[str, Option], words: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse the command line of a program.

    Args:
        description: the beginning of the help text.
        options: the name of each option, such as "--rounds", and its properties.
        words: the command line; None for the command line of this process.
    """
    argument_parser = parser(description)
    for name, option in options.items():
        if option.default is False:
            argument_parser.add_argument(name, action="store_true", help=option.help)
            continue
        is_list = isinstance(option.default, list)
        example = next(iter(option.default), "") if is_list else option.default
        argument_parser.add_argument(
            name,
            type=option.value_type or (str if example is None else type(example)),
            nargs="*" if is_list else None,
            default=option.default,
            choices=option.choices,
            help=option.help,
        )
    return argument_parser.parse_args(words)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help text begins with `description`. Its line breaks are kept."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def check_word(parser: argparse.ArgumentParser, flag: str, word: str, names: Iterable[str]) -> None:
    """End the program if no name contains the word. Otherwise, it would pass without a test."""
    if not any(word in name for name in names):
        parser.error(f"{flag}: no test has {word!r} in its name")


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit, so that `with` and `finally` blocks stop other processes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def print_report(text: str, path: Path | None) -> None:
    """Print a report. Also write the report to a file if `path` is given."""
    print(text, flush=True)
    if path is not None:
        path.write_text(text + "\n")
