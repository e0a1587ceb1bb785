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
    """The declaration of a format is invalid. The message names the invalid part and its value."""


class UnknownFormatError(FormatError, KeyError):
    """No format has the given name. The message lists similar names."""

    def __str__(self) -> str:
        """Return the message without the quotes that KeyError adds."""
        return str(self.args[0]) if self.args else ""


class ConstraintError(NereidParsersError, ValueError):
    """No structural tag can be built for this format and this request."""


class TemplateError(NereidParsersError, ValueError):
    """A chat template cannot be compiled, or cannot be rendered for the analysis."""


def shorten(value: object) -> str:
    """Return the first 80 characters of the `repr` of a value, for use in an error message."""
    return f"{value!r:.80}"
