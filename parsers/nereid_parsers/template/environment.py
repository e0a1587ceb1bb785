"""Compile and render chat templates as transformers does, within limits.

The environment is that of `apply_chat_template` in transformers 5.23
(utils/chat_template_utils.py): an immutable sandbox, trimmed blocks, loop controls,
`{% generation %}`, `tojson` without escaping, `raise_exception` and `strftime_now`.

A template is an untrusted program. So every loop, call, filter, operator and output is counted
against a `Budget` while the template runs. `strftime_now` uses a fixed date, so that two renderings
can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from nereid_parsers.errors import TemplateError
from nereid_parsers.template.limits import (
    MAX_SOURCE,
    Budget,
    LimitError,
    check_filter,
    check_format,
    check_method,
    check_operator,
)

_NOW = datetime(2025, 6, 1, 12, 0, 0)
# These filters are slow, random, or of no use in a chat template.
_REMOVED_FILTERS = ("urlize", "pprint", "xmlattr", "random", "wordwrap", "striptags")
_PRINTABLE_TYPES = (str, int, float, bool, list, tuple, dict, type(None), Undefined)
_MAX_MESSAGE = 300  # characters of an error message
_MAX_RAISED_MESSAGE = 500  # characters of a message that the template raises

_CURRENT_BUDGET: ContextVar[Budget] = ContextVar("nereid_template_budget")


class RenderRefused(Exception):
    """A template failed to render a conversation. The message is the template's error message."""


def _budget() -> Budget:
    """Return the budget of the rendering that runs in the current thread."""
    return _CURRENT_BUDGET.get()


# ---- additions to the parsed template -----------------------------------------------------------


class _Generation(ext.Extension):
    """The block `{% generation %}`, which marks the model's text. Its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares a mutable attribute

    def parse(self, parser: Any) -> nodes.Node:  # noqa: ANN401  # jinja2's parser has no type here
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_emit"), [], [], body).set_lineno(line)

    def _emit(self, caller: Callable[[], str]) -> str:
        return caller()


class _SafeNamespace(Namespace):
    """A template namespace in which no name may start with an underscore."""

    def __setitem__(self, name: str, value: object) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"a name in a namespace must not start with an underscore, but {name!r} does"
            )
        super().__setitem__(name, value)


class _AddCounting(NodeTransformer):
    """Adds counting filters to a parsed template, and records its constants and variables.

    Example: `{% for m in messages %}` becomes `{% for m in messages | _count_items %}`.

    Attributes:
        literals: The literal texts and string constants.
        literal_size: The number of characters of the literal texts.
        names: The names of the variables that the template reads.
        compared: The constants with which the template compares each variable.
    """

    def __init__(self) -> None:
        self.literals: list[str] = []
        self.literal_size = 0
        self.names: set[str] = set()
        self.compared: dict[str, list[object]] = {}

    def visit_For(self, node: nodes.For, *args: Any) -> nodes.Node:  # noqa: ANN401
        self.generic_visit(node, *args)
        node.iter = _apply_filter(node.iter, "_count_items")
        if node.recursive:
            # A recursive loop passes items to loop(). The filter for loop items does not count
            # these items.
            step = _apply_filter(nodes.Const(0, lineno=node.lineno), "_count_step")
            node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat, *args: Any) -> nodes.Node:  # noqa: ANN401
        self.generic_visit(node, *args)
        return _apply_filter(nodes.List(node.nodes, lineno=node.lineno), "_concatenate")

    def visit_TemplateData(self, node: nodes.TemplateData, *args: Any) -> nodes.Node:  # noqa: ANN401, ARG002
        self.literals.append(node.data)
        self.literal_size += len(node.data)
        return node

    def visit_Const(self, node: nodes.Const, *args: Any) -> nodes.Node:  # noqa: ANN401, ARG002
        if isinstance(node.value, str):
            self.literals.append(node.value)
        return node

    def visit_Name(self, node: nodes.Name, *args: Any) -> nodes.Node:  # noqa: ANN401, ARG002
        if node.ctx == "load":
            self.names.add(node.name)
        return node

    def visit_Compare(self, node: nodes.Compare, *args: Any) -> nodes.Node:  # noqa: ANN401
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        constants = [constant.value for side in sides for constant in _constants(side)]
        for side in sides:
            if isinstance(side, nodes.Name):
                self.compared.setdefault(side.name, []).extend(constants)
        self.generic_visit(node, *args)
        return node

    def _visit_container(self, node: Any, *args: Any) -> nodes.Node:  # noqa: ANN401  # List or Dict
        self.generic_visit(node, *args)
        return _apply_filter(node, "_check_size") if node.items else node

    # jinja2 finds these methods by their names.
    visit_List = visit_Dict = _visit_container

    def visit_Tuple(self, node: nodes.Tuple, *args: Any) -> nodes.Node:  # noqa: ANN401
        self.generic_visit(node, *args)
        if node.ctx != "load" or not node.items:
            return node
        return _apply_filter(node, "_check_size")


def _apply_filter(node: Any, name: str) -> nodes.Filter:  # noqa: ANN401  # any expression
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _constants(node: nodes.Expr) -> list[nodes.Const]:
    """Return the constants on one side of a comparison, for example the items of a list."""
    if isinstance(node, nodes.Const):
        return [node]
    if isinstance(node, nodes.List | nodes.Tuple):
        return [item for item in node.items if isinstance(item, nodes.Const)]
    return []


# ---- counting filters ---------------------------------------------------------------------------


def _count_items(items: Iterable[Any]) -> Iterable[Any]:
    """Wrap the items of a loop, so that each item is counted when the loop reads the item.

    The result has a length if `items` has a length, because the loop variable `loop.last` needs
    one.
    """
    if isinstance(items, list | tuple | str | dict | range):
        return _CountedItems(items)
    return _counted(items)


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _count_step(item)
        yield item


class _CountedItems:
    """A sequence whose items are counted when a loop reads them."""

    def __init__(self, items: list[Any] | tuple[Any, ...] | str | dict[Any, Any] | range) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return _counted(self._items)


def _count_step(_: object) -> None:
    budget = _budget()
    budget.step(budget.literal_size)


def _concatenate(parts: list[Any]) -> Any:  # noqa: ANN401  # the result of the operator `~`
    budget = _budget()
    for part in parts:
        budget.check(part)
    return budget.check("".join(str(part) for part in parts))


def _check_size(value: Any) -> Any:  # noqa: ANN401  # a list, tuple or dict
    return _budget().check(value)


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> Any:  # noqa: ANN401, ARG001
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
    return _budget().check(value)


# ---- functions of the environment ---------------------------------------------------------------


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


def _strftime_now(text: str) -> str:
    check_format("%" + text)
    return _NOW.strftime(text)


# ---- the environment ----------------------------------------------------------------------------


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers, in which every operator and every function call is counted.

    Attributes:
        is_immutable: Whether templates are forbidden to change lists, as in transformers.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    is_immutable = True

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:  # noqa: ANN401
        if not self.is_immutable:
            return SandboxedEnvironment.is_safe_attribute(self, obj, attr, value)
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:  # noqa: ANN401
        name = f"{type(obj).__name__}.{attribute}"
        raise LimitError(f"the template accesses {name}, which the sandbox does not allow")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        """Return the result of a binary operation. Raise LimitError if it would be too large."""
        budget = _budget()
        check_operator(budget, operator, left, right)
        return budget.check(super().call_binop(context, operator, left, right))

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
        budget = _budget()
        is_macro = isinstance(__obj, jinja2.runtime.Macro)
        budget.step(budget.literal_size if is_macro else 0)
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str | bytes | int | float):
            check_method(budget, owner, __obj.__name__, (*args, *kwargs.values()))
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(owner, list | dict):
            budget.check(owner)  # A method such as `append` makes its object larger.
        return budget.check(result)


def _counted_filter(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that applies `inner` and counts each use. Too large results are rejected."""
    pass_arg = getattr(inner, "jinja_pass_arg", None)
    value_at = 0 if pass_arg is None else 1  # jinja2 passes its own object first to such a filter

    def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        budget = _budget()
        budget.step()
        if len(args) > value_at:
            check_filter(budget, name, args[value_at], args[value_at + 1 :], kwargs)
        return budget.check(inner(*args, **kwargs))

    if pass_arg is not None:
        counted.jinja_pass_arg = pass_arg  # type: ignore[attr-defined]
    return counted


