"""Checks of arguments, and second names of keyword arguments.

The rules are those of ``uccl.p2p``: an integer that is negative or does not fit into 64 bits raises
``TypeError``. Where ``uccl.p2p`` requires ``bytes`` or ``list``, this accepts any bytes-like object
and any sequence.
"""

import operator
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

U64_MAX = 2**64 - 1
#: Means "no connection" or "no registration".
NONE_ID = U64_MAX

F = TypeVar("F", bound=Callable[..., Any])


def also(**names: str) -> Callable[[F], F]:
    """Adds second names of keywords: ``also(dst="ptr")`` accepts ``dst=`` for ``ptr``."""

    def decorate(function: F) -> F:
        @wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            if keywords:
                for other, name in names.items():
                    if other in keywords:
                        if name in keywords:
                            call_name = f"{function.__name__}()"
                            raise TypeError(f"{call_name} got both {name!r} and {other!r}, which are one argument")
                        keywords[name] = keywords.pop(other)
            return function(*args, **keywords)

        return call  # type: ignore[return-value]

    return decorate


def u64(value: object, name: str) -> int:
    """An unsigned 64-bit integer."""
    # Nearly every call passes such a value. This check avoids a further call.
    if type(value) is int and 0 <= value <= U64_MAX:
        return value
    return integer(value, name, 0, U64_MAX)


def u32(value: object, name: str) -> int:
    """An unsigned 32-bit integer."""
    return integer(value, name, 0, 2**32 - 1)


def integer(value: object, name: str, low: int, high: int) -> int:
    """An integer from ``low`` to ``high``."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}") from None
    if not low <= number <= high:
        raise TypeError(f"{name} must be an integer from {low} to {high}, not {shortened(number)}")
    return number


def seconds(value: object, name: str) -> float | None:
    """A time to wait. None means no limit."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds or None, not {type(value).__name__}")
    if not value >= 0:  # also refuses NaN
        raise ValueError(f"{name} must be 0 or more, not {value}")
    return float(value)


def text(value: object, name: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    return value


def blob(value: object, name: str, size: int | None = None) -> bytes:
    """Bytes; exactly ``size`` of them if ``size`` is given."""
    if type(value) is bytes and len(value) == size:
        return value
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"{name} must be bytes, not {type(value).__name__}")
    found = bytes(value)
    if size is not None and len(found) != size:
        raise RuntimeError(f"{name} must be exactly {size} bytes, not {len(found)}")
    return found


def items(value: object, name: str) -> list[Any]:
    """The items of a sequence. Strings and bytes are refused."""
    if isinstance(value, list):
        return value
    unfit = isinstance(value, (str, bytes, bytearray, memoryview, Mapping))
    if unfit or not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        raise TypeError(f"{name} must be a list, not {type(value).__name__}")
    return [*value]  # type: ignore[misc]


def u64s(value: object, name: str) -> list[int]:
    """A sequence of unsigned 64-bit integers."""
    return [u64(item, f"{name}[{at}]") for at, item in enumerate(items(value, name))]


def blobs(value: object, name: str, size: int) -> list[bytes]:
    """A sequence of blobs, each of ``size`` bytes."""
    return [blob(item, f"{name}[{at}]", size) for at, item in enumerate(items(value, name))]


def same_length(expected: int, source: str, **sequences: list[Any]) -> None:
    """Raises ``RuntimeError`` unless every sequence has ``expected`` items.

    ``source`` says in the error where the number comes from.
    """
    for name, sequence in sequences.items():
        if len(sequence) != expected:
            raise RuntimeError(f"{name} has {len(sequence)} items, but {source} is {expected}; they must match")


def shortened(number: int) -> str:
    """A number for an error message, without printing thousands of digits."""
    return str(number) if number.bit_length() <= 128 else f"one of {number.bit_length()} bits"
