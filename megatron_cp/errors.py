"""The error that a user's argument can cause, and checks of arguments."""

import math
from numbers import Integral, Real

MAX_INTEGER = 2**63 - 1
MAX_SIZE = 2**16  # heads, or features of one, beyond any model
MAX_FEATURES = 2**24  # features of all heads, or of hidden states: bytes of a batch stay below 2**63


class ArgumentError(ValueError):
    """An argument cannot be used: the message says which one, its value, what is allowed and what to do.

    Attributes:
        argument: the name of the argument as the caller spells it.
    """

    def __init__(self, argument: str, given: object = None, allowed: str = "", remedy: str = "") -> None:
        if not allowed:  # pickle and Megatron's `build_module` make it from its message alone
            super().__init__(argument)
            self.argument = argument.partition(":")[0]
            return
        self.argument = argument
        self.given = given
        self.allowed = allowed
        self.remedy = remedy
        text = f"{argument}: got {_shorten(given)}; allowed: {allowed}."
        super().__init__(f"{text} {remedy}" if remedy else text)


def checked_integer(argument: str, value: object, least: int, most: int | None = None) -> int:
    """Returns `value` as an int after checking it: an integer (Python's or numpy's) from `least` to `most`, or of 64
    bits.

    Raises:
        ArgumentError: it is not; neither is a truth value, or a tensor with one element.
    """
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or not least <= number <= (MAX_INTEGER if most is None else most):
        allowed = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
        allowed += ", below 2**63" if most is None and number is not None and number > MAX_INTEGER else ""
        raise ArgumentError(argument, value, allowed)
    return number


def checked_size(argument: str, value: object, heads: int = 1) -> int:
    """Returns `value` as an int after checking that it is a number of heads, or of features of each of `heads`."""
    return checked_integer(argument, value, 1, min(MAX_SIZE, MAX_FEATURES // heads))


def as_number(value: object) -> float:
    """Returns `value` as a float if it is a number (Python's or numpy's); else NaN, which fails every range check."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def checked_flag(argument: str, value: object) -> bool:
    """Returns `value` after checking that it is True or False.

    Raises:
        ArgumentError: it is something else, such as 1 or "no".
    """
    if not isinstance(value, bool):
        raise ArgumentError(argument, value, "True or False")
    return value


def checked_scale(name: str, scale: float | None, head_dim: int) -> float:
    """Returns the scale as a finite float; `head_dim ** -0.5` if None."""
    if scale is None:
        return head_dim**-0.5
    if not math.isfinite(as_number(scale)):
        raise ArgumentError(name, scale, "a finite number, or None for head_dim ** -0.5")
    return float(scale)


class PlanMismatchError(RuntimeError):
    """The ranks of one group made different plans. Raised on every rank, with the difference."""


class CallMismatchError(PlanMismatchError):
    """The ranks of one group call an operation in different ways. Raised on every rank, with the difference."""


class PeerError(RuntimeError):
    """Another rank of the group does not answer, has ended, or runs something else.

    Attributes:
        rank: this rank, in the group.
        peer: the rank that was waited for.
    """

    def __init__(self, message: str, *, rank: int = -1, peer: int = -1) -> None:
        super().__init__(message)
        self.rank, self.peer = rank, peer


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
