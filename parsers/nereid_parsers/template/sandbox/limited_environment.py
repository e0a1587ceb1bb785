"""The Jinja environment of the sandbox, in which each operation of a template is checked.

A template is an untrusted program. So each loop item, call, filter, operator and output of a
rendering is checked against a `Budget`, which limits the time and the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial, wraps
from typing import Any

import jinja2
from jinja2 import ext
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from nereid_parsers.template.sandbox.counting_nodes import Generation, TimedCodeGenerator
from nereid_parsers.template.sandbox.functions import (
    CountedItems,
    SafeNamespace,
    raise_exception,
    tojson,
)
from nereid_parsers.template.sandbox.limits import Budget, LimitError
from nereid_parsers.template.sandbox.operations import (
    FilterCall,
    check_filter,
    check_format,
    check_method,
    check_operator,
)

# The sandbox removes these filters, because they are slow or random, or because no chat template
# needs them.
_REMOVED_FILTERS = ("urlize", "pprint", "xmlattr", "random", "wordwrap", "striptags")
# These filters combine all items of a list or an iterator into one value.
_SUMMING_FILTERS = ("join", "sum")
# Methods of these types may return large texts. Examples: `"a".center(10**9)`, and the method
# `to_bytes` of a number, as in `(1).to_bytes(10**9)`.
_TYPES_WITH_CHECKED_METHODS = (str, bytes, int, float)
# A template may write values of these types as text. For any other object, only the name of its
# type is written, because the text of the object may contain a memory address.
_PRINTABLE_TYPES = (str, int, float, bool, list, tuple, dict, type(None), Undefined)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The Jinja environment of the `transformers` library, with limits on time and output.

    jinja2 calls a method of this class for each operation of a template. The method raises
    LimitError if the operation exceeds the budget.

    Attributes:
        budget: The steps, characters and seconds that the renderings may still use.
        literal_size: The number of characters of literal text in the template. One loop item or one
            macro call can write at most this number of literal characters.
    """

    code_generator_class = TimedCodeGenerator
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, budget: Budget, *, is_immutable: bool, now: Callable[[], datetime]) -> None:
        """Create the environment in which one template runs, with its filters and functions.

        Args:
            budget: The steps, characters and seconds that all renderings together may use.
            is_immutable: Whether methods that change a list, such as `append`, are forbidden.
            now: A function that returns the time for the template's function `strftime_now`.
        """
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # The optimizer would run parts of a template without any limit.
            finalize=self._finalize,  # jinja2 calls this method for each value that is written.
            # `Generation` parses the block `{% generation %}`, and limits the time of parsing.
            extensions=[Generation, ext.loopcontrols],
            cache_size=0,
        )
        self.budget = budget
        self.literal_size = 0  # Set when the template has been compiled.
        self._is_immutable = is_immutable
        self._now = now
        # The constructor of the base class has set `self.filters` to the filters of jinja2.
        self.filters = {**self._allowed_filters(self.filters), **self._inserted_filters()}
        self._replace_functions()

    def _replace_functions(self) -> None:
        """Let templates call the functions of transformers in place of those of jinja2."""
        self.globals.pop("lipsum", None)  # This function returns random text.
        self.globals.update(
            namespace=SafeNamespace,  # rejects names that start with an underscore
            raise_exception=raise_exception,
            strftime_now=self._strftime_now,
        )

    def with_budget(self, budget: Budget) -> LimitedEnvironment:
        """Return an environment for the same template, with another budget."""
        env = LimitedEnvironment(budget, is_immutable=self._is_immutable, now=self._now)
        env.literal_size = self.literal_size
        return env

    def _allowed_filters(
        self, jinja_filters: Mapping[str, Callable[..., Any]]
    ) -> dict[str, Callable[..., Any]]:
        """Return the filters that a template may use, as a dict that maps names to functions.

        A filter is a function that a template calls as in `items | join(", ")`. The returned
        functions count each call as one step, and reject large results. Filters that are slow or
        random are removed. The filter `tojson` is replaced, because that of jinja2 escapes HTML.
        """
        # `tojson` passes each value that is not JSON, such as an iterator, to the function
        # `default`.
        own_tojson = partial(tojson, default=self._convert_for_json)
        functions: dict[str, Callable[..., Any]] = {**jinja_filters, "tojson": own_tojson}
        return {
            name: self._limit_filter(name, function)
            for name, function in functions.items()
            if name not in _REMOVED_FILTERS
        }

    def _inserted_filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters with which the sandbox counts and checks a template's operations.

        `CountingTransformer` adds calls of these filters to each template. Examples:

            `for m in messages`    becomes    `for m in messages | _count_items`
            `a ~ b`                becomes    `[a, b] | _concatenate`
            `[a, b]`               becomes    `[a, b] | _check_size`

        The names start with an underscore, so they do not collide with the filters of jinja2.
        """
        return {
            "_count_items": self._count_items,
            "_count_step": self._count_step,  # at the start of a recursive loop's body
            "_concatenate": self._concatenate,
            "_check_size": self._check_size,
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:  # noqa: ANN401
        """Return whether a template may access the attribute `attr` of an object.

        Example: the result for the method `append` of a list is False if `_is_immutable` is true.
        """
        if self._is_immutable:
            return super().is_safe_attribute(obj, attr, value)
        return SandboxedEnvironment.is_safe_attribute(self, obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:  # noqa: ANN401
        """Raise LimitError. jinja2 calls this method if a template accesses an unsafe attribute."""
        name = f"{type(obj).__name__}.{attribute}"
        raise LimitError(f"the template accesses {name}, which the sandbox does not allow")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        """Return the result of a binary operation. Example: in `2 ** 8`, `operator` is "**".

        Raises:
            LimitError: The result would be too large.
        """
        check_operator(self.budget, operator, left, right)
        return self.budget.check(super().call_binop(context, operator, left, right))

    def call(
        __self,
        __context: Context,
        __obj: Any,  # noqa: ANN401
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Call the function, method or macro `__obj` for a template, and return the result.

        jinja2 runs this method for each call in a template. The call counts as one step. As in the
        base class, the names of the parameters start with underscores, so that a template may use
        any other name for a keyword argument.

        Raises:
            LimitError: The result would be too large, or the template makes too many calls.
        """
        __self._count_call(__obj)
        owner = _owner_of_method(__obj)  # Such as the string in `text.replace(..)`, or None.
        if isinstance(owner, _TYPES_WITH_CHECKED_METHODS):
            # The check of `", ".join(items)` reads the items. If `items` is an iterator, it is
            # empty after the check. Therefore, a list replaces the iterator before the check. Only
            # `join` reads an iterator, and it accepts no keyword arguments.
            args = tuple(__self._iterator_to_list(argument) for argument in args)
            check_method(__self.budget, owner, __obj.__name__, (*args, *kwargs.values()))
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(owner, list | dict):
            # A method such as `append` may enlarge the list or dict, so its size is checked again.
            # Methods cannot change a tuple, and a template cannot create a set.
            __self.budget.check(owner)
        return __self.budget.check(result)

    def _count_call(self, function: object) -> None:
        """Count the call of a function, method or macro as one step.

        A macro may write literal text of the template. Therefore, the call of a macro also counts
        the length of all literal text. Other functions are Python functions, which write no literal
        text.
        """
        is_macro = isinstance(function, jinja2.runtime.Macro)
        self.budget.step(self.literal_size if is_macro else 0)

    def _limit_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that checks the budget before and after it calls `function`.

        A filter is a function that a template calls as in `items | join(", ")`. The returned filter
        counts each call as one step, and raises LimitError if the result would be too large.

        If `function` has the attribute `jinja_pass_arg`, jinja2 passes an object of its own, such
        as the environment, as the first argument.
        """
        num_jinja_args = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)  # This also copies the attribute `jinja_pass_arg`.
        def limited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self.budget.step()
            jinja_args = args[:num_jinja_args]
            filtered_value, *options = args[num_jinja_args:]
            value = self._readable_value(name, filtered_value)
            check_filter(self.budget, FilterCall(name, value, tuple(options), kwargs))
            return self.budget.check(function(*jinja_args, value, *options, **kwargs))

        return limited

    def _readable_value(self, filter_name: str, value: Any) -> Any:  # noqa: ANN401
        """Convert the value of a filter such as `join` to a list, if the value is an iterator.

        The check of such a filter reads the items, and this would consume an iterator. The values
        of all other filters are returned unchanged.
        """
        return self._iterator_to_list(value) if filter_name in _SUMMING_FILTERS else value

    def _iterator_to_list(self, value: Any) -> Any:  # noqa: ANN401
        """Return the items of an iterator as a list, and any other value unchanged.

        An iterator, such as the result of the filter `map`, has no length that a check could read.
        """
        return self._read_items(value) if isinstance(value, Iterator) else value

    def _read_items(self, iterator: Iterator[Any]) -> list[Any]:
        """Return the items of an iterator as a list.

        The size of each item is checked and added to the total size, because the items may be one
        long string many times.
        """
        return [self.budget.check(item) for item in iterator]

    def _convert_for_json(self, value: Any) -> list[Any]:  # noqa: ANN401
        """Convert an iterator to a list, so that the filter `tojson` can write its items.

        `tojson` calls this method with each value that JSON cannot represent.

        Raises:
            TypeError: The value is not an iterator. For example, the template has written a
                variable that is not defined.
        """
        if not isinstance(value, Iterator):
            type_name = type(value).__name__  # "Undefined", for example
            raise TypeError(f"the filter tojson cannot write a value of the type {type_name}")
        return self._read_items(value)

    def _strftime_now(self, text: str) -> str:
        """Return the current time as text. `text` is a time format such as "%Y-%m-%d"."""
        # `check_format` accepts every text that contains neither `%` nor `{`. The added `%` ensures
        # that the length of any text is checked.
        check_format(self.budget, "%" + text, values=())
        return self._now().strftime(text)

    # ---- the filters that `CountingTransformer` adds to a template ------------------------------

    def _count_items(self, items: Iterable[Any]) -> Iterable[Any]:
        """Return the items of a loop as an iterable that counts one step for each item.

        If `items` has a length, the result also has a length, because the template may read the
        length as `loop.length`.
        """
        if isinstance(items, list | tuple | str | dict | range):
            return CountedItems(items, self._yield_and_count)
        return self._yield_and_count(items)

    def _yield_and_count(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a loop, and count one step for each item."""
        for item in items:
            self._count_step()
            yield item

    def _count_step(self, _: object = None) -> None:
        """Count one step of a loop, and the length of the literal text that the step may write.

        `CountingTransformer` also inserts this method as a filter into templates. Each filter takes
        a value, so the method takes an argument, which it ignores.
        """
        self.budget.step(self.literal_size)

    def _check_size(self, value: Any) -> Any:  # noqa: ANN401
        """Return `value`, a list, tuple or dict that an expression of the template has created.

        Raises:
            LimitError: The value is too large.
        """
        # `self.budget` may be replaced after the filters have been created. Therefore, the filter
        # is this method, and not the method `check` of one budget.
        return self.budget.check(value)

    def _concatenate(self, parts: list[Any]) -> Any:  # noqa: ANN401
        """Return the result of the Jinja operator `~`, which joins values as text.

        Example: the parts of `"a" ~ 1` are ["a", 1], and the result is "a1".
        """
        for part in parts:
            self.budget.check(part)
        return self.budget.check("".join(str(part) for part in parts))

    @jinja2.pass_context
    def _finalize(self, context: Context, value: Any) -> Any:  # noqa: ANN401, ARG002
        """Return the value that jinja2 writes for the output block `{{ value }}`.

        A value of a printable type, such as a list, is returned unchanged, and its size is added to
        the budget. For any other value, the result is its type, such as "<function>", because its
        text may contain a memory address.

        Raises:
            LimitError: The value is too large.
        """
        if isinstance(value, Undefined):  # jinja2 itself writes an undefined value as "".
            return value
        if not isinstance(value, _PRINTABLE_TYPES):
            return f"<{type(value).__name__}>"
        return self.budget.check(value)


def _owner_of_method(function: object) -> object:
    """Return the object to which a bound method belongs, or None for any other function.

    >>> _owner_of_method("abc".replace), _owner_of_method(tojson)
    ('abc', None)
    """
    # jinja2 wraps the method `str.format` in a function. The attribute `__wrapped__` of this
    # function is the method itself.
    method = getattr(function, "__wrapped__", function)
    return getattr(method, "__self__", None)
