"""The command lines of the programs in this package."""

import argparse


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help text begins with `description`. Its line breaks are kept."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
