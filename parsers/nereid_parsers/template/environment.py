"""Compile and render chat templates as transformers does, within limits.

The environment is that of `apply_chat_template` in transformers 5.23
(utils/chat_template_utils.py): an immutable sandbox, trimmed blocks, loop controls,
`{% generation %}`, `tojson` without escaping, `raise_exception` and `strftime_now`.

A template is an untrusted program. So every loop, call, filter, operator and output is counted
against a `Budget` while the template runs. In a `CompiledTemplate`, which the analysis uses,
`strftime_now` uses a fixed date, so that two renderings can be compared. A `RequestTemplate`
renders the requests of a server with the current date.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import CodeType
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes
from jinja2.compiler import CodeGenerator
from jinja2.lexer import Token, TokenStream
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from nereid_parsers.errors import TemplateError
from nereid_parsers.template.limits import (
    MAX_CODE,
    MAX_SOURCE,
    Budget,
    LimitError,
    check_format,
    limits_for_request,
)

_PROBE_TIME = datetime(2025, 6, 1, 12, 0, 0)
# These filters are slow, random, or of no use in a chat template.
_REMOVED_FILTERS = ("urlize", "pprint", "xmlattr", "random", "wordwrap", "striptags")
_PRINTABLE_TYPES = (str, int, float, bool, list, tuple, dict, type(None), Undefined)
_MAX_MESSAGE = 300  # characters of an error message
_MAX_RAISED_MESSAGE = 500  # characters of a message that the template raises


class RenderRefused(Exception):
    """A template failed to render a conversation. The message is the template's error message."""


# ---- functions of the environment ---------------------------------------------------------------


class _SafeNamespace(Namespace):
    """A template namespace in which no name may start with an underscore."""

    def __setitem__(self, name: str, value: object) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"a name in a namespace must not start with an underscore, but {name!r} does"
            )
        super().__setitem__(name, value)


