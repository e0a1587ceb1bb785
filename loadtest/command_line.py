"""Functions for the command-line programs of this package."""

import argparse
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Option(NamedTuple):
    """An option of a command line.

    The option takes several values if `default` is a list, no value if `default` is False, and
    otherwise one value. The values have the type of the default value. If `default` is None or an
    empty list, values that are not strings require `value_type`.
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
        options: maps the name of each option, such as "--rounds", to the properties of the option.
        words: the arguments of the program. If None, the arguments of this process are parsed.
    """
    argument_parser = parser(description)
    add_options(argument_parser, options)
    return argument_parser.parse_args(words)


def add_options(parser: argparse.ArgumentParser, options: Mapping[str, Option]) -> None:
    """Add options to a parser. See `parse_command_line`."""
    for name, option in options.items():
        if option.default is False:
            parser.add_argument(name, action="store_true", help=option.help)
            continue
        is_list = isinstance(option.default, list)
        example = next(iter(option.default), "") if is_list else option.default
        parser.add_argument(
            name,
            type=option.value_type or (str if example is None else type(example)),
            nargs="*" if is_list else None,
            default=option.default,
            choices=option.choices,
            help=option.help,
        )


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help text begins with `description`, including its line breaks."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def check_word(parser: argparse.ArgumentParser, flag: str, word: str, names: Iterable[str]) -> None:
    """Exit with an error if none of `names` contains `word`.

    Without this check, a program with a misspelled word would run no test and succeed.
    """
    if not any(word in name for name in names):
        parser.error(f"{flag}: no test has {word!r} in its name")


def exit_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that `with` and `finally` blocks stop child processes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def print_report(text: str, path: Path | None) -> None:
    """Print a report. If `path` is given, also write the report to this file."""
    print(text, flush=True)
    if path is not None:
        path.write_text(text + "\n")
