"""The arithmetic of claims: comparisons of table cells, read from Python's own syntax tree and never run as code.

    table4["Multi(64, 8)"]["zs_cls_acc"] > table4["Ob(64, 8)"]["zs_cls_acc"]
    approximately(mean(table2["a"]["x"], table2["a"]["y"]), 6.1, 0.05) or table2["b"]["x"] >= 50

A cell is `table["row"]["column"]`, a value of an experiment `experiment["name"]["value"]`. There are numbers, + - *,
min, max, mean, the comparisons > >= < <= (chains too), approximately(a, b, within), and, or.

A comparison becomes one or more *margins*, numbers that are positive where it holds. min and max are resolved:
max(a, b) < c is a < c and b < c. So each margin is a smooth function of its cells and can have an interval.
"""

import ast
import copy
import functools
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

EXPERIMENT = "experiment"
_STEP = 2.0**-70  # its square vanishes beside 1
_SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_FUNCTIONS = {"min": min, "max": max, "mean": lambda numbers: sum(numbers) / len(numbers)}
_ACCEPTED = (
    'expected: table["row"]["column"], numbers, + - *, min, max, mean, approximately(a, b, within), > >= < <=, and, or'
)


class ExpressionError(ValueError):
    """An expression that is not of the language; the message gives its column (from 1)."""


class Cell(NamedTuple):
    """`table["row"]["column"]`; for an experiment the row is its name, the column the value's."""

    table: str
    row: str
    column: str

    def __str__(self) -> str:
        return f'{self.table}["{self.row}"]["{self.column}"]'


@dataclass(frozen=True)
class Margin:
    """The greater side of a comparison less the lesser one: it holds above 0, and at 0 too unless it is `strict`.

    text: the comparison in full, which identifies the margin.
    cells: those that can change the value, in the order of the difference.
    difference: without min and max.
    """

    text: str
    strict: bool
    cells: tuple[Cell, ...] = field(compare=False)
    difference: ast.expr = field(compare=False, repr=False)

    def value(self, numbers: Mapping[Cell, Any]) -> Any:
        """The margin of numbers (or equally long arrays) for its cells; KeyError for a missing one."""
        return _evaluate(self.difference, {**self._cancelled, **numbers})

    def slopes(self, numbers: Mapping[Cell, float]) -> dict[Cell, float]:
        """Derivatives of the value by cell, at `numbers`."""
        numbers = {**self._cancelled, **numbers}
        slopes = _slopes(self.difference, numbers)
        return {cell: slopes[cell] for cell in self.cells}

    @cached_property
    def _cancelled(self) -> dict[Cell, float]:
        # any number does for a cell that cannot change the value
        return dict.fromkeys(set(_named(self.difference)) - set(self.cells), 0.0)

    @cached_property
    def at_equality(self) -> float:
        """The value where all cells hold the same number; NaN where it depends on that number, 0 of one cell."""
        values = [round(self.value(dict.fromkeys(_named(self.difference), number)), 9) for number in (1.0, 2.0)]
        return 0.0 if len(self.cells) < 2 else values[0] if values[0] == values[1] else math.nan

    @cached_property
    def is_linear(self) -> bool:
        """Whether it has the unit of its cells; a product of two of them has another one."""
        unlike = {cell: 1.0 + place for place, cell in enumerate(self.cells)}  # equal ones hide products of differences
        slopes = (self.slopes({cell: at * value for cell, value in unlike.items()}) for at in (1.0, 2.0))
        return len({tuple(round(slope, 9) for slope in of.values()) for of in slopes}) == 1

    @property
    def allows(self) -> bool:
        """Whether equal numbers satisfy it: a >= b, a > b - 0.5 and a > 0.9 * b state "at least as good as"."""
        if len(self.cells) < 2:
            return False
        value = self.value(dict.fromkeys(_named(self.difference), 1.0))
        return value > 1.0e-9 or (not self.strict and value > -1.0e-9)


@dataclass(frozen=True)
class Logic:
    """`kind` is "and" or "or"."""

    kind: str
    parts: tuple["Condition", ...]


Condition = Margin | Logic


