"""The package's errors. What a model writes never raises; these are for what people write.

NereidParsersError is the base of FormatError (with UnknownFormatError), ConstraintError and
TemplateError.
"""


class NereidParsersError(Exception):
    """Base of every error that this package raises on purpose."""


class FormatError(NereidParsersError, ValueError):
    """A declaration that cannot be right; the message names the part and the value."""


class UnknownFormatError(FormatError, KeyError):
    """No format has this name; the message lists near names."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ConstraintError(NereidParsersError, ValueError):
    """A structural tag that was asked for cannot be built from this format and request."""


class TemplateError(NereidParsersError, ValueError):
    """A chat template that cannot be compiled or rendered for analysis."""
