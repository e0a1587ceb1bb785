"""The OpenAI-compatible frontend of Nereid, and the `nereid` command.

`app.py` is the entry point of the frontend. `cli/main.py` is the entry point of the command.
"""

from importlib import metadata

__version__ = metadata.version("nereid-client")

__all__ = ["__version__"]
