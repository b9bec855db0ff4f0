"""The small language of claims: comparisons of table cells, parsed by hand from a syntax tree and never run as code.

    table4["Multi(64, 8)"]["zs_cls_acc"] > table4["Ob(64, 8)"]["zs_cls_acc"]
    approximately(mean(table2["a"]["x"], table2["a"]["y"]), 6.1, 0.05) and not table2["b"]["x"] >= 50

A cell is `table["row"]["column"]`, a value of an experiment `experiment["name"]["value"]`. There are numbers,
+ - * /, abs, min, max, mean, the comparisons > >= < <= (chains too), approximately(a, b, within), and, or, not.

A comparison becomes one or more *margins*, numbers that are positive where the comparison holds. abs, min and max are
resolved on the way: max(a, b) < c is a < c and b < c. So each margin is a smooth expression of its cells, for which an
interval can be given, and the rest is logic of three values (`decide`).
"""

import ast
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

EXPERIMENT = "experiment"
_MAX_CHARACTERS, _MAX_DEPTH, _MAX_MARGINS, _MAX_NUMBER = 4000, 100, 400, 1.0e12
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_COMPARISONS = {ast.Gt: ">", ast.GtE: ">=", ast.Lt: "<", ast.LtE: "<="}
_ACCEPTED = (
    'accepted: table["row"]["column"], numbers, + - * /, abs, min, max, mean, approximately(a, b, within), '
    "> >= < <=, and, or, not"
)


class ExpressionError(ValueError):
    """An expression that is not of the language; the message gives the column (from 1) and the expression."""


@dataclass(frozen=True)
class Number:
    """A constant."""

    value: float


@dataclass(frozen=True)
class Cell:
    """A reference to `table["row"]["column"]`; for an experiment the row is its name, the column the value's."""

    table: str
    row: str
    column: str

    def __str__(self) -> str:
        return f'{self.table}["{self.row}"]["{self.column}"]'


@dataclass(frozen=True)
class Operation:
    """`sign` is one of + - * /."""

    sign: str
    left: "Value"
    right: "Value"


@dataclass(frozen=True)
class Choice:
    """The least or greatest of its parts; `kind` is "min" or "max"."""

    kind: str
    parts: tuple["Value", ...]


@dataclass(frozen=True)
class Linear:
    """constant + sum of factor * cell, cells in the order of the text."""

    constant: float
    terms: tuple[tuple[Cell, float], ...]

    def __str__(self) -> str:
        parts = [(factor, str(cell)) for cell, factor in self.terms]
        parts += [(self.constant, "")] if self.constant or not parts else []
        text = ""
        for factor, name in parts:
            number = "" if name and math.isclose(abs(factor), 1.0) else f"{abs(factor):.4g}"
            sign = (" − " if text else "−") if factor < 0 else " + " if text else ""
            text += sign + " · ".join(part for part in (number, name) if part)
        return text


Value = Number | Cell | Operation | Choice | Linear


@dataclass(frozen=True)
class Margin:
    """Holds where `value` is above 0 (`strict`), or at least 0. `value` holds no Choice; `text` is for the reader."""

    value: Value
    strict: bool
    text: str


@dataclass(frozen=True)
class Logic:
    """`kind` is "and", "or" or "not" (of one part)."""

    kind: str
    parts: tuple["Condition", ...]


Condition = Margin | Logic


def parse(text: str) -> Condition:
    """The condition that an expression states.

    Args:
        text: on one or several lines.
    Raises:
        ExpressionError: for anything that is not of the language above, with its column.
    """
    text = " ".join(text.split())
    if len(text) > _MAX_CHARACTERS:
        raise ExpressionError(f"an expression of {len(text)} characters; accepted: at most {_MAX_CHARACTERS}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ExpressionError(f"column {error.offset or 1}: {error.msg}, in: {text}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"cannot be read ({type(error).__name__}: {error}), in: {text}") from None
    if _depth(tree) > _MAX_DEPTH:
        raise ExpressionError(f"column 1: nested more than {_MAX_DEPTH} deep, in: {text}")
    return _condition(tree, text)


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


def cells(expression: Condition | Value) -> tuple[Cell, ...]:
    """The distinct cells of a condition or value, in the order of the text."""
    return tuple(dict.fromkeys(_cells(expression)))


