"""Compile and render chat templates as the library transformers does, but within limits.

The environment is that of `apply_chat_template` in transformers 5.23
(utils/chat_template_utils.py): an immutable sandbox, trimmed blocks, loop controls,
`{% generation %}`, `tojson` without escaping, `raise_exception` and `strftime_now`.

A template is an untrusted program. So each loop item, call, filter, operator and output of a
rendering is checked against a `Budget`, which limits the time and the output. In the analysis,
`strftime_now` uses a fixed date, so that two renderings can be compared. The module
`request_template` renders the requests of a server, and uses the current date.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import CodeType
from typing import Any

import jinja2
from jinja2 import ext
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from nereid_parsers.errors import TemplateError
from nereid_parsers.template.sandbox.counting_nodes import (
    AddCounting,
    Generation,
    TimedCodeGenerator,
)
from nereid_parsers.template.sandbox.functions import (
    CountedItems,
    SafeNamespace,
    raise_exception,
    tojson,
)
from nereid_parsers.template.sandbox.limits import (
    MAX_CODE,
    MAX_SOURCE,
    Budget,
    LimitError,
    check_format,
)

_PROBE_TIME = datetime(2025, 6, 1, 12, 0, 0)
# Filters that are slow or random, or that no chat template needs.
_REMOVED_FILTERS = ("urlize", "pprint", "xmlattr", "random", "wordwrap", "striptags")
# The types whose values a template may write. The text of another value may be a memory address.
_PRINTABLE_TYPES = (str, int, float, bool, list, tuple, dict, type(None), Undefined)
_MAX_MESSAGE = 300  # the largest number of characters of an error message


class RenderRefused(Exception):
    """A template failed to render a conversation. The text of the error states the reason."""


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The Jinja environment of transformers, with limits on the time and the output of a template.

    Each operation of a template calls a method of this class, which checks the budget.

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
            extensions=[Generation, ext.loopcontrols],
            cache_size=0,
        )
        self.budget = budget
        self.literal_size = 0  # `CompiledTemplate` sets this attribute after the compilation.
        self._is_immutable = is_immutable
        self._now = now
        self.filters = {**self._allowed_filters(), **self._counting_filters()}
        self.globals.pop("lipsum", None)  # This function returns random text.
        self.globals.update(
            namespace=SafeNamespace,
            raise_exception=raise_exception,
            strftime_now=self._strftime_now,
        )

    def _allowed_filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters that a template may use, by name.

        A filter is a function that a template calls as in `items | join(", ")`. The returned
        functions count each call as one step, and reject large results.
        """
        functions = {**self.filters, "tojson": tojson}
        return {
            name: self._limit_filter(name, function)
            for name, function in functions.items()
            if name not in _REMOVED_FILTERS
        }

    def _counting_filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters that `AddCounting` inserts into each template, by name.

        The filters count the operations of a rendering, for example the items of a loop. The names
        start with an underscore, so they do not collide with the filters that templates use.
        """
        return {
            "_count_items": self._count_items,
            "_count_step": self._count_step,
            "_concatenate": self._concatenate,
            # The lambda reads `self.budget` at each call, because `render` may replace the budget.
            "_check_size": lambda value: self.budget.check(value),
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:  # noqa: ANN401
        """Return whether a template may access the attribute `attr` of an object.

        Example: the method `append` of a list is safe only if the template may change lists.
        """
        if self._is_immutable:
            return super().is_safe_attribute(obj, attr, value)
        return SandboxedEnvironment.is_safe_attribute(self, obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:  # noqa: ANN401
        """Raise LimitError. jinja2 calls this method if a template accesses an unsafe attribute."""
        name = f"{type(obj).__name__}.{attribute}"
        raise LimitError(f"the template accesses {name}, which the sandbox does not allow")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        """Return the result of `left operator right`, as in `2 ** 8`.

        Raises:
            LimitError: The result would be too large.
        """
        self.budget.check_operator(operator, left, right)
        return self.budget.check(super().call_binop(context, operator, left, right))

    def call(
        __self,
        __context: Context,
        __obj: Any,  # noqa: ANN401
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Call the function, method or macro `__obj` for a template, and return its result.

        jinja2 runs this method for each call in a template. The call counts as one step. The names
        of the parameters are those of the base class. They start with underscores, so that a
        template may use any other name for a keyword argument.

        Raises:
            LimitError: The result would be too large, or the template makes too many calls.
        """
        budget = __self.budget
        is_macro = isinstance(__obj, jinja2.runtime.Macro)
        # A macro is a part of the template, so its call can write all literal text of the template.
        # Other functions are written in Python, and write no text of the template.
        budget.step(__self.literal_size if is_macro else 0)
        owner = _owner_of_method(__obj)
        if isinstance(owner, str | bytes | int | float):
            budget.check_method(owner, __obj.__name__, (*args, *kwargs.values()))
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(owner, list | dict):
            budget.check(owner)  # A method such as `append` makes the list larger.
        return budget.check(result)

    def _limit_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that checks the budget before and after it calls `function`.

        A filter is a function that a template calls as in `items | join(", ")`. The returned filter
        counts each call as one step, and raises LimitError if the result would be too large.

        Args:
            name: The name of the filter, such as "join".
            function: The function of the filter. Its attribute `jinja_pass_arg`, if any, demands
                that jinja2 passes an object of its own, such as the environment, before the value.
        """
        pass_arg = getattr(function, "jinja_pass_arg", None)
        value_index = 0 if pass_arg is None else 1

        def limited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self.budget.step()
            template_args = args[value_index:]  # the value before the `|`, and the options
            if template_args:
                value, *options = template_args
                self.budget.check_filter(name, value, tuple(options), kwargs)
            return self.budget.check(function(*args, **kwargs))

        if pass_arg is not None:  # jinja2 then passes its object to the returned filter, too.
            limited.jinja_pass_arg = pass_arg  # type: ignore[attr-defined]
        return limited

    def _strftime_now(self, text: str) -> str:
        """Return the current time as text. `text` is a time format such as "%Y-%m-%d"."""
        check_format("%" + text)  # `check_format` ignores a text without a `%`, so one is added.
        return self._now().strftime(text)

    # ---- the filters that `AddCounting` adds to a template --------------------------------------

    def _count_items(self, items: Iterable[Any]) -> Iterable[Any]:
        """Return the items of a loop as an iterable that counts one step for each item.

        If `items` has a length, the result also has a length, because the template may read it.
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
        """Count one step of a loop, which can write each literal text of the template once.

        `AddCounting` inserts this method as a filter, so it accepts the value of a filter.
        """
        self.budget.step(self.literal_size)

    def _concatenate(self, parts: list[Any]) -> Any:  # noqa: ANN401
        """Return the result of the Jinja operator `~`, which joins values as text.

        Example: the parts of `"a" ~ 1` are ["a", 1], and the result is "a1".
        """
        for part in parts:
            self.budget.check(part)
        return self.budget.check("".join(str(part) for part in parts))

    @jinja2.pass_context
    def _finalize(self, context: Context, value: Any) -> Any:  # noqa: ANN401, ARG002
        """Return the value that jinja2 writes as text for the output block `{{ value }}`.

        Example: a list is returned unchanged. For a function, the result is "<function>", because
        the text of a function contains a memory address.

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
    # jinja2 wraps the method `str.format` in a function, so the method itself must be found first.
    method = getattr(function, "__wrapped__", function)
    return getattr(method, "__self__", None)


class CompiledTemplate:
    """A compiled chat template, whose renderings are limited in time and output.

    Example: `CompiledTemplate("Hi {{ name }}", Budget()).render({"name": "Ann"})` returns "Hi Ann".

    Attributes:
        names: The names of the variables that the template reads.
        literals: The literal texts and string constants of the template.
        compared: The constants with which the template compares each variable.
        changes_lists: Whether the template calls methods that change lists, such as `append`. The
            sandbox of transformers forbids these methods, but this class allows them.
    """

    def __init__(
        self, source: str, budget: Budget, now: Callable[[], datetime] = lambda: _PROBE_TIME
    ) -> None:
        """Compile a template, and collect its variables and texts for the analysis.

        Args:
            source: The text of the template.
            budget: The steps, characters and seconds that the compilation and all renderings may
                use.
            now: A function that returns the time for the template's function `strftime_now`.

        Raises:
            TemplateError: The source has a syntax error.
            LimitError: The source is too long or nested too deeply, or takes too long to compile.
        """
        if len(source) > MAX_SOURCE:
            raise LimitError(
                f"the template has {len(source)} characters, but the limit is {MAX_SOURCE}"
            )
        self.changes_lists = ".append(" in source or ".pop(" in source
        self._now = now
        env = self._new_environment(budget)
        counting = AddCounting(budget)
        self._code = _compile(env, source, counting)  # `counting` records variables and texts.
        self.names = frozenset(counting.names)
        self.literals = tuple(counting.literals)
        self.compared = {
            name: tuple(dict.fromkeys(constants)) for name, constants in counting.compared.items()
        }
        self._literal_size = counting.literal_size
        self._load(env)

    def _new_environment(self, budget: Budget) -> _LimitedEnvironment:
        """Return a Jinja environment for this template, with the given budget."""
        return _LimitedEnvironment(budget, is_immutable=not self.changes_lists, now=self._now)

    def _load(self, env: _LimitedEnvironment) -> None:
        """Load the compiled code into the Jinja environment `env`, which later renderings use.

        Mutates: `_environment`, `_template` and `env.literal_size`.
        """
        env.literal_size = self._literal_size
        self._environment = env
        self._template = jinja2.Template.from_code(env, self._code, dict(env.globals))

    def for_another_thread(self) -> CompiledTemplate:
        """Return a copy of this template that another thread may render.

        The copy has its own budget and environment, but shares the compiled code with the original.
        """
        other = copy.copy(self)
        other._load(self._new_environment(Budget()))
        return other

    def render(self, variables: Mapping[str, Any], budget: Budget | None = None) -> str:
        """Render the template with `variables` and return the text.

        Args:
            variables: The variables that the template reads.
            budget: The budget for this and all later renderings. If None, the budget of the last
                rendering is used further.

        Raises:
            RenderRefused: The template failed or raised an exception.
            LimitError: The rendering exceeded the budget.
        """
        env = self._environment
        if budget is not None:
            env.budget = budget
        try:
            # The text outside all loops and macros is written once, so it counts as one step.
            env.budget.step(env.literal_size)
            return "".join(self._template.generate(**variables))
        except LimitError:  # Without this handler, `except Exception` would catch a LimitError.
            raise
        except (RecursionError, MemoryError) as error:
            raise LimitError(
                "the macros or loops of the template call themselves too deeply"
            ) from error
        except jinja2.exceptions.SecurityError as error:
            raise RenderRefused(f"the sandbox does not allow this: {error}") from error
        except Exception as error:  # A template may cause any exception.
            message = f"{type(error).__name__}: {error}"
            raise RenderRefused(message[:_MAX_MESSAGE]) from error


def _compile(env: _LimitedEnvironment, source: str, counting: AddCounting) -> CodeType:
    """Compile a template to Python code that counts each operation, and return the code object.

    Mutates: `counting`, which records the variables and texts of the template.

    Args:
        env: The environment in which the template will run.
        source: The text of the template.
        counting: Adds filters that count the operations to the syntax tree of the template.

    Raises:
        TemplateError: The source has a syntax error.
        LimitError: The source is nested too deeply, or takes too long to compile.
    """
    try:
        python_code = _generate_python(env, source, counting)
        return env._compile(python_code, "<template>")
    except LimitError:  # A LimitError is a ValueError, which the last handler would catch.
        raise
    except (RecursionError, MemoryError, OverflowError) as error:
        raise LimitError("the template is nested too deeply to compile") from error
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(
            f"the template does not compile: {error} (line {error.lineno})"
        ) from error
    except (SyntaxError, ValueError) as error:
        raise TemplateError(f"the template does not compile: {error}") from error


def _generate_python(env: _LimitedEnvironment, source: str, counting: AddCounting) -> str:
    """Return the text of a Python program that renders a template and counts each operation.

    Mutates: `counting`, which records the variables and texts of the template.

    Args:
        env: The environment in which the template will run.
        source: The text of the template.
        counting: Adds filters that count the operations to the syntax tree of the template.

    Raises:
        LimitError: The program is too long, or takes too long to generate.
        jinja2.TemplateSyntaxError: The template has a syntax error.
    """
    tree = env.parse(source)
    counting.visit(tree)
    # jinja2 has no public method that generates the Python program of a syntax tree.
    python_code = env._generate(tree, name=None, filename=None)
    if len(python_code) > MAX_CODE:
        raise LimitError(
            f"the template compiles to {len(python_code)} characters of Python code, but the "
            f"limit is {MAX_CODE}"
        )
    return python_code