@lru_cache(maxsize=2)
def _environment(is_immutable: bool) -> _LimitedEnvironment:
    env = _LimitedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # the optimizer would run parts of a template while it compiles
        finalize=_finalize,
        extensions=[_Generation, ext.loopcontrols],
        cache_size=0,
    )
    env.is_immutable = is_immutable
    for name in _REMOVED_FILTERS:
        env.filters.pop(name, None)
    env.filters["tojson"] = tojson
    for name, inner in list(env.filters.items()):
        env.filters[name] = _counted_filter(name, inner)
    env.filters.update(
        _count_items=_count_items,
        _count_step=_count_step,
        _concatenate=_concatenate,
        _check_size=_check_size,
    )
    env.globals.pop("lipsum", None)
    env.globals.update(
        namespace=_SafeNamespace, raise_exception=_raise_exception, strftime_now=_strftime_now
    )
    return env


class CompiledTemplate:
    """A compiled template, which is rendered within a budget.

    Attributes:
        source: The template's source.
        budget: The budget that all renderings share.
        names: The names of the variables that the template reads.
        literals: The literal texts and string constants of the template.
        compared: The constants with which the template compares each variable.
        changes_lists: Whether the template calls methods that change lists. The sandbox of
            transformers forbids these methods, but this class renders such a template.
    """

    def __init__(self, source: str, budget: Budget) -> None:
        """Compile `source`.

        Raises:
            TemplateError: The source has a syntax error.
            LimitError: The source is too long or nested too deeply.
        """
        if len(source) > MAX_SOURCE:
            raise LimitError(
                f"the template has {len(source)} characters, but the limit is {MAX_SOURCE}"
            )
        self.source = source
        self.budget = budget
        self.changes_lists = ".append(" in source or ".pop(" in source
        env = _environment(not self.changes_lists)
        recorded = _AddCounting()
        try:
            tree = env.parse(source)
            recorded.visit(tree)
            code = env.compile(tree)
        except (RecursionError, MemoryError, OverflowError) as error:
            raise LimitError("the template is nested too deeply to compile") from error
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the template does not compile: {error} (line {error.lineno})"
            ) from error
        except (SyntaxError, ValueError) as error:
            raise TemplateError(f"the template does not compile: {error}") from error
        self.literals = tuple(recorded.literals)
        self.names = frozenset(recorded.names)
        self.compared = {
            name: tuple(dict.fromkeys(constants)) for name, constants in recorded.compared.items()
        }
        self._literal_size = recorded.literal_size
        self._template = jinja2.Template.from_code(env, code, dict(env.globals))

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render the template with `variables` and return the text.

        Raises:
            RenderRefused: The template failed or raised an exception.
            LimitError: The rendering exceeded the budget.
        """
        token = _CURRENT_BUDGET.set(self.budget)
        try:
            self.budget.literal_size = self._literal_size
            self.budget.step(self._literal_size)
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
        finally:
            _CURRENT_BUDGET.reset(token)