def evaluate(value: Value, numbers: Mapping[Cell, Any]) -> Any:
    """The value with numbers (or equally long arrays) in place of its cells.

    Raises:
        ZeroDivisionError: if a divisor that is a plain number is 0.
        KeyError: for a cell without a number.
    """
    match value:
        case Number():
            return value.value
        case Cell():
            return numbers[value]
        case Linear():
            return value.constant + sum(factor * numbers[cell] for cell, factor in value.terms)
        case Choice():
            return (min if value.kind == "min" else max)(evaluate(part, numbers) for part in value.parts)
    left, right = evaluate(value.left, numbers), evaluate(value.right, numbers)
    match value.sign:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    return left / right


def gradient(value: Value, numbers: Mapping[Cell, float]) -> dict[Cell, float]:
    """Derivative of a value without Choice with respect to each of its cells, at `numbers`."""
    if isinstance(value, Number):
        return {}
    if isinstance(value, Cell):
        return {value: 1.0}
    if isinstance(value, Linear):
        return dict(value.terms)
    left, right = evaluate(value.left, numbers), evaluate(value.right, numbers)
    by_left = {"+": 1.0, "-": 1.0, "*": right, "/": 1 / right if value.sign == "/" else 0.0}[value.sign]
    by_right = {"+": 1.0, "-": -1.0, "*": left, "/": -left / right**2 if value.sign == "/" else 0.0}[value.sign]
    slopes: dict[Cell, float] = {}
    for factor, part in ((by_left, value.left), (by_right, value.right)):
        for cell, slope in gradient(part, numbers).items():
            slopes[cell] = slopes.get(cell, 0.0) + factor * slope
    return slopes


def decide(
    condition: Condition,
    settle: Callable[[Margin, float, float], bool | None],
    error_holds: float = 0.05,
    error_fails: float = 0.05,
) -> bool | None:
    """Whether a condition holds: True, False, or None where its margins leave that open (Kleene's three values).

    The error of the whole stays bounded. `a and b` holds only if both do, each at the whole error; but it fails as soon
    as one does, so n parts share the error between them (Bonferroni), or a claim of 36 comparisons between equal
    methods would be "refuted" by chance in most cases. `or` is the mirror image.

    Args:
        condition: what to decide.
        settle: (margin, error of calling it true, error of calling it false) -> True, False or None.
        error_holds: chance of calling the condition true although it is false (two-sided).
        error_fails: likewise of calling it false.
    """
    if isinstance(condition, Margin):
        return settle(condition, error_holds, error_fails)
    if condition.kind == "not":
        answer = decide(condition.parts[0], settle, error_fails, error_holds)
        return None if answer is None else not answer
    count = len(condition.parts)
    if condition.kind == "and":
        return and_of([decide(part, settle, error_holds, error_fails / count) for part in condition.parts])
    return or_of([decide(part, settle, error_holds / count, error_fails) for part in condition.parts])


def decisive(condition: Condition, value: Callable[[Margin], float | None]) -> tuple[Margin, float] | None:
    """The margin that decides the condition, and how far the condition is from turning over, positive where it holds.

    The least over `and`, the greatest over `or`, the opposite for `not`; parts without a value are passed over.
    """
    if isinstance(condition, Margin):
        number = value(condition)
        return None if number is None else (condition, number)
    found = [each for part in condition.parts if (each := decisive(part, value)) is not None]
    if not found:
        return None
    if condition.kind == "not":
        return found[0][0], -found[0][1]
    return (min if condition.kind == "and" else max)(found, key=lambda each: each[1])


def and_of(answers: list[bool | None]) -> bool | None:
    """Kleene's conjunction: False if one is False, else None if one is None."""
    return False if False in answers else None if None in answers else True


def or_of(answers: list[bool | None]) -> bool | None:
    """Kleene's disjunction: True if one is True, else None if one is None."""
    return True if True in answers else None if None in answers else False


def _depth(tree: ast.AST) -> int:
    """Levels of a syntax tree, without recursion: what is deeper than Python's stack must not get that far."""
    level, depth = [tree], 0
    while level:
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        depth += 1
    return depth


