"""Check a template's operations before they run, and reject operations with very large results.

A running operation, such as `'x' * 10**9`, cannot be stopped. So each check estimates the size of
the result from the operands, and raises LimitError if this size exceeds the limit for one value.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sized
from typing import Any, NamedTuple

from nereid_parsers.template.sandbox.limits import Budget, LimitError, size_of

MAX_NUMBER = 10_000  # the largest length or width that an operation may demand
_TOJSON_LINES = 3000  # an estimate of the number of lines and separators that `tojson` writes
# Computing a large power takes long. Therefore, the budget counts each bit of `base ** exponent` as
# 200 characters. An analysis allows values of up to 300_000 characters, so the largest allowed
# power has 1500 bits.
_CHARACTERS_PER_BIT_OF_POWER = 200
_DEFAULT_INDENT = 4  # the number of spaces that the filter `indent` adds by default
# Matches a field of a format string whose width is given by an argument, as in `{:{}}`.
_NESTED_FIELD = re.compile(r"\{[^{}:]*:[^{}]*\{")
# Matches the start of a field with a name or an index, such as `{name`, `{0` or `%(name`. Several
# such fields may write the same value. Fields without a name, such as `{}` or `%s`, write each
# value only once.
_NAMED_FIELD = re.compile(r"(?:\{|%\()[^{}().\[:!]+")
# Matches the start of a field, up to its width and precision: `%5.2` in `%5.2f`, `{:>5` in `{:>5}`.
_FIELD_WITH_WIDTH = re.compile(r"%(?:\([^()]*\))?[-+ #.\d]*|\{[^{}:]*:[^{}]*")
_NUMBER = re.compile(r"\d+")
# Matches a number of at least five digits. In a format string, such a number may be a large width.
# A long number in the text around the fields is rejected, too, because the check does not parse the
# format string.
_LARGE_WIDTH = re.compile(r"\d{5,}")
_MAX_SHOWN_DIGITS = 12  # the largest number of digits in an error message


def check_operator(budget: Budget, operator: str, left: Any, right: Any) -> None:  # noqa: ANN401
    """Raise LimitError if the result of an operation with two operands would be too large.

    The check happens before the operation, because a running operation cannot be stopped. Examples
    of rejected operations: `'x' * 10**9`, `2 ** 10**9` and `'%099999d' % 1`. Other operators, such
    as `+`, are not checked here, because their results are hardly larger than both operands.
    """
    match operator:
        case "*":  # The string may be on either side: `'x' * 3` or `3 * 'x'`.
            _check_repetition(budget, sequence=left, times=right)
            _check_repetition(budget, sequence=right, times=left)
        case "**":
            _check_power(budget, base=left, exponent=right)
        case "%":  # The left side may be a format string, as in `'%5d' % 1`.
            _check_percent(budget, left, right)


def _check_power(budget: Budget, base: object, exponent: object) -> None:
    """Raise LimitError if computing the integer `base ** exponent` would take too long.

    Example: `2 ** 10**9` has 10**9 bits. Powers of other numbers are accepted.
    """
    if isinstance(base, int) and isinstance(exponent, int):
        max_bits = base.bit_length() * abs(exponent)
        budget.check_size(max_bits * _CHARACTERS_PER_BIT_OF_POWER)


def _check_percent(budget: Budget, left: object, right: object) -> None:
    """Raise LimitError if `left` is a format string and the text `left % right` could be very long.

    Example: `'%s: %5d' % ("a", 1)`.
    """
    check_format(budget, left, values=[right])
    if isinstance(right, tuple):
        # A number in the tuple `right` may be the width of a field, such as 9 in `'%*d' % (9, 1)`.
        # A large width gives a long text, so large numbers are rejected.
        check_numbers(right)


def check_method(budget: Budget, owner: Any, name: str, args: tuple[Any, ...]) -> None:  # noqa: ANN401
    """Raise LimitError if the result of the method call `owner.name(*args)` would be too large.

    Example: `text.replace("", "x" * 1000)` inserts 1000 characters before each character of `text`.
    In this call, `owner` is the value of `text`, and `name` is "replace".

    `owner` is a string, bytes or a number. `args` contains the positional arguments, and after them
    the values of the keyword arguments.
    """
    check_numbers(args)  # An argument may be a length, as in `text.center(10**9)`.
    match name:
        case "format" | "format_map":
            # The argument of `format_map` is a dict. Its size includes the sizes of its values, so
            # the dict is checked like an argument of `format`.
            check_format(budget, owner, values=args)
        case "replace" if len(args) > 1:
            _check_replace(budget, owner, old=args[0], new=args[1])
        case "join" if args:
            _check_join(budget, items=args[0], separator=owner)
        case "expandtabs" if args:
            _check_expandtabs(budget, owner, tab_size=args[0])
        case "translate" if args:
            _check_translate(budget, owner, table=args[0])
        case _:
            # The result of any other method is hardly longer than `owner`, unless a number in
            # `args` is the length of the result. `check_numbers` has limited this number.
            pass


class FilterCall(NamedTuple):
    """A call of a filter in a template. A filter is a function that is applied to a value.

    Example: in `text | indent(9, first=True)`, `name` is "indent", `value` is the value of `text`,
    `args` is (9,), and `kwargs` is {"first": True}.

    Attributes:
        name: The name of the filter.
        value: The value before the `|`.
        args: The positional options of the filter.
        kwargs: The keyword options of the filter.
    """

    name: str
    value: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def option(self, index: int, name: str) -> Any:  # noqa: ANN401
        """Return the value of a filter's option. Return "" if the template passes no value.

        A template passes an option by position or by name, as in `text | replace("a", new="b")`:

        >>> call = FilterCall("replace", "abc", ("a",), {"new": "b"})
        >>> call.option(0, "old"), call.option(1, "new")
        ('a', 'b')
        """
        if index < len(self.args):
            return self.args[index]
        return self.kwargs.get(name, "")  # The checks measure the length, and "" has the length 0.


def check_filter(budget: Budget, call: FilterCall) -> None:
    """Raise LimitError if the result of a filter would be too large.

    Example: in `text | replace("", "x" * 1000)`, the filter inserts 1000 characters before each
    character of `text`.

    Most filters, such as `upper`, return a text that is hardly longer than their input. For some
    filters, an option is the length of the result, as in `text | center(80)`, so the numbers in the
    options are checked. The filters that are named below may return a longer text, so their results
    are estimated.
    """
    options = [*call.args, *call.kwargs.values()]
    check_numbers(options)
    match call.name:
        case "replace":
            old, new = call.option(0, "old"), call.option(1, "new")
            _check_replace(budget, str(call.value), old, new)
        case "join":  # jinja2 calls the separator `d`.
            _check_join(budget, call.value, separator=call.option(0, "d"))
        case "format":
            check_format(budget, call.value, values=options)
        case "tojson":
            _check_tojson(budget, options)
        case "indent" if isinstance(call.value, str):  # jinja2 raises an error for other values.
            _check_indent(budget, call.value, width=call.option(0, "width") or _DEFAULT_INDENT)


def _check_repetition(budget: Budget, sequence: object, times: object) -> None:
    """Raise LimitError if the text or list `sequence * times` would be too large.

    Example: `"ab" * 3` is a text of 6 characters. A product of two numbers is accepted.
    """
    if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
        budget.check_size(len(sequence) * max(times, 0))


def _check_replace(budget: Budget, text: str, old: Any, new: Any) -> None:  # noqa: ANN401
    """Raise LimitError if `text.replace(old, new)` could be too large.

    The check assumes the worst case: `text` consists only of repetitions of `old`. Example: the
    text "aaa" contains "a" at most 3 times. It contains the empty text 4 times: before each
    character, and at the end.
    """
    old_size = max(len(str(old)), 1)
    max_replacements = len(text) // old_size + 1
    budget.check_size(len(text) + max_replacements * len(str(new)))


def _check_join(budget: Budget, items: Any, separator: Any) -> None:  # noqa: ANN401
    """Raise LimitError if `separator.join(items)` would be too large.

    The total size of the separators is checked first, and then the total size of the items. If the
    items have no length, the operation fails anyway.
    """
    if isinstance(items, Sized):
        budget.check_size(len(items) * (len(str(separator)) + 1))
        size_of(items, budget.limits.value_size)  # raises LimitError if the items are too large


def _check_expandtabs(budget: Budget, text: Any, tab_size: Any) -> None:  # noqa: ANN401
    """Raise LimitError if `text.expandtabs(tab_size)` could be too large.

    The check assumes the worst case: `text` consists only of tabs, and each tab becomes `tab_size`
    spaces.
    """
    budget.check_size(len(text) * max(int(tab_size), 1))


def _check_translate(budget: Budget, text: Any, table: Any) -> None:  # noqa: ANN401
    """Raise LimitError if `text.translate(table)` could be too large.

    Example: the table {97: "xyz"} replaces each `a` with "xyz". The check assumes that each
    character of `text` is replaced with all texts of the table.
    """
    size_of_table = size_of(table, budget.limits.value_size)
    budget.check_size(len(text) * size_of_table)


def _check_tojson(budget: Budget, options: Iterable[object]) -> None:
    """Raise LimitError if the result of the filter `tojson` would be too large.

    The filter writes options such as `indent` and `separators` once for each line of the JSON text.
    Therefore, only long options can make this text much longer than the value.
    """
    size_of_options = sum(_num_characters(option) for option in options)
    budget.check_size(size_of_options * _TOJSON_LINES)


def _check_indent(budget: Budget, text: str, width: Any) -> None:  # noqa: ANN401
    """Raise LimitError if the result of the filter `indent` would be too large.

    `width` is the text that the filter writes before each line, or a number of spaces.
    """
    indent_size = len(width) if isinstance(width, str) else int(width)
    budget.check_size(text.count("\n") * indent_size)


def check_numbers(values: Iterable[object]) -> None:
    """Raise LimitError if an argument of an operation is a very large number.

    The operation may use the number as the length of a text. Example: `'%*d' % (99999, 1)` would
    write 99999 characters. The largest allowed absolute value is MAX_NUMBER.
    """
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise LimitError(
                f"the template passes the number {value} to an operation. Such a number may be at "
                f"most {MAX_NUMBER}, because the operation may use it as the length of a text."
            )


def check_format(budget: Budget, text: object, values: Iterable[object]) -> None:
    """Raise LimitError if the formatted text could be very long.

    Example: `"{:>9}{name}".format(1, name="Ann")` has the format string "{:>9}{name}" and the
    values 1 and "Ann". The length of the formatted text is at most the sum of three sizes: the
    format string, the widths of its fields, and the values. If several fields write the same value,
    as in "{name}{name}", the size of the values is multiplied by the number of these fields.

    `text` is a format string if it contains `%` or `{`. Any other value is accepted.
    """
    if not isinstance(text, str) or ("%" not in text and "{" not in text):
        return
    _check_widths(text)
    size_of_values = sum(size_of(value, budget.limits.value_size) for value in values)
    # No value is written more often than `_max_repetitions`.
    size_of_written_values = _max_repetitions(text) * size_of_values
    budget.check_size(len(text) + _total_width(text) + size_of_written_values)


def _max_repetitions(format_string: str) -> int:
    """Return the largest number of fields in a format string that write the same value.

    Fields with the same name or index write the same value. Fields without a name write different
    values.

    >>> _max_repetitions("{name}{name}"), _max_repetitions("%s%s")
    (2, 1)
    """
    num_fields_by_name = Counter(_NAMED_FIELD.findall(format_string))
    return max(num_fields_by_name.values(), default=1)


def _check_widths(format_string: str) -> None:
    """Raise LimitError if a field of a format string has a very large or an unknown width.

    Examples: the width of `{:>99999}` is too large. The width of `{:>{}}` is an argument.
    """
    large_width = _LARGE_WIDTH.search(format_string)
    if large_width is not None:
        first_digits = large_width.group()[:_MAX_SHOWN_DIGITS]
        raise LimitError(
            f"a format string of the template has the width {first_digits}, "
            f"but the limit is {MAX_NUMBER}"
        )
    if _NESTED_FIELD.search(format_string):
        raise LimitError(
            "a format string of the template gets its width from an argument, which is not allowed"
        )


def _total_width(text: str) -> int:
    """Return the sum of the widths and precisions of all fields in a format string.

    >>> _total_width("%5d and {:>20}")
    25
    """
    fields = _FIELD_WITH_WIDTH.findall(text)
    return sum(int(number) for field in fields for number in _NUMBER.findall(field))


def _num_characters(option: object) -> int:
    """Count the characters of an option of the filter `tojson`: a string, or a tuple of strings.

    >>> _num_characters((", ", ": ")), _num_characters(4)
    (4, 0)
    """
    if isinstance(option, list | tuple):
        return sum(_num_characters(part) for part in option)
    return len(option) if isinstance(option, str) else 0
