"""Values from outside: of the type, in the range and of the number asked for, or refused in a sentence.

Whoever takes a value from a user checks it here before anything is done with it. What is returned is a plain Python
value, so that numpy's numbers are as welcome as Python's. `name` is what the user calls the value, and `allowed` ends
the sentence "NAME is VALUE: set it to ...".
"""

import math
import numbers
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized

from longhelix.errors import UserError

_LONGEST_SHOWN = 80
_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxlong = _shortened.maxother = _LONGEST_SHOWN


def shown(value: object) -> str:
    """A value as a message quotes it: what Python would write, cut where it is long."""
    try:
        text = _shortened.repr(value)
    except Exception:  # of huge integers, and of whatever users make
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def escaped(text: str) -> str:
    """Text without control characters, nor others that end lines or are no text."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape", "replace").decode() for each in text)


def refused(name: str, value: object, allowed: str, code: str = "invalid_argument") -> UserError:
    return UserError(f"{name} is {shown(value)}: set it to {allowed}", code)


def whole(name: str, value: object, least: int, most: int, note: str = "", code: str = "invalid_argument") -> int:
    """An integer from `least` to `most`; True and 2.0 are none."""
    allowed = f"an integer from {least} to {most}{note}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # anything may come, and raises if it is none
    except Exception as error:
        raise refused(name, value, allowed, code) from error
    if isinstance(value, bool) or not least <= number <= most:
        raise refused(name, value, allowed, code)
    return number


def real(name: str, value: object, holds: Callable[[float], bool], allowed: str) -> float:
    """A number of which `holds` is true; what is no number or is NaN is refused."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise refused(name, value, allowed)
    try:
        number = float(value)
    except Exception as error:  # too large, or whatever users make
        raise refused(name, value, allowed) from error
    if not holds(number):  # nothing holds of NaN
        raise refused(name, value, allowed)
    return number


def seconds(name: str, value: object) -> float:
    """A time that something may take."""
    return real(name, value, lambda number: 0 < number < math.inf, "a number of seconds above 0")


def above_zero(name: str, value: object) -> float:
    return real(name, value, lambda number: 0 < number < math.inf, "a number above 0")


def weight(name: str, value: object) -> float:
    return real(name, value, lambda number: 1e-6 <= number <= 1e6, "a number from 1e-6 to 1e6")


def flag(name: str, value: object, code: str = "invalid_argument") -> bool:
    if not isinstance(value, bool):
        raise refused(name, value, "True or False", code)
    return value


def text(name: str, value: object, code: str = "invalid_argument") -> str:
    """A string that can be written as UTF-8; of subclasses such as numpy's, the plain one."""
    if not isinstance(value, str):
        raise refused(name, value, "a string", code)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} has half a surrogate pair at character {error.start}: remove it", code) from error
    return str.__str__(value)


def one_of(name: str, value: object, known: Sequence[str], code: str = "invalid_argument") -> str:
    """One of some names."""
    if not isinstance(value, str) or str.__str__(value) not in known:
        raise UserError(f"{name} {shown(value)} is not known: use one of {', '.join(known)}", code)
    return str.__str__(value)


def items(name: str, value: object, most: int, of: str, code: str = "invalid_argument") -> tuple[object, ...]:
    """The items of a list, a tuple or the like, `most` at the most; `of` says what they are to be."""
    if isinstance(value, (str, bytes)):
        raise UserError(f"{name} is the string {shown(value)}: give a tuple of {of}", code)
    if not (isinstance(value, Iterable) and isinstance(value, Sized)) or isinstance(value, Mapping):
        raise refused(name, value, f"a tuple of {of}", code)
    try:
        if len(value) <= most:
            return tuple(value)
    except Exception as error:  # of whatever users make
        raise refused(name, value, f"a tuple of {of}", code) from error
    raise UserError(f"{name} has {len(value)} {of}: give at most {most}", code)


def entries(
    name: str, value: object, most: int, of: str, code: str = "invalid_argument"
) -> tuple[tuple[object, object], ...]:
    """The keys and values of a mapping, `most` at the most; `of` says what maps to what."""
    if not isinstance(value, Mapping):
        raise refused(name, value, f"a mapping of {of}", code)
    try:
        if len(value) <= most:
            return tuple(value.items())
    except Exception as error:  # of whatever users make
        raise refused(name, value, f"a mapping of {of}", code) from error
    raise UserError(f"{name} has {len(value)} entries: give at most {most}", code)
