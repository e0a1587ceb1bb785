"""Rewrites the syntax tree of a chat template, so that each operation of a rendering is counted.

jinja2 parses a template into a tree of nodes and generates Python code from the tree.
`CountingTransformer` adds filters to the tree. The generated code calls these filters at each loop
item and for each value that the template makes. `Generation` limits the time of parsing, and
`TimedCodeGenerator` limits the time of generating code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import ext, nodes
from jinja2.compiler import CodeGenerator
from jinja2.lexer import Token, TokenStream
from jinja2.visitor import NodeTransformer

from nereid_parsers.template.sandbox.limits import Budget


class Generation(ext.Extension):
    """A Jinja extension that parses the block `{% generation %}` and limits the time of parsing.

    In a chat template, the block surrounds the text that a model generates, so that a trainer can
    find this text. Here the block only renders its body.
    """

    tags = {"generation"}  # noqa: RUF012  # the base class declares a mutable attribute

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        """Yield the tokens of a template. Raise LimitError if parsing exceeds the time limit."""
        for token in stream:
            self.environment.budget.check_time()  # type: ignore[attr-defined]
            yield token

    def parse(self, parser: Any) -> nodes.Node:  # noqa: ANN401  # jinja2's parser has no type here
        """Parse one block `{% generation %}`, and return its node in the syntax tree.

        When the template runs, the node calls `_emit` with a function that renders the body.
        """
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_emit"), [], [], body).set_lineno(line)

    def _emit(self, caller: Callable[[], str]) -> str:
        """Return the rendered content of a block. The function `caller` renders the content."""
        return caller()


class CountingTransformer(NodeTransformer):
    """Adds counting filters to a syntax tree, and records the template's constants and variables.

    Example: `{% for m in messages %}` becomes `{% for m in messages | _count_items %}`. The class
    `LimitedEnvironment` defines the filters. jinja2 calls the method `visit_X` for each node of
    the class `X`, for example `visit_For` for a loop.

    Attributes:
        literals: The literal texts outside the tags, and the string constants inside the tags.
        literal_size: The number of characters of the literal texts outside the tags.
        names: The names of the variables that the template reads.
        compared: The constants with which the template compares each variable.
    """

    def __init__(self, budget: Budget) -> None:
        """Create a node transformer that calls `budget.check_time` at each node."""
        self._budget = budget
        self.literals: list[str] = []
        self.literal_size = 0
        self.names: set[str] = set()
        self.compared: dict[str, list[object]] = {}

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Rewrite a node and its children. Raise LimitError if the time limit is exceeded."""
        self._budget.check_time()
        return super().visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Add filters to a loop, so that each item of the loop is counted as one step."""
        self.generic_visit(node)
        node.iter = _apply_filter(node.iter, "_count_items")
        if node.recursive:
            # A recursive loop may call `loop(items)`. The filter `_count_items` does not count
            # these items, so a statement at the start of the loop body counts one step for each
            # item.
            step = _apply_filter(nodes.Const(0, lineno=node.lineno), "_count_step")
            node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Replace `a ~ b` by `[a, b] | _concatenate`, which checks the length of the result."""
        self.generic_visit(node)
        return _apply_filter(nodes.List(node.nodes, lineno=node.lineno), "_concatenate")

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        """Record a literal text of the template, such as `Hi ` in `Hi {{ name }}`."""
        self.literals.append(node.data)
        self.literal_size += len(node.data)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        """Record a string constant, such as "user" in `{% if role == "user" %}`."""
        if isinstance(node.value, str):
            self.literals.append(node.value)
        return node

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        """Record the name of a variable that the template reads, such as `name` in `{{ name }}`."""
        if node.ctx == "load":  # Otherwise the template assigns a value to the variable.
            self.names.add(node.name)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Record each constant that the template compares with a variable.

        Example: `{% if mode == "fast" %}` records the constant "fast" for the variable `mode`.
        """
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        constants = [constant.value for side in sides for constant in _constants(side)]
        for side in sides:
            if isinstance(side, nodes.Name):
                self.compared.setdefault(side.name, []).extend(constants)
        self.generic_visit(node)
        return node

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        """Add the filter `_check_size` to an expression that makes a list or a dict."""
        self.generic_visit(node)
        return _apply_filter(node, "_check_size") if node.items else node

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """Add the filter `_check_size` to an expression that makes a tuple.

        A tuple without this filter is returned if it is empty, or if it is the target of an
        assignment, as in `{% set a, b = c %}`.
        """
        self.generic_visit(node)
        is_value = node.ctx == "load" and bool(node.items)
        return _apply_filter(node, "_check_size") if is_value else node


def _apply_filter(node: Any, name: str) -> nodes.Filter:  # noqa: ANN401  # any expression
    """Return the Jinja expression `node | name`, which applies the filter `name` to `node`."""
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _constants(node: nodes.Expr) -> list[nodes.Const]:
    """Return the constants on one side of a comparison, as nodes of the syntax tree.

    Example: the side `"fast"` contains one constant, `["fast", "slow"]` contains two constants, and
    the variable `mode` contains none.
    """
    if isinstance(node, nodes.Const):
        return [node]
    if isinstance(node, nodes.List | nodes.Tuple):
        return [item for item in node.items if isinstance(item, nodes.Const)]
    return []


class TimedCodeGenerator(CodeGenerator):
    """The code generator of jinja2, extended with a time limit.

    The generator raises LimitError if generating the Python code of a template takes too long.
    """

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Generate the code of a node. Raise LimitError if the time limit is exceeded."""
        self.environment.budget.check_time()  # type: ignore[attr-defined]
        return super().visit(node, *args, **kwargs)