def tojson(
    value: Any,  # noqa: ANN401
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON text without HTML escapes. Example: `tojson(["<"])` returns `["<"]`.

    Unlike transformers, this function also accepts the iterators that filters such as `map` return,
    and writes them as lists. Other template engines do so too, and some templates depend on this
    behaviour.
    """
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=list,
    )


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message)[:_MAX_RAISED_MESSAGE])


# ---- additions to a parsed template -------------------------------------------------------------


class _Generation(ext.Extension):
    """The block `{% generation %}`, which marks the model's text. Its body is rendered.

    The extension also limits the time in which jinja2 parses a template.
    """

    tags = {"generation"}  # noqa: RUF012  # the base class declares a mutable attribute

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        """Yield the tokens of a template, and raise LimitError if the time is over."""
        for token in stream:
            self.environment.budget.check_time()  # type: ignore[attr-defined]
            yield token

    def parse(self, parser: Any) -> nodes.Node:  # noqa: ANN401  # jinja2's parser has no type here
        """Return the node of one block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_emit"), [], [], body).set_lineno(line)

    def _emit(self, caller: Callable[[], str]) -> str:
        return caller()


class _AddCounting(NodeTransformer):
    """Adds counting filters to a parsed template, and records its constants and variables.

    Example: `{% for m in messages %}` becomes `{% for m in messages | _count_items %}`. The class
    `_LimitedEnvironment` defines the filters. jinja2 finds the methods of this class by their
    names.

    Attributes:
        literals: The literal texts and string constants.
        literal_size: The number of characters of the literal texts.
        names: The names of the variables that the template reads.
        compared: The constants with which the template compares each variable.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.literals: list[str] = []
        self.literal_size = 0
        self.names: set[str] = set()
        self.compared: dict[str, list[object]] = {}

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Visit a node, and raise LimitError if the time is over."""
        self._budget.check_time()
        return super().visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Count the items of a loop."""
        self.generic_visit(node)
        node.iter = _apply_filter(node.iter, "_count_items")
        if node.recursive:
            # A recursive loop passes items to loop(). The filter for loop items does not count
            # these items.
            step = _apply_filter(nodes.Const(0, lineno=node.lineno), "_count_step")
            node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Replace `a ~ b` by `[a, b] | _concatenate`, which checks the length of the result."""
        self.generic_visit(node)
        return _apply_filter(nodes.List(node.nodes, lineno=node.lineno), "_concatenate")

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        """Record a literal text."""
        self.literals.append(node.data)
        self.literal_size += len(node.data)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        """Record a string constant."""
        if isinstance(node.value, str):
            self.literals.append(node.value)
        return node

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        """Record the name of a variable that the template reads."""
        if node.ctx == "load":
            self.names.add(node.name)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Record the constants of a comparison, such as "fast" in `{% if mode == "fast" %}`."""
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        constants = [constant.value for side in sides for constant in _constants(side)]
        for side in sides:
            if isinstance(side, nodes.Name):
                self.compared.setdefault(side.name, []).extend(constants)
        self.generic_visit(node)
        return node

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        """Check the size of a list or a dict that the template makes."""
        self.generic_visit(node)
        return _apply_filter(node, "_check_size") if node.items else node

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """Check the size of a tuple that the template makes."""
        self.generic_visit(node)
        is_value = node.ctx == "load" and bool(node.items)  # not the targets of an assignment
        return _apply_filter(node, "_check_size") if is_value else node


def _apply_filter(node: Any, name: str) -> nodes.Filter:  # noqa: ANN401  # any expression
    """Return the expression `node | name`."""
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _constants(node: nodes.Expr) -> list[nodes.Const]:
    """Return the constants on one side of a comparison.

    Example: the sides `"fast"` and `["fast", "slow"]` give one constant and two constants.
    """
    if isinstance(node, nodes.Const):
        return [node]
    if isinstance(node, nodes.List | nodes.Tuple):
        return [item for item in node.items if isinstance(item, nodes.Const)]
    return []


# ---- the environment ----------------------------------------------------------------------------


class _CountedItems:
    """A sequence whose items are counted when a loop reads them.

    The sequence has a length, because the loop variable `loop.last` needs one.
    """

    def __init__(self, items: Any, count: Callable[[Iterable[Any]], Iterator[Any]]) -> None:  # noqa: ANN401
        self._items = items
        self._count = count

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return self._count(self._items)


class _TimedCodeGenerator(CodeGenerator):
    """The code generator of jinja2, which stops when the time of the budget is over."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Write the code of a node, and raise LimitError if the time is over."""
        self.environment.budget.check_time()  # type: ignore[attr-defined]
        return super().visit(node, *args, **kwargs)


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers, in which every operator and every function call is counted.

    Attributes:
        budget: The budget of all renderings.
        literal_size: The number of characters of literal text in the template. One loop item or one
            macro call can write at most this number of literal characters.
    """

    code_generator_class = _TimedCodeGenerator
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(
        self, budget: Budget, is_immutable: bool, now: Callable[[], datetime] = lambda: _PROBE_TIME
    ) -> None:
        """Create the environment of one template.

        Args:
            budget: The budget of all renderings.
            is_immutable: Whether the template is forbidden to change lists, as in transformers.
            now: Returns the time that `strftime_now` writes.
        """
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # the optimizer would run parts of a template while it compiles
            finalize=self._finalize,
            extensions=[_Generation, ext.loopcontrols],
            cache_size=0,
        )
        self.budget = budget
        self.literal_size = 0
        self._is_immutable = is_immutable
        filters = {**self.filters, "tojson": tojson}
        self.filters = {
            name: self._counted_filter(name, inner)
            for name, inner in filters.items()
            if name not in _REMOVED_FILTERS
        }
        self.filters.update(
            _count_items=self._count_items,
            _count_step=self._count_step,
            _concatenate=self._concatenate,
            _check_size=lambda value: self.budget.check(value),
        )
        self.globals.pop("lipsum", None)
        self.globals.update(
            namespace=_SafeNamespace,
            raise_exception=_raise_exception,
            strftime_now=self._strftime_now,
        )
        self._now = now

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
        """Return the result of a binary operation. Raise LimitError if it would be too large."""
        self.budget.check_operator(operator, left, right)
        return self.budget.check(super().call_binop(context, operator, left, right))

    # These parameter names are copied from the method of the base class. Names with underscores
    # cannot collide with the names of keyword arguments that a template passes.
    def call(
        __self,
        __context: Context,
        __obj: Any,  # noqa: ANN401
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Return the result of a function call. Raise LimitError if it would be too large."""
        budget = __self.budget
        is_macro = isinstance(__obj, jinja2.runtime.Macro)
        budget.step(__self.literal_size if is_macro else 0)
        # The object whose method is called, such as `text` in `text.replace(..)`.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str | bytes | int | float):
            budget.check_method(owner, __obj.__name__, (*args, *kwargs.values()))
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(owner, list | dict):
            budget.check(owner)  # A method such as `append` makes its object larger.
        return budget.check(result)

    def _counted_filter(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that applies `inner`, counts each use and rejects too large results.

        Args:
            name: The name of the filter, such as "join".
            inner: The function of the filter. jinja2 passes its own context or environment as the
                first argument if the function has the attribute `jinja_pass_arg`.
        """
        pass_arg = getattr(inner, "jinja_pass_arg", None)
        value_at = 0 if pass_arg is None else 1  # jinja2 passes its own object first

        def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self.budget.step()
            if len(args) > value_at:
                self.budget.check_filter(name, args[value_at], args[value_at + 1 :], kwargs)
            return self.budget.check(inner(*args, **kwargs))

        if pass_arg is not None:
            counted.jinja_pass_arg = pass_arg  # type: ignore[attr-defined]
        return counted

    def _strftime_now(self, text: str) -> str:
        """Return the current time in a format such as "%Y-%m-%d"."""
        check_format("%" + text)
        return self._now().strftime(text)

    # ---- the filters that `_AddCounting` adds to a template --------------------------------------

    def _count_items(self, items: Iterable[Any]) -> Iterable[Any]:
        """Wrap the items of a loop, so that each item is counted when the loop reads the item."""
        if isinstance(items, list | tuple | str | dict | range):
            return _CountedItems(items, self._counted)
        return self._counted(items)

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._count_step()
            yield item

    def _count_step(self, _: object = None) -> None:
        self.budget.step(self.literal_size)

    def _concatenate(self, parts: list[Any]) -> Any:  # noqa: ANN401
        """Return the result of the operator `~`. Example: ["a", 1] gives "a1"."""
        for part in parts:
            self.budget.check(part)
        return self.budget.check("".join(str(part) for part in parts))

    @jinja2.pass_context
    def _finalize(self, context: Context, value: Any) -> Any:  # noqa: ANN401, ARG002
        """Return the text that an output block `{{ value }}` writes.

        A value that JSON cannot contain is written as the name of its type, because its repr may
        contain an address.

        Raises:
            LimitError: The value is too large.
        """
        if isinstance(value, Undefined):
            return value
        if not isinstance(value, _PRINTABLE_TYPES):
            return f"<{type(value).__name__}>"
        return self.budget.check(value)


class CompiledTemplate:
    """A compiled template, which is rendered within a budget.

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
        """Compile `source`.

        Args:
            source: The template.
            budget: The budget of the compilation and of all renderings.
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
        env = _LimitedEnvironment(budget, not self.changes_lists, now)
        recorded = _AddCounting(budget)
        code = _compile(env, source, recorded)
        self.literals = tuple(recorded.literals)
        self.names = frozenset(recorded.names)
        self.compared = {
            name: tuple(dict.fromkeys(constants)) for name, constants in recorded.compared.items()
        }
        env.literal_size = recorded.literal_size
        self._environment = env
        self._template = jinja2.Template.from_code(env, code, dict(env.globals))

    def render(self, variables: Mapping[str, Any], budget: Budget | None = None) -> str:
        """Render the template with `variables` and return the text.

        Args:
            variables: The variables that the template reads.
            budget: The budget of this rendering and of all later ones. None for the present budget.

        Raises:
            RenderRefused: The template failed or raised an exception.
            LimitError: The rendering exceeded the budget.
        """
        env = self._environment
        env.budget = budget or env.budget
        try:
            env.budget.step(env.literal_size)
            return "".join(self._template.generate(**variables))
        except LimitError:
            raise
        except (RecursionError, MemoryError) as error:
            raise LimitError(
                "the macros or loops of the template call themselves too deeply"
            ) from error
        except jinja2.exceptions.SecurityError as error:
            raise RenderRefused(f"the sandbox does not allow this: {error}") from error
        except Exception as error:  # a template may fail like any other program
            message = f"{type(error).__name__}: {error}"
            raise RenderRefused(message[:_MAX_MESSAGE]) from error


class RequestTemplate:
    """A chat template that renders the requests of a server. Several threads may use it.

    The text is the same as that of `apply_chat_template` in transformers, but a template cannot
    occupy the server: each rendering has limits that grow with the size of the request.

    >>> RequestTemplate("{{ messages[0].content }}!").render({"messages": [{"content": "Hi"}]})
    'Hi!'
    """

    def __init__(self, source: str) -> None:
        """Compile `source`.

        Raises:
            TemplateError: The source has a syntax error, is too long or takes too long to compile.
        """
        self._template = CompiledTemplate(source, Budget(), datetime.now)
        self._lock = threading.Lock()  # All renderings of a template share its budget.

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render the template with the variables of one request and return the text.

        Args:
            variables: The variables `messages`, `tools`, `documents`, `add_generation_prompt`,
                `bos_token`, `eos_token` and those of the request, such as `enable_thinking`.

        Raises:
            RenderRefused: The template failed, or raised an exception because of the messages. The
                message of the error is the template's.
            LimitError: The rendering takes more than 5 seconds of processor time, or makes far more
                text than the request contains.
        """
        limits = limits_for_request(variables)
        with self._lock:
            return self._template.render(variables, Budget(limits))


def _compile(env: _LimitedEnvironment, source: str, counting: _AddCounting) -> CodeType:
    """Return the Python code of a template to which `counting` has added its filters.

    Raises:
        TemplateError: The source has a syntax error.
        LimitError: The source is nested too deeply, or takes too long to compile.
    """
    try:
        tree = env.parse(source)
        counting.visit(tree)
        python_code = env._generate(tree, name=None, filename=None)
        if len(python_code) > MAX_CODE:
            raise LimitError(
                f"the template compiles to {len(python_code)} characters of Python code, but the "
                f"limit is {MAX_CODE}"
            )
        return env._compile(python_code, "<template>")
    except LimitError:
        raise
    except (RecursionError, MemoryError, OverflowError) as error:
        raise LimitError("the template is nested too deeply to compile") from error
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(
            f"the template does not compile: {error} (line {error.lineno})"
        ) from error
    except (SyntaxError, ValueError) as error:
        raise TemplateError(f"the template does not compile: {error}") from error
