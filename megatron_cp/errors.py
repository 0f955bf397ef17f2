"""The one error a user can cause, and how it reads."""


class ArgumentError(ValueError):
    """An argument cannot be used: says which one, what was given, what is allowed and what to do.

    Attributes:
        argument: the name of the argument as the caller spells it.
    """

    def __init__(self, argument: str, given: object, allowed: str, remedy: str = "") -> None:
        self.argument = argument
        self.given = given
        self.allowed = allowed
        self.remedy = remedy
        text = f"{argument}: got {_shorten(given)}; allowed: {allowed}."
        super().__init__(f"{text} {remedy}" if remedy else text)


class PlanMismatchError(RuntimeError):
    """The ranks of one group made different plans. Raised on every rank, with the difference."""


def _shorten(value: object, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