def _condition(node: ast.expr, text: str) -> Condition:
    if isinstance(node, ast.BoolOp):
        kind = "and" if isinstance(node.op, ast.And) else "or"
        return _logic(kind, [_condition(part, text) for part in node.values])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return Logic("not", (_condition(node.operand, text),))
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        pairs = zip(sides, node.ops, sides[1:])
        return _logic("and", [_comparison(left, sign, right, text) for left, sign, right in pairs])
    if _call(node) == "approximately":
        if len(node.args) != 3:
            raise _error(node, text, f"approximately takes (a, b, within), got {len(node.args)} arguments")
        one, other, within = (_value(argument, text) for argument in node.args)
        difference = Operation("-", one, other)
        # two one-sided comparisons: equal within a tolerance is shown by both, refuted by either
        return _logic(
            "and",
            [
                _resolved(Operation("-", within, difference), False, "", node, text),
                _resolved(Operation("+", within, difference), False, "", node, text),
            ],
        )
    raise _error(node, text, "here a comparison is needed")


def _comparison(left: ast.expr, sign: ast.cmpop, right: ast.expr, text: str) -> Condition:
    if type(sign) not in _COMPARISONS:
        raise _error(right, text, "only > >= < <= compare; equality within a tolerance is approximately(a, b, within)")
    symbol = _COMPARISONS[type(sign)]
    greater, lesser = (left, right) if symbol.startswith(">") else (right, left)
    value = Operation("-", _value(greater, text), _value(lesser, text))
    return _resolved(value, "=" not in symbol, f"{_source(left, text)} {symbol} {_source(right, text)}", left, text)


