"""The exceptions of this package.

The exceptions report mistakes in declarations, templates and requests. Parsing the text of a model
never raises an exception.

    NereidParsersError
    ├── FormatError
    │   └── UnknownFormatError
    ├── ConstraintError
    └── TemplateError
"""


class NereidParsersError(Exception):
    """Base class of every exception that this package defines."""


class FormatError(NereidParsersError, ValueError):
    """A chat format's description is invalid. The error message names the invalid attribute."""


class UnknownFormatError(FormatError, KeyError):
    """No chat format has the given name. The error message lists similar names."""

    def __str__(self) -> str:
        """Return the message without the quotes that KeyError adds."""
        return str(self.args[0]) if self.args else ""


class ConstraintError(NereidParsersError, ValueError):
    """The output of a model cannot be constrained as the request demands."""


class TemplateError(NereidParsersError, ValueError):
    """A chat template cannot be compiled, or cannot be rendered for the analysis."""


def shorten(value: object) -> str:
    """Return the first 80 characters of the `repr` of a value, for use in an error message."""
    return f"{value!r:.80}"