@functools.cache  # each part of a paper judges all of its claims
def parse(text: str) -> Condition:
    """The condition that an expression states.

    Raises:
        ExpressionError: for anything that is not of the language above.
    """
    text = " ".join(text.split())
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ExpressionError(f"column {error.offset or 1}: {error.msg}, in: {text}") from None
    return _condition(tree.body, text)


def all_of(conditions: Sequence[Condition]) -> Condition:
    """The conjunction; a single condition stays as it is."""
    return _logic("and", list(conditions))


def margins(condition: Condition) -> Iterator[Margin]:
    """The margins of a condition, in the order of the text."""
    if isinstance(condition, Margin):
        yield condition
    else:
        for part in condition.parts:
            yield from margins(part)


def has_alternatives(condition: Condition) -> bool:
    """Whether an "or" is in it."""
    return isinstance(condition, Logic) and (condition.kind == "or" or any(map(has_alternatives, condition.parts)))


def mean_margin(parts: Sequence[Margin]) -> Margin:
    """The mean of margins, as one that is to be above 0."""
    total = parts[0].difference
    for part in parts[1:]:
        total = ast.BinOp(total, ast.Add(), part.difference)
    difference = ast.BinOp(ast.Constant(1 / len(parts)), ast.Mult(), total)
    point = _point(difference)
    counting = (cell for cell, slope in _slopes(difference, point).items() if abs(slope) > 1.0e-12)
    return Margin(f"mean of: {'; '.join(part.text for part in parts)}", True, tuple(counting), difference)


def cells(*conditions: Condition) -> tuple[Cell, ...]:
    """The distinct cells of conditions, in the order of the text."""
    used = (margin.cells for condition in conditions for margin in margins(condition))
    return tuple(dict.fromkeys(itertools.chain.from_iterable(used)))


def _condition(node: ast.expr, text: str) -> Condition:
    match node:
        case ast.BoolOp():
            kind = "and" if isinstance(node.op, ast.And) else "or"
            return _logic(kind, [_condition(part, text) for part in node.values])
        case ast.Compare():
            sides = [node.left, *node.comparators]
            return _logic("and", [_comparison(*comparison, text) for comparison in zip(sides, node.ops, sides[1:])])
        case ast.Call(func=ast.Name(id="approximately"), args=[one, other, within], keywords=[]):
            # two one-sided comparisons: equal within a tolerance is shown by both, refuted by either
            sides = [ast.BinOp(one, ast.Sub(), other), ast.BinOp(other, ast.Sub(), one)]
            return _logic("and", [_comparison(ast.copy_location(s, node), ast.LtE(), within, text) for s in sides])
    raise _error(node, text, "here a comparison is needed, or approximately(a, b, within)")


def _comparison(left: ast.expr, sign: ast.cmpop, right: ast.expr, text: str) -> Condition:
    if not isinstance(sign, ast.Gt | ast.GtE | ast.Lt | ast.LtE):
        raise _error(right, text, "only > >= < <= compare; equality within a tolerance is approximately(a, b, within)")
    return _resolved(ast.Compare(left, [sign], [right]), text)


def _choices(node: ast.expr, text: str) -> Iterator[ast.Call]:
    # Checks that a value is of the language; yields its calls of min and max, outer ones first
    match node:
        case ast.Constant(value=number) if type(number) in (int, float):
            pass
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            yield from _choices(node.operand, text)
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult()):
            left, right = list(_choices(node.left, text)), list(_choices(node.right, text))
            by_cells = (left and any(_named(node.right))) or (right and any(_named(node.left)))
            if by_cells and isinstance(node.op, ast.Mult):
                raise _error(node, text, "min and max may be multiplied by constants only")
            yield from left + right
        case ast.Call(func=ast.Name(id="min" | "max" | "mean" as name), args=[_, *_], keywords=[]):
            if name != "mean":
                yield node
            for argument in node.args:
                yield from _choices(argument, text)
        case ast.Subscript():
            if _cell(node) is None:
                raise _error(node, text, 'a cell is table["row"]["column"], row and column in quotation marks')
        case ast.Compare() | ast.BoolOp():
            raise _error(node, text, "a comparison stands where a number is needed")
        case _:
            raise _error(node, text, f"{type(node).__name__} is not part of the language")


