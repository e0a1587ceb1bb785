"""Compile and render chat templates in the same way as `transformers`, but with limits.

The environment is that of `apply_chat_template` in transformers 5.23
(utils/chat_template_utils.py): an immutable sandbox, trimmed blocks, loop controls,
`{% generation %}`, `tojson` without escaping, `raise_exception` and `strftime_now`.

A template is an untrusted program, so a `Budget` limits the time and the output of its renderings.
In the analysis, `strftime_now` uses a fixed date, so that two renderings can be compared. The
module `request_template` renders the requests of a server, and uses the current date.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from types import CodeType
from typing import Any, NamedTuple

import jinja2

from nereid_parsers.errors import TemplateError
from nereid_parsers.template.sandbox.counting_nodes import CountingTransformer
from nereid_parsers.template.sandbox.limited_environment import LimitedEnvironment
from nereid_parsers.template.sandbox.limits import MAX_CODE, MAX_SOURCE, Budget, LimitError

_PROBE_TIME = datetime(2025, 6, 1, 12, 0, 0)
_MAX_MESSAGE = 300  # the largest number of characters of an error message
_UNDEFINED_VARIABLE = re.compile(r"'(\w+)' is undefined")


class RenderRefused(Exception):
    """A template failed to render a conversation. The text of the error states the reason."""

    @property
    def undefined_variable(self) -> str | None:
        """The name of the undefined variable. None if the template failed for another reason.

        The errors of jinja2 contain this name only in their text. Example: the text
        "UndefinedError: 'today' is undefined" gives "today".
        """
        match = _UNDEFINED_VARIABLE.search(str(self))
        return None if match is None else match.group(1)


class _CompiledCode(NamedTuple):
    """The result of compiling a template.

    Attributes:
        code: The Python code that renders the template.
        records: The node transformer that has visited the template. It contains the variables and
            the constants of the template.
    """

    code: CodeType
    records: CountingTransformer


class CompiledTemplate:
    """A compiled chat template. A `Budget` limits the time and the output of its renderings.

    >>> CompiledTemplate("Hi {{ name }}", Budget()).render({"name": "Ann"})
    'Hi Ann'

    Attributes:
        names: The names of the variables that the template reads.
        literals: The literal texts and string constants of the template.
        compared: The constants with which the template compares each variable.
        changes_lists: Whether the template calls methods that change lists, such as `append`. Only
            such a template may call these methods. The sandbox of transformers forbids them.
    """

    def __init__(
        self, source: str, budget: Budget, now: Callable[[], datetime] = lambda: _PROBE_TIME
    ) -> None:
        """Compile a template, and collect its variables and constants for the analysis.

        Args:
            source: The text of the template.
            budget: The steps, characters and seconds that the compilation and all renderings may
                use.
            now: A function that returns the time for the template's function `strftime_now`.

        Raises:
            TemplateError: The source has a syntax error.
            LimitError: The source is too long or nested too deeply, or takes too long to compile.
        """
        _check_source_length(source)
        self.changes_lists = _calls_list_methods(source)
        # The sandbox of transformers forbids the methods that change lists. A template that needs
        # them is nevertheless analysed, and the report mentions the methods.
        env = LimitedEnvironment(budget, is_immutable=not self.changes_lists, now=now)
        self._environment = env
        self._code, records = _compile(env, source)
        self._template = _load_template(env, self._code)
        # In `{% if mode == "fast" %}Hi{% endif %}`, the names are {"mode"}, the literals are "fast"
        # and "Hi", and `compared` is {"mode": ("fast",)}.
        self.names = frozenset(records.names)
        self.literals = tuple(records.literals)
        self.compared = {  # `dict.fromkeys` removes the duplicates of a constant.
            name: tuple(dict.fromkeys(constants)) for name, constants in records.compared.items()
        }

    def for_another_thread(self) -> CompiledTemplate:
        """Return a copy of this template that another thread may render.

        The copy has its own budget and environment, but shares the compiled code with the original.
        """
        other = copy.copy(self)
        other._environment = self._environment.with_budget(Budget())
        other._template = _load_template(other._environment, self._code)
        return other

    def set_budget(self, budget: Budget) -> None:
        """Replace the budget. All later renderings of this template together may not exceed it."""
        self._environment.budget = budget

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render the template with `variables` and return the text.

        The rendering uses a part of the current budget, which limits the steps and the length of
        the text.

        Raises:
            RenderRefused: The template failed or raised an exception.
            LimitError: The rendering exceeded the budget.
        """
        with _errors_of_rendering():
            # A rendering writes each literal text at most once, except in loops and macros.
            # Therefore, the length of all literal texts is added to the used budget once here. For
            # each loop item and each call of a macro, the environment adds the length again.
            self._environment.budget.step(self._environment.literal_size)
            return "".join(self._template.generate(**variables))


