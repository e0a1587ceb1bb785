"""Chat templates, compiled and rendered as transformers does it, within limits.

The environment is that of `apply_chat_template` (transformers 5.23, utils/chat_template_utils.py):
immutable sandbox, trimmed blocks, loop controls, `{% generation %}`, `tojson` without escaping,
`raise_exception`, `strftime_now`. On top of it, every loop, call, filter, operator and output is
counted against a `Budget`. The clock stands still, so that renderings can be compared.
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
    check_format,
    check_numbers,
)

_CLOCK = datetime(2025, 6, 1, 12, 0, 0)
_ABSENT_FILTERS = (
    "urlize",
    "pprint",
    "xmlattr",
    "random",
    "wordwrap",
    "striptags",
)  # slow, or of no use in a chat template
_PRINTABLE = (str, int, float, bool, list, tuple, dict, type(None), Undefined)
_BUDGET: ContextVar[Budget] = ContextVar("nereid_template_budget")


class Refused(Exception):
    """The template would not render this conversation; the message is the template's own."""


def _spend() -> Budget:
    return _BUDGET.get()


class _Generation(ext.Extension):
    """`{% generation %}`, which marks the model's own text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  # the base class's own way

    def parse(self, parser: Any) -> nodes.Node:  # noqa: ANN401  # jinja2's parser is untyped here
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_emit"), [], [], body).set_lineno(line)

    def _emit(self, caller: Callable[[], str]) -> str:
        return caller()


class _Names(Namespace):
    """A namespace without names that start with an underscore."""

    def __setitem__(self, name: str, value: object) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")
        super().__setitem__(name, value)


class _Counting(NodeTransformer):
    """Leads loops, concatenations and containers through counting filters; notes what it passes."""

    def __init__(self) -> None:
        self.literals: list[str] = []
        self.literal_size = 0  # of the template's own text, string constants left out
        self.names: set[str] = set()
        self.compared: dict[str, list[object]] = {}

    def visit_For(self, node: nodes.For, *args: Any) -> nodes.Node:  # noqa: ANN401
        self.generic_visit(node, *args)
        node.iter = _filter(node.iter, "_each")
        if node.recursive:  # what is given to loop() does not come by `_each`
            tick = _filter(nodes.Const(0, lineno=node.lineno), "_tick")
            node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat, *args: Any) -> nodes.Node:  # noqa: ANN401
        self.generic_visit(node, *args)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_concat")

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
        values = [const.value for side in sides for const in _constants(side)]
        for side in sides:
            if isinstance(side, nodes.Name):
                self.compared.setdefault(side.name, []).extend(values)
        self.generic_visit(node, *args)
        return node

    def _container(self, node: Any, *args: Any) -> nodes.Node:  # noqa: ANN401  # List or Dict
        self.generic_visit(node, *args)
        return _filter(node, "_weighed") if node.items else node

    visit_List = visit_Dict = _container  # names the visitor looks for

    def visit_Tuple(self, node: nodes.Tuple, *args: Any) -> nodes.Node:  # noqa: ANN401
        self.generic_visit(node, *args)
        return _filter(node, "_weighed") if node.ctx == "load" and node.items else node


def _filter(node: Any, name: str) -> nodes.Filter:  # noqa: ANN401  # any expression
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _each(items: Iterable[Any]) -> Iterable[Any]:
    """The same items, counted; a loop also asks for their number, where they have one."""
    if isinstance(items, list | tuple | str | dict | range):
        return _CountedList(items)
    return _counted(items)


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    budget = _spend()
    for item in items:
        budget.step(budget.literal_size)
        yield item


class _CountedList:
    """Items of known number that are counted as they are taken."""

    def __init__(self, items: list[Any] | tuple[Any, ...] | str | dict[Any, Any] | range) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return _counted(self._items)


def _tick(_: object) -> None:
    budget = _spend()
    budget.step(budget.literal_size)


def _concat(parts: list[Any]) -> Any:  # noqa: ANN401  # as `~`
    budget = _spend()
    for part in parts:
        budget.check(part)
    return budget.check("".join(str(part) for part in parts))


def _weighed(value: Any) -> Any:  # noqa: ANN401  # a list or dict
    return _spend().check(value)


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> Any:  # noqa: ANN401, ARG001
    """What an output block writes, counted. Raises: LimitError."""
    if isinstance(value, Undefined):
        return value
    if not isinstance(value, _PRINTABLE):
        return f"<{type(value).__name__}>"
    return _spend().check(value)


def tojson(
    value: Any,  # noqa: ANN401
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes; what `map` gives counts as a list, as other engines have it."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
        sort_keys=sort_keys, default=list,
    )  # fmt: skip


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message)[:500])


def _strftime_now(text: str) -> str:
    check_format("%" + text)
    return _CLOCK.strftime(text)


class _Limited(ImmutableSandboxedEnvironment):
    """The sandbox, with everything counted."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    is_immutable = True

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:  # noqa: ANN401
        if not self.is_immutable:
            return SandboxedEnvironment.is_safe_attribute(self, obj, attr, value)
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:  # noqa: ANN401
        raise LimitError(f"the template reaches for {type(obj).__name__}.{attribute}: not allowed")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        budget = _spend()
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | bytes | list | tuple) and isinstance(times, int):
                    budget.foresee(len(many) * max(times, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            budget.foresee(left.bit_length() * abs(right) * 200)
        elif operator == "%":
            check_format(left)
            check_numbers(list(right) if isinstance(right, tuple) else [])
        return budget.check(super().call_binop(context, operator, left, right))

    def call(
        __self,  # the base class's own way, so that keywords stay free
        __context: Context,
        __obj: Any,  # noqa: ANN401
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        budget = _spend()
        budget.step(budget.literal_size if isinstance(__obj, jinja2.runtime.Macro) else 0)
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str | bytes | int | float):
            _foresee_method(budget, owner, __obj.__name__, (*args, *kwargs.values()))
        made = super().call(__context, __obj, *args, **kwargs)
        if isinstance(owner, list | dict):
            budget.check(owner)  # append and its like
        return budget.check(made)


def _foresee_method(budget: Budget, owner: Any, name: str, args: tuple[Any, ...]) -> None:  # noqa: ANN401
    check_numbers([arg for arg in args if not isinstance(arg, bool)])
    if name in ("format", "format_map"):
        check_format(owner)
    elif name == "replace" and len(args) > 1:
        _foresee_replace(budget, owner, *args[:2])
    elif name == "join" and args:
        _foresee_join(budget, args[0], owner)
    elif name == "expandtabs" and args:
        budget.foresee(len(owner) * max(int(args[0]), 1))


def _foresee_replace(budget: Budget, text: str, old: Any, new: Any) -> None:  # noqa: ANN401
    times = len(text) // max(len(str(old)), 1) + 1
    budget.foresee(len(text) + times * len(str(new)))


def _foresee_join(budget: Budget, items: Any, separator: Any) -> None:  # noqa: ANN401
    if isinstance(items, list | tuple | str | dict):
        budget.foresee(len(items) * (len(str(separator)) + 1))
        budget.check(items)


def _length(value: object) -> int:
    """How much text an indent or a pair of separators is."""
    if isinstance(value, list | tuple):
        return sum(_length(part) for part in value)
    return len(value) if isinstance(value, str) else 0


def _counted_filter(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is counted, and refused if its arguments ask for too much."""
    passes = getattr(inner, "jinja_pass_arg", None)
    skip = 1 if passes is not None else 0

    def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        budget = _spend()
        budget.step()
        given = args[skip:]
        if given:
            check_numbers([arg for arg in (*given[1:], *kwargs.values()) if type(arg) is int])
            if name == "replace" and len(given) > 2:
                _foresee_replace(budget, str(given[0]), given[1], given[2])
            elif name == "join":
                _foresee_join(budget, given[0], given[1] if len(given) > 1 else "")
            elif name == "format":
                check_format(given[0])
            elif name == "tojson":
                budget.foresee(sum(_length(arg) for arg in (*given[1:], *kwargs.values())) * 3000)
            elif name == "indent" and isinstance(given[0], str):
                width = next((arg for arg in (*given[1:], kwargs.get("width")) if arg), 4)
                size = len(width) if isinstance(width, str) else int(width)
                budget.foresee(given[0].count("\n") * size)
        return budget.check(inner(*args, **kwargs))

    if passes is not None:
        counted.jinja_pass_arg = passes  # type: ignore[attr-defined]
    return counted


@lru_cache(maxsize=2)
def _environment(is_immutable: bool) -> _Limited:
    env = _Limited(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # nothing of a template runs while it is compiled
        finalize=_finalize,
        extensions=[_Generation, ext.loopcontrols],
        cache_size=0,
    )
    for name in _ABSENT_FILTERS:
        env.filters.pop(name, None)
    env.filters["tojson"] = tojson
    for name, inner in list(env.filters.items()):
        env.filters[name] = _counted_filter(name, inner)
    env.is_immutable = is_immutable
    env.filters.update(_each=_each, _concat=_concat, _tick=_tick, _weighed=_weighed)
    env.globals.pop("lipsum", None)
    env.globals.update(
        namespace=_Names, raise_exception=_raise_exception, strftime_now=_strftime_now
    )
    return env


class CompiledTemplate:
    """A template, ready to be rendered within a budget.

    names           of the variables that it reads.
    literals        its literal text and string constants.
    compared        the constants that each variable is compared with.
    changes_lists   it calls methods that change lists, which transformers forbids.
    """

    def __init__(self, source: str, budget: Budget) -> None:
        """Compile.

        Raises: TemplateError for a syntax error; LimitError for one too large or too deep.
        """
        if len(source) > MAX_SOURCE:
            raise LimitError(f"a template of {len(source)} characters; the limit is {MAX_SOURCE}")
        self.source = source
        self.budget = budget
        self.changes_lists = ".append(" in source or ".pop(" in source
        env = _environment(not self.changes_lists)
        try:
            tree = env.parse(source)
            noted = _Counting()
            noted.visit(tree)
            code = env.compile(tree)
        except (RecursionError, MemoryError, OverflowError) as error:
            raise LimitError("the template is nested too deeply to compile") from error
        except jinja2.TemplateSyntaxError as error:
            at = f"line {error.lineno}"
            raise TemplateError(f"the template does not compile: {error} ({at})") from error
        except (SyntaxError, ValueError) as error:
            raise TemplateError(f"the template does not compile: {error}") from error
        self.literals = tuple(noted.literals)
        self.names = frozenset(noted.names)
        self.compared = {name: tuple(dict.fromkeys(v)) for name, v in noted.compared.items()}
        self._literal_size = noted.literal_size
        self._template = jinja2.Template.from_code(env, code, dict(env.globals))

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. Raises: Refused if the template fails; LimitError if it goes too far."""
        token = _BUDGET.set(self.budget)
        try:
            self.budget.literal_size = self._literal_size
            self.budget.step(self._literal_size)
            return "".join(self._template.generate(**variables))
        except LimitError:
            raise
        except (RecursionError, MemoryError) as error:
            raise LimitError("the template calls itself too deeply") from error
        except jinja2.exceptions.SecurityError as error:
            raise Refused(f"not allowed: {error}") from error
        except Exception as error:  # a template may fail in any way a program can
            raise Refused(f"{type(error).__name__}: {error}"[:300]) from error
        finally:
            _BUDGET.reset(token)


def _constants(node: nodes.Expr) -> list[nodes.Const]:
    if isinstance(node, nodes.Const):
        return [node]
    if isinstance(node, nodes.List | nodes.Tuple):
        return [item for item in node.items if isinstance(item, nodes.Const)]
    return []
