"""Compiles a formula over arrays of one entry to a function of plain numbers, with the same results to the bit.

This avoids numpy's overhead per operation. The formula runs once, on symbols. Everything that does not depend on a
symbol is computed at once. The rest becomes Python code, with each value computed once, in floating point, because
Python's arithmetic is slower with ints. One of the numbers comes later than the others, and everything that does not
depend on it is computed before.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from longhelix.perf.layouts import Array

_INFIX = {
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "floor_divide": "//",
    "power": "**",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
    "bitwise_and": "and",
    "logical_and": "and",
    "bitwise_or": "or",
    "logical_or": "or",
}
_CALLS = {"sqrt": "sqrt({})", "ceil": "ceil({})", "invert": "not {}", "logical_not": "not {}"}
# Their operands are names or constants, because some of them come twice.
_CHOICES = {
    "maximum": "{0} if {0} > {1} else {1}",
    "minimum": "{0} if {0} < {1} else {1}",
    "where": "{1} if {0} else {2}",
}


def scalar(
    formula: Callable[[Sequence[Any]], Any], names: Sequence[str], later: str
) -> Callable[..., Callable[[float], float]]:
    """Compile a formula to a function of `names`, which returns a function of `later`, which returns a number.

    Args:
        formula: Takes a value for each of `names` and for `later`, and returns an array of one entry.
        names: Names of the first numbers.
        later: Name of the last number.
    """
    symbols = _Symbols()
    result = formula([symbols.new(name) for name in (*names, later)])
    before, after = _written(result, later) if isinstance(result, _Symbol) else ([], [f"return {_number(result)!r}"])
    body = [*before, f"def seconds({later}):", *(f"    {line}" for line in after), "return seconds"]
    source = "\n    ".join([f"def first({', '.join(names)}):", *body])
    # Numbers that are not finite are written as names.
    namespace: dict[str, Any] = {"ceil": math.ceil, "sqrt": math.sqrt, "inf": math.inf, "nan": math.nan}
    exec(source, namespace)  # noqa: S102 - what was written above, of names and numbers alone
    function: Callable[..., Callable[[float], float]] = namespace["first"]
    return function


class _Symbol(np.lib.mixins.NDArrayOperatorsMixin):
    """A value that is not known yet: `operation` of `operands`, symbols and numbers, or the input `name`."""

    __hash__ = object.__hash__  # the same one is the same value, and `==` is an operation

    def __init__(self, table: "_Symbols", operation: str, operands: tuple[Any, ...], name: str = "") -> None:
        self.table = table
        self.operation = operation
        self.operands = operands
        self.name = name

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Any, **options: Any) -> Any:
        return self.table.apply(ufunc.__name__, operands) if method == "__call__" and not options else NotImplemented

    def __array_function__(self, function: Any, types: Any, operands: Any, options: Any) -> Any:
        if function is np.where:
            return self.table.apply("where", operands)
        if function is np.zeros_like:
            return np.zeros(1, **options)
        return NotImplemented


class _Symbols:
    """All symbols of a formula. Equal ones are the same object."""

    def __init__(self) -> None:
        self._symbols: dict[tuple[Any, ...], _Symbol] = {}

    def new(self, name: str) -> _Symbol:
        return _Symbol(self, "input", (), name)

    def apply(self, operation: str, operands: Sequence[Any]) -> "_Symbol | Array":
        """What numpy's `operation` gives: an array, where that is known."""
        values = [operand if isinstance(operand, _Symbol) else _number(operand) for operand in operands]
        known = _known(operation, values)
        if known is not None:
            return known if isinstance(known, _Symbol) else np.array([known])
        operation, values = _scaled_once(operation, values)
        key = (operation, *(id(value) if isinstance(value, _Symbol) else (value,) for value in values))
        if key not in self._symbols:
            self._symbols[key] = _Symbol(self, operation, tuple(values))
        return self._symbols[key]


def _number(value: Any) -> Any:
    """Of an array of one entry."""
    return np.asarray(value).item()


def _known(operation: str, values: list[Any]) -> Any:
    """What an operation gives where that can be said without knowing all of `values`, else None."""
    if not any(isinstance(value, _Symbol) for value in values):
        return _computed(operation, values)
    first, last = values[0], values[-1]
    if operation == "where":
        if isinstance(first, bool):
            return values[1] if first else last
        return last if _same(values[1], last) else None
    if operation in ("maximum", "minimum") and any(_is_nan(value) for value in values):
        return math.nan  # Python's comparisons would pick the other operand
    for number, other in ((first, last), (last, first)):
        if isinstance(number, _Symbol) or len(values) == 1:
            continue
        match operation:
            case "multiply" if number in (0, 1):
                return other if number else 0.0
            case "add" if number == 0:
                return other
            case "subtract" | "divide" if number is last and number == (operation == "divide"):
                return other
            case "bitwise_and" | "logical_and":
                return other if number else False
            case "bitwise_or" | "logical_or":
                return True if number else other
    if _same(first, last) and operation in ("maximum", "minimum"):
        return first
    return False if _same(first, last) and operation in ("less", "greater") else None


