"""OpenAI-compatible frontend of Nereid, and the `nereid` command.

`app.py` and `cli/main.py` are the two doors.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
