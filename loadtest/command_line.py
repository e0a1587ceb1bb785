"""The command lines of the programs in this package."""

import argparse


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with the docstring of the program, with its line breaks."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