def _check_source_length(source: str) -> None:
    """Raise LimitError if the source of a template is too long."""
    if len(source) > MAX_SOURCE:
        raise LimitError(
            f"the template has {len(source)} characters, but the limit is {MAX_SOURCE}"
        )


def _calls_list_methods(source: str) -> bool:
    """Return whether the source of a template calls `append` or `pop`, which change lists."""
    return ".append(" in source or ".pop(" in source


def _load_template(env: LimitedEnvironment, code: CodeType) -> jinja2.Template:
    """Return a template that runs the compiled `code` in the Jinja environment `env`."""
    return jinja2.Template.from_code(env, code, dict(env.globals))


@contextmanager
def _errors_of_rendering() -> Iterator[None]:
    """Convert any exception of a rendering into RenderRefused or LimitError.

    Example: a template divides by zero. The exception becomes
    RenderRefused("ZeroDivisionError: division by zero").
    """
    try:
        yield
    except LimitError:  # Otherwise, the last handler would catch a LimitError.
        raise
    except (RecursionError, MemoryError) as error:  # Deep recursion may also use up the memory.
        raise LimitError(
            "the macros or loops of the template call themselves too deeply"
        ) from error
    except jinja2.exceptions.SecurityError as error:
        raise RenderRefused(f"the sandbox does not allow this: {error}") from error
    except Exception as error:  # A template may raise any exception.
        message = f"{type(error).__name__}: {error}"
        raise RenderRefused(message[:_MAX_MESSAGE]) from error


def _compile(env: LimitedEnvironment, source: str) -> _CompiledCode:
    """Compile a template to Python code that counts each operation of a rendering.

    Mutates: `env.literal_size`, which becomes the length of all literal texts of the template. A
        rendering adds this length to the budget for each loop item and each call of a macro.

    Raises:
        TemplateError: The source has a syntax error.
        LimitError: The source is nested too deeply, or takes too long to compile.
    """
    transformer = CountingTransformer(env.budget)
    with _errors_of_compilation():
        # The next three calls check the time limit in `env.budget`. If the limit is exceeded, they
        # raise LimitError.
        tree = env.parse(source)
        transformer.visit(tree)
        # jinja2 has no public methods that convert a syntax tree to Python code and compile this
        # code, so private methods are called.
        python_code = env._generate(tree, name=None, filename=None)
        if len(python_code) > MAX_CODE:
            raise LimitError(
                f"the template compiles to {len(python_code)} characters of Python code, but the "
                f"limit is {MAX_CODE}"
            )
        code = env._compile(python_code, "<template>")
    env.literal_size = transformer.literal_size
    return _CompiledCode(code, transformer)


@contextmanager
def _errors_of_compilation() -> Iterator[None]:
    """Convert the exceptions of a compilation into TemplateError or LimitError.

    Example: if line 2 of a template contains a syntax error, the exception of jinja2 becomes a
    TemplateError whose text ends with "(line 2)".
    """
    try:
        yield
    except LimitError:  # A LimitError is a ValueError, which the last handler would catch.
        raise
    # A deeply nested template may also use up the memory, or cause an overflow in the compiler.
    except (RecursionError, MemoryError, OverflowError) as error:
        raise LimitError("the template is nested too deeply to compile") from error
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(
            f"the template does not compile: {error} (line {error.lineno})"
        ) from error
    except (SyntaxError, ValueError) as error:
        raise TemplateError(f"the template does not compile: {error}") from error