def _value(node: ast.expr, text: str) -> Value:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        if not abs(node.value) <= _MAX_NUMBER:
            raise _error(node, text, f"numbers reach {_MAX_NUMBER:g} at most")
        return Number(float(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        part = _value(node.operand, text)
        return Operation("*", Number(-1.0), part) if isinstance(node.op, ast.USub) else part
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        return Operation(_SIGNS[type(node.op)], _value(node.left, text), _value(node.right, text))
    if isinstance(node, ast.Subscript):
        return _cell(node, text)
    name = _call(node)
    if name in ("abs", "min", "max", "mean"):
        parts = tuple(_value(argument, text) for argument in node.args)
        if not parts or (name == "abs" and len(parts) != 1):
            raise _error(node, text, f"{name} of {len(parts)} arguments")
        if name == "abs":
            return Choice("max", (parts[0], Operation("*", Number(-1.0), parts[0])))
        if name == "mean":
            total = parts[0]
            for part in parts[1:]:
                total = Operation("+", total, part)
            return Operation("/", total, Number(float(len(parts))))
        return Choice(name, parts)
    if isinstance(node, ast.Compare | ast.BoolOp):
        raise _error(node, text, "a comparison stands where a number is needed")
    raise _error(node, text, f"{type(node).__name__} is not part of the language")


def _cell(node: ast.Subscript, text: str) -> Cell:
    inner, names = node, []
    while isinstance(inner, ast.Subscript):
        if not (isinstance(inner.slice, ast.Constant) and isinstance(inner.slice.value, str)):
            raise _error(inner, text, "row and column are names in quotation marks")
        names.insert(0, inner.slice.value)
        inner = inner.value
    if not isinstance(inner, ast.Name) or len(names) != 2:
        raise _error(node, text, 'a cell is table["row"]["column"]')
    return Cell(inner.id, *names)


def _call(node: ast.expr) -> str | None:
    plain = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords
    return node.func.id if plain and not any(isinstance(a, ast.Starred) for a in node.args) else None


def _resolved(value: Value, strict: bool, source: str, node: ast.expr, text: str) -> Condition:
    """Margins of `value > 0`: a minimum is positive if all its parts are, a maximum if one is.

    `source` is what the reader sees of a single margin; of several each one shows its own value.
    """
    try:
        pieces = _pieces(value)
    except ExpressionError as error:
        raise _error(node, text, str(error)) from None
    except (ZeroDivisionError, OverflowError):
        raise _error(node, text, "division by zero") from None

    def build(piece: Value) -> Condition:
        if isinstance(piece, Choice):
            return _logic("and" if piece.kind == "min" else "or", [build(part) for part in piece.parts])
        linear = _linear(piece)
        smooth = piece if linear is None else linear
        if source and (linear is None or not isinstance(pieces, Choice)):
            return Margin(smooth, strict, source)
        return Margin(smooth, strict, f"{smooth if linear else source or 'the difference'} {'>' if strict else '≥'} 0")

    return build(pieces)


def _logic(kind: str, parts: list[Condition]) -> Condition:
    """Without repeated parts, and without constants that decide nothing (they would only share the error)."""
    distinct = list(dict.fromkeys(parts))
    kept = [part for part in distinct if _constant_answer(part) is not (kind == "and")] or distinct[:1]
    return kept[0] if len(kept) == 1 else Logic(kind, tuple(kept))


def _constant_answer(condition: Condition) -> bool | None:
    if isinstance(condition, Margin) and not cells(condition):
        number = evaluate(condition.value, {})
        return number > 0 or (number == 0 and not condition.strict)
    return None


def _pieces(value: Value) -> Value:
    """The same value with every Choice moved to the top: max(a, b) - c becomes max(a - c, b - c)."""
    if isinstance(value, Choice):
        return Choice(value.kind, tuple(_pieces(part) for part in value.parts))
    if not isinstance(value, Operation):
        return value
    left, right = _pieces(value.left), _pieces(value.right)
    if value.sign in "+-":
        return _sum(left, right if value.sign == "+" else _scaled(right, -1.0))
    if not cells(right):
        number = evaluate(right, {})
        return _scaled(left, number if value.sign == "*" else 1 / number)
    if value.sign == "*" and not cells(left):
        return _scaled(right, evaluate(left, {}))
    if isinstance(left, Choice) or isinstance(right, Choice):
        raise ExpressionError("abs, min and max may be multiplied and divided by constants only")
    return Operation(value.sign, left, right)


def _sum(left: Value, right: Value) -> Value:
    if _count(left) * _count(right) > _MAX_MARGINS:
        raise ExpressionError(f"nested abs, min and max make more than {_MAX_MARGINS} comparisons")
    if isinstance(left, Choice):
        return Choice(left.kind, tuple(_sum(part, right) for part in left.parts))
    if isinstance(right, Choice):
        return Choice(right.kind, tuple(_sum(left, part) for part in right.parts))
    return Operation("+", left, right)


def _scaled(value: Value, factor: float) -> Value:
    if isinstance(value, Choice):
        kind = value.kind if factor >= 0 else {"min": "max", "max": "min"}[value.kind]
        return Choice(kind, tuple(_scaled(part, factor) for part in value.parts))
    return Operation("*", Number(factor), value)


def _count(value: Value) -> int:
    return sum(map(_count, value.parts)) if isinstance(value, Choice) else 1


def _linear(value: Value) -> Linear | None:
    """The linear form of a value without Choice; None if it has none."""
    if isinstance(value, Linear):
        return value
    if isinstance(value, Number):
        return Linear(value.value, ())
    if isinstance(value, Cell):
        return Linear(0.0, ((value, 1.0),))
    left, right = _linear(value.left), _linear(value.right)
    if left is None or right is None:
        return None
    if value.sign in "+-":
        sign = 1.0 if value.sign == "+" else -1.0
        factors = dict(left.terms)
        for cell, factor in right.terms:
            factors[cell] = factors.get(cell, 0.0) + sign * factor
        # what is left of a - a by rounding counts as nothing
        terms = tuple((cell, factor) for cell, factor in factors.items() if abs(factor) > 1.0e-12)
        return Linear(left.constant + sign * right.constant, terms)
    if value.sign == "*" and not left.terms:
        left, right = right, left
    if right.terms:
        return None
    factor = right.constant if value.sign == "*" else 1 / right.constant
    return Linear(left.constant * factor, tuple((cell, f * factor) for cell, f in left.terms))


def _cells(expression: Condition | Value) -> Iterator[Cell]:
    match expression:
        case Cell():
            yield expression
        case Linear():
            yield from (cell for cell, _ in expression.terms)
        case Operation():
            yield from _cells(expression.left)
            yield from _cells(expression.right)
        case Choice() | Logic():
            for part in expression.parts:
                yield from _cells(part)
        case Margin():
            yield from _cells(expression.value)


def _source(node: ast.expr, text: str) -> str:
    return ast.get_source_segment(text, node) or text


def _error(node: ast.expr, text: str, what: str) -> ExpressionError:
    column = len(text.encode()[: node.col_offset].decode(errors="ignore")) + 1
    return ExpressionError(f"column {column}: {what}, in: {text}; {_ACCEPTED}")