def _resolved(compare: ast.Compare, text: str) -> Condition:
    # The least of several numbers is greater if all are, the greatest if one is
    (sign,), sides = compare.ops, [compare.left, *compare.comparators]
    greater, lesser = sides if isinstance(sign, ast.Gt | ast.GtE) else reversed(sides)
    difference = ast.BinOp(greater, ast.Sub(), lesser)
    choices = list(_choices(difference, text))  # checks all of it
    point = _point(difference)
    if not choices:
        counting = (cell for cell, slope in _slopes(difference, point).items() if abs(slope) > 1.0e-12)
        shown = ast.unparse(compare).replace("'", '"')
        return Margin(shown, isinstance(sign, ast.Gt | ast.Lt), tuple(counting), difference)

    choice = choices[0]

    def chosen(node: ast.AST, part: ast.expr) -> Any:
        return copy.deepcopy(node, {id(choice): part})  # what the memo holds is not copied but taken

    at_0, at_1 = (_evaluate(chosen(difference, ast.Constant(number)), point) for number in (0, 1))
    kind = "and" if (choice.func.id == "min") == (at_1 > at_0) else "or"
    return _logic(kind, [_resolved(chosen(compare, part), text) for part in choice.args])


def _logic(kind: str, parts: list[Condition]) -> Condition:
    # Without parts in parts, repeated ones, and constants that decide nothing (they would share the error)
    flat = [sub for part in parts for sub in (part.parts if getattr(part, "kind", "") == kind else [part])]
    distinct = list(dict.fromkeys(flat))
    kept = [part for part in distinct if _constant_answer(part) is not (kind == "and")] or distinct[:1]
    return kept[0] if len(kept) == 1 else Logic(kind, tuple(kept))


def _constant_answer(condition: Condition) -> bool | None:
    if isinstance(condition, Logic) or condition.cells:
        return None
    number = condition.value(_point(condition.difference))  # "a - a < 1" names a cell that cannot change it
    return number > 0 or (number == 0 and not condition.strict)


def _evaluate(node: ast.expr, numbers: Mapping[Cell, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Subscript():
            return numbers[_cell(node)]
        case ast.UnaryOp():
            number = _evaluate(node.operand, numbers)
            return -number if isinstance(node.op, ast.USub) else number
        case ast.BinOp():
            return _SIGNS[type(node.op)](_evaluate(node.left, numbers), _evaluate(node.right, numbers))
    return _FUNCTIONS[node.func.id]([_evaluate(argument, numbers) for argument in node.args])


def _slopes(node: ast.expr, numbers: Mapping[Cell, float]) -> dict[Cell, float]:
    # By a step along the imaginary axis: of a polynomial exact but for rounding, and 0 where a cell cancels
    moved = {cell: numbers | {cell: complex(numbers[cell], _STEP)} for cell in dict.fromkeys(_named(node))}
    return {cell: _evaluate(node, at).imag / _STEP for cell, at in moved.items()}


def _point(node: ast.expr) -> dict[Cell, float]:
    # Numbers for the cells of a value between which nothing cancels by chance
    return {cell: math.sqrt(2 + number) for number, cell in enumerate(dict.fromkeys(_named(node)))}


def _named(node: ast.expr) -> Iterator[Cell]:
    # The cells of a value, with repeats
    if isinstance(node, ast.Subscript):
        yield _cell(node)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _named(child)


def _cell(node: ast.Subscript) -> Cell | None:
    match node:
        case ast.Subscript(
            value=ast.Subscript(value=ast.Name(id=table), slice=ast.Constant(value=str() as row)),
            slice=ast.Constant(value=str() as column),
        ):
            return Cell(table, row, column)
    return None


def _error(node: ast.expr, text: str, what: str) -> ExpressionError:
    column = len(text.encode()[: node.col_offset].decode(errors="ignore")) + 1
    return ExpressionError(f"column {column}: {what}, in: {text}; {_ACCEPTED}")