def _computed(operation: str, values: list[Any]) -> Any:
    if operation == "where":
        return values[1] if values[0] else values[2]
    return getattr(np, operation)(*values).item()


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _same(first: Any, second: Any) -> bool:
    """Whether two values are equal whatever the inputs are."""
    symbols = isinstance(first, _Symbol) or isinstance(second, _Symbol)
    return first is second if symbols else bool(first == second)


def _scaled_once(operation: str, values: list[Any]) -> tuple[str, list[Any]]:
    """The same with one factor, where a symbol is scaled twice: by a power of two, which rounds nothing, and by another
    number."""
    inner, factor = _scaling(operation, values)
    if not isinstance(inner, _Symbol):
        return operation, values
    symbol, first = _scaling(inner.operation, inner.operands)
    if symbol is None or not (_is_power_of_two(first) or _is_power_of_two(factor)):
        return operation, values
    if inner.operation == operation:
        once, scale = operation, first * factor
    elif inner.operation == "divide":
        return operation, values
    elif _is_power_of_two(factor):
        once, scale = "multiply", first / factor
    else:
        once, scale = "divide", factor / first
    # Beyond the range of normal floats even a power of two rounds.
    is_exact = math.isfinite(scale) and abs(scale) >= sys.float_info.min
    return (once, [symbol, scale]) if is_exact else (operation, values)


def _scaling(operation: str, operands: Sequence[Any]) -> tuple[_Symbol | None, float]:
    """The symbol that is multiplied or divided by a number, and the number. None: this is nothing of the kind."""
    if operation not in ("multiply", "divide"):
        return None, 0.0
    first, last = operands
    if isinstance(first, _Symbol) and not isinstance(last, _Symbol):
        return first, float(last)
    if operation == "multiply" and isinstance(last, _Symbol) and not isinstance(first, _Symbol):
        return last, float(first)
    return None, 0.0


def _is_power_of_two(number: float) -> bool:
    return math.frexp(number)[0] == 0.5


def _written(result: _Symbol, later: str) -> tuple[list[str], list[str]]:
    """Statements, in the order in which they can be computed, before `later` is known and after; the last of all
    returns the result. What is used once has no name, unless it is known before and used after."""
    order: dict[_Symbol, None] = {}
    _add(result, order)
    late: set[_Symbol] = set()
    for symbol in order:
        if symbol.name == later or not late.isdisjoint(_parts(symbol)):
            late.add(symbol)
    uses = Counter(part for symbol in order for part in _parts(symbol))
    named = {part for symbol in order for part in _parts(symbol) if symbol.operation in _CHOICES or uses[part] > 1}
    named |= {part for symbol in late for part in _parts(symbol) if part not in late}
    texts: dict[Any, str] = {}
    before, after = list[str](), list[str]()
    for number, symbol in enumerate(order):
        lines = after if symbol in late else before
        if symbol.operation == "input":
            texts[symbol] = symbol.name
            lines.append(f"{symbol.name} = {symbol.name} * 1.0")
            continue
        operands = [texts[value] if isinstance(value, _Symbol) else _constant(value) for value in symbol.operands]
        texts[symbol] = f"({_expression(symbol.operation, operands)})"
        if symbol in named:
            lines.append(f"v{number} = {texts[symbol]}")
            texts[symbol] = f"v{number}"
    return before, [*after, f"return {texts[result]}"]


def _parts(symbol: _Symbol) -> list[_Symbol]:
    """Those of its operands that are symbols."""
    return [operand for operand in symbol.operands if isinstance(operand, _Symbol)]


def _constant(value: Any) -> str:
    written = repr(value if isinstance(value, bool) else float(value))
    return f"({written})" if written.startswith("-") else written  # `**` binds tighter than a sign


def _add(symbol: _Symbol, order: dict[_Symbol, None]) -> None:
    """After what it is made of."""
    for part in _parts(symbol):
        if part not in order:
            _add(part, order)
    order[symbol] = None


def _expression(operation: str, operands: list[str]) -> str:
    if operation in _INFIX:
        return f" {_INFIX[operation]} ".join(operands)
    return (_CALLS | _CHOICES)[operation].format(*operands)
