"""The OpenAI-compatible frontend of Nereid, and the `nereid` command.

`app.py` is the entry point of the frontend, and `cli/main.py` is that of the command.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
