"""Limit the work of rewriting one JSON schema document."""

from __future__ import annotations

from collections.abc import Mapping

from nereid_parsers.constraints.schema_merging import CannotMergeError

# The maximum number of references that are replaced by their definitions in one document. A
# definition may refer twice to a second definition, which may refer twice to a third, and so on.
# Without this limit, the time would grow exponentially with the number of such definitions.
_MAX_REPLACEMENTS = 256
# The maximum number of JSON values that may be copied in one document. The values of a definition
# are copied for each reference that the definition replaces. The values of an `allOf` with n
# members are counted n times, because each step of the merging copies the previous result. Without
# this limit, 256 references to a definition with 40,000 properties would need gigabytes, and the
# time for merging an `allOf` would grow with the square of the number of its members.
_MAX_COPIED_VALUES = 200_000


class RewritingBudget:
    """A budget that limits how many references are replaced, and how many values are copied."""

    def __init__(self) -> None:
        """Create a budget of `_MAX_REPLACEMENTS` references and `_MAX_COPIED_VALUES` values."""
        self._num_replacements_left = _MAX_REPLACEMENTS
        self._num_values_left = _MAX_COPIED_VALUES

    def spend_replacement(self, definition: object) -> None:
        """Subtract one reference, and the values of its `definition`, from the budget.

        Raises:
            CannotMergeError: The budget is too small for the reference or for the values.
        """
        if self._num_replacements_left == 0:
            raise CannotMergeError("too many references have been replaced")
        self._num_replacements_left -= 1
        self.spend_copies(definition)

    def spend_copies(self, value: object, num_copies: int = 1) -> None:
        """Subtract `num_copies` copies of a JSON value and its inner values from the budget.

        Example: `[1, 2]` consists of three values: the list and its two items.

        Raises:
            CannotMergeError: The budget is too small for the copies. All later calls then raise
                this error, too.
        """
        unread = [value]
        while unread:
            self._num_values_left -= num_copies
            if self._num_values_left < 0:
                raise CannotMergeError("too many values have been copied")
            inner = unread.pop()
            if isinstance(inner, Mapping):
                unread.extend(inner.values())
            elif isinstance(inner, list | tuple):
                unread.extend(inner)
