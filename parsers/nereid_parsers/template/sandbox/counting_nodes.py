"""Rewrites the syntax tree of a chat template, so that each operation of a rendering is counted.

jinja2 parses a template into a tree of nodes and generates Python code from the tree. `AddCounting`
adds filters to the tree, and the generated code then calls these filters at each loop item and for
each value that the template makes. `Generation` and `TimedCodeGenerator` limit the time of parsing
and of generating code.
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
    """A Jinja extension for the block `{% generation %}`, which surrounds the model's text.

    The block renders its body. The extension also limits the time in which jinja2 parses a
    template.
    """

    tags = {"generation"}  # noqa: RUF012  # the base class declares a mutable attribute

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        """Yield the tokens of a template, and raise LimitError if the time limit is exceeded."""
        for token in stream:
            self.environment.budget.check_time()  # type: ignore[attr-defined]
            yield token

    def parse(self, parser: Any) -> nodes.Node:  # noqa: ANN401  # jinja2's parser has no type here
        """Return the syntax tree of one block `{% generation %}`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_emit"), [], [], body).set_lineno(line)

    def _emit(self, caller: Callable[[], str]) -> str:
        """Return the rendered body of the block."""
        return caller()


class AddCounting(NodeTransformer):
    """Adds counting filters to a template's syntax tree, and records constants and variables.

    Example: `{% for m in messages %}` becomes `{% for m in messages | _count_items %}`. The
    environment in the module `environment` defines the filters. jinja2 finds the methods of this
    class by their names.

    Attributes:
        literals: The literal texts and string constants.
        literal_size: The number of characters of the literal texts.
        names: The names of the variables that the template reads.
        compared: The constants with which the template compares each variable.
    """

    def __init__(self, budget: Budget) -> None:
        """Create a transformer that calls `budget.check_time` at each node."""
        self._budget = budget
        self.literals: list[str] = []
        self.literal_size = 0
        self.names: set[str] = set()
        self.compared: dict[str, list[object]] = {}

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Visit a node, and raise LimitError if the time limit is exceeded."""
        self._budget.check_time()
        return super().visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Add the filter `_count_items` to a loop, so that the items of the loop are counted."""
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
        # A tuple can also be the target of an assignment, as in `{% set a, b = c %}`.
        is_value = node.ctx == "load" and bool(node.items)
        return _apply_filter(node, "_check_size") if is_value else node


def _apply_filter(node: Any, name: str) -> nodes.Filter:  # noqa: ANN401  # any expression
    """Return the Jinja expression `node | name`, which applies the filter `name` to `node`."""
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


class TimedCodeGenerator(CodeGenerator):
    """A code generator of jinja2 that raises LimitError when the time limit is exceeded."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Write the code of a node, and raise LimitError if the time limit is exceeded."""
        self.environment.budget.check_time()  # type: ignore[attr-defined]
        return super().visit(node, *args, **kwargs)
