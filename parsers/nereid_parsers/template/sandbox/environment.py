"""Compile and render chat templates as the library transformers does, but within limits.

The environment is that of `apply_chat_template` in transformers 5.23
(utils/chat_template_utils.py): an immutable sandbox, trimmed blocks, loop controls,
`{% generation %}`, `tojson` without escaping, `raise_exception` and `strftime_now`.

A template is an untrusted program. So every loop, call, filter, operator and output is counted
against a `Budget` while the template runs. In the analysis, `strftime_now` uses a fixed date, so
that two renderings can be compared. The module `request_template` renders the requests of a server,
and uses the current date.
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
_PRINTABLE_TYPES = (str, int, float, bool, list, tuple, dict, type(None), Undefined)
_MAX_MESSAGE = 300  # the largest number of characters of an error message


class RenderRefused(Exception):
    """A template failed to render a conversation. The message is the template's error message."""


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers, in which every operator and every function call is counted.

    Attributes:
        budget: The budget of all renderings.
        literal_size: The number of characters of literal text in the template. One loop item or one
            macro call can write at most this number of literal characters.
    """

    code_generator_class = TimedCodeGenerator
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, budget: Budget, *, is_immutable: bool, now: Callable[[], datetime]) -> None:
        """Create the environment in which one template runs, with its filters and functions.

        Args:
            budget: The budget of all renderings.
            is_immutable: Whether the template is forbidden to change lists, as in transformers.
            now: Returns the time that `strftime_now` writes.
        """
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # The optimizer runs parts of a template at compile time.
            finalize=self._finalize,  # This method reads `budget`, but only renderings call it.
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
        """Return the filters that a template may use. Each use of a filter is counted."""
        functions = {**self.filters, "tojson": tojson}
        return {
            name: self._counted_filter(name, function)
            for name, function in functions.items()
            if name not in _REMOVED_FILTERS
        }

    def _counting_filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters that count the operations of a template.

        The class `AddCounting` inserts these filters into each template. A template cannot call
        them by accident, because no chat template uses a filter whose name starts with an
        underscore.
        """
        return {
            "_count_items": self._count_items,
            "_count_step": self._count_step,
            "_concatenate": self._concatenate,
            # A new budget may replace `self.budget` later, so the attribute is read at each call.
            "_check_size": lambda value: self.budget.check(value),
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:  # noqa: ANN401
        """Return whether the template may access an attribute, such as the method `append`."""
        if self._is_immutable:
            return super().is_safe_attribute(obj, attr, value)
        return SandboxedEnvironment.is_safe_attribute(self, obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:  # noqa: ANN401
        """Raise LimitError, because the template accesses a forbidden attribute."""
        name = f"{type(obj).__name__}.{attribute}"
        raise LimitError(f"the template accesses {name}, which the sandbox does not allow")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        """Compute a binary operation. Raise LimitError if the result would be too large."""
        self.budget.check_operator(operator, left, right)
        return self.budget.check(super().call_binop(context, operator, left, right))

    def call(
        __self,
        __context: Context,
        __obj: Any,  # noqa: ANN401
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Call the function, method or macro `__obj`, and count the call and its result.

        jinja2 runs this method for each call in a template. The parameter names are copied from the
        base class. Names with underscores cannot collide with the names of keyword arguments that
        a template passes.

        Raises:
            LimitError: The result would be too large, or the template makes too many calls.
        """
        budget = __self.budget
        is_macro = isinstance(__obj, jinja2.runtime.Macro)
        # One call of a macro can write any of the template's literal text. A call of another
        # function writes no literal text of the template.
        budget.step(__self.literal_size if is_macro else 0)
        owner = _owner_of_method(__obj)
        if isinstance(owner, str | bytes | int | float):
            budget.check_method(owner, __obj.__name__, (*args, *kwargs.values()))
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(owner, list | dict):
            budget.check(owner)  # A method such as `append` makes its object larger.
        return budget.check(result)

    def _counted_filter(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that applies `inner`, counts each use, and rejects large results.

        A filter is a function that a template calls as in `items | join(", ")`. The returned filter
        raises LimitError if the template exceeds the budget.

        Args:
            name: The name of the filter, such as "join".
            inner: The function of the filter. If the function has the attribute `jinja_pass_arg`,
                jinja2 passes its own context or environment as the first argument.
        """
        pass_arg = getattr(inner, "jinja_pass_arg", None)
        num_jinja_args = 0 if pass_arg is None else 1  # the arguments that jinja2 itself passes

        def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self.budget.step()
            template_args = args[num_jinja_args:]  # the value and the options of the filter
            if template_args:
                value, *options = template_args
                self.budget.check_filter(name, value, tuple(options), kwargs)
            return self.budget.check(inner(*args, **kwargs))

        if pass_arg is not None:  # jinja2 reads this attribute before it calls a filter.
            counted.jinja_pass_arg = pass_arg  # type: ignore[attr-defined]
        return counted

    def _strftime_now(self, text: str) -> str:
        """Return the current time in a format such as "%Y-%m-%d"."""
        check_format("%" + text)
        return self._now().strftime(text)

    # ---- the filters that `AddCounting` adds to a template --------------------------------------

    def _count_items(self, items: Iterable[Any]) -> Iterable[Any]:
        """Convert the items of a loop to an iterable that counts one step for each item."""
        if isinstance(items, list | tuple | str | dict | range):
            return CountedItems(items, self._counted)
        return self._counted(items)

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items, and count one step for each item."""
        for item in items:
            self._count_step()
            yield item

    def _count_step(self, _: object = None) -> None:
        """Count one step. One step can write each literal text of the template at most once."""
        self.budget.step(self.literal_size)

    def _concatenate(self, parts: list[Any]) -> Any:  # noqa: ANN401
        """Return the result of the operator `~`. Example: ["a", 1] gives "a1"."""
        for part in parts:
            self.budget.check(part)
        return self.budget.check("".join(str(part) for part in parts))

    @jinja2.pass_context
    def _finalize(self, context: Context, value: Any) -> Any:  # noqa: ANN401, ARG002
        """Return what an output block `{{ value }}` writes. jinja2 converts the result to text.

        If JSON cannot contain the value, the result is the name of the value's type. The `repr` of
        the value is not used, because it may contain a memory address. jinja2 itself handles
        undefined values.

        Raises:
            LimitError: The value is too large.
        """
        if isinstance(value, Undefined):
            return value
        if not isinstance(value, _PRINTABLE_TYPES):
            return f"<{type(value).__name__}>"
        return self.budget.check(value)


def _owner_of_method(function: object) -> object:
    """Return the object whose method is called, such as `text` in `text.replace(..)`.

    Return None if the function is not a method.
    """
    # jinja2 wraps the method `str.format` in a function, which has no attribute `__self__`.
    method = getattr(function, "__wrapped__", function)
    return getattr(method, "__self__", None)


class CompiledTemplate:
    """A compiled template, which is rendered within a budget.

    Example: `CompiledTemplate("Hi {{ name }}", Budget()).render({"name": "Ann"})` returns "Hi Ann".

    Attributes:
        names: The names of the variables that the template reads.
        literals: The literal texts and string constants of the template.
        compared: The constants with which the template compares each variable.
        changes_lists: Whether the template calls methods that change lists. The sandbox of
            transformers forbids these methods, but this class renders such a template.
    """

    def __init__(
        self, source: str, budget: Budget, now: Callable[[], datetime] = lambda: _PROBE_TIME
    ) -> None:
        """Compile a template, and collect its variables and texts for the analysis.

        Args:
            source: The template.
            budget: The limits on the time and the output of the compilation and of all renderings.
            now: Returns the time that the function `strftime_now` of a template writes.

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
        self._code = _compile(env, source, counting)
        # During the compilation, `counting` has recorded the variables and texts of the template.
        self.names = frozenset(counting.names)
        self.literals = tuple(counting.literals)
        self.compared = {
            name: tuple(dict.fromkeys(constants)) for name, constants in counting.compared.items()
        }
        self._literal_size = counting.literal_size
        self._load(env)

    def _new_environment(self, budget: Budget) -> _LimitedEnvironment:
        """Return an environment in which this template may run."""
        return _LimitedEnvironment(budget, is_immutable=not self.changes_lists, now=self._now)

    def _load(self, env: _LimitedEnvironment) -> None:
        """Load the compiled code into `env`, and use this environment for all later renderings."""
        env.literal_size = self._literal_size
        self._environment = env
        self._template = jinja2.Template.from_code(env, self._code, dict(env.globals))

    def for_another_thread(self) -> CompiledTemplate:
        """Return a copy of this template that another thread may render.

        The copy has its own budget, but uses the same compiled code.
        """
        other = copy.copy(self)
        other._load(self._new_environment(Budget()))
        return other

    def render(self, variables: Mapping[str, Any], budget: Budget | None = None) -> str:
        """Render the template with `variables` and return the text.

        Args:
            variables: The variables that the template reads.
            budget: A budget for this and all later renderings. None keeps the present budget.

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
        except LimitError:  # The last handler would catch it as an exception of the template.
            raise
        except (RecursionError, MemoryError) as error:
            raise LimitError(
                "the macros or loops of the template call themselves too deeply"
            ) from error
        except jinja2.exceptions.SecurityError as error:
            raise RenderRefused(f"the sandbox does not allow this: {error}") from error
        except Exception as error:  # a template may raise any exception
            message = f"{type(error).__name__}: {error}"
            raise RenderRefused(message[:_MAX_MESSAGE]) from error


def _compile(env: _LimitedEnvironment, source: str, counting: AddCounting) -> CodeType:
    """Compile a template in which each operation is counted, and return the Python code.

    Args:
        env: The environment in which the template will run.
        source: The template.
        counting: Adds calls of counting filters to the syntax tree of the template, and records the
            template's variables and texts.

    Raises:
        TemplateError: The source has a syntax error.
        LimitError: The source is nested too deeply, or takes too long to compile.
    """
    try:
        python_code = _generate_python(env, source, counting)
        return env._compile(python_code, "<template>")
    except LimitError:  # The last handler would catch it as a ValueError.
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
    """Return the source of the Python code that renders a template.

    The arguments are those of `_compile`. jinja2 may also raise its own errors.

    Raises:
        LimitError: The code is too long, or takes too long to generate.
    """
    tree = env.parse(source)
    counting.visit(tree)
    # jinja2 has no public methods for the two steps of its compilation.
    python_code = env._generate(tree, name=None, filename=None)
    if len(python_code) > MAX_CODE:
        raise LimitError(
            f"the template compiles to {len(python_code)} characters of Python code, but the "
            f"limit is {MAX_CODE}"
        )
    return python_code
