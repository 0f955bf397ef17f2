"""`LinearKind`: a kind of linear layer as a record. No torch in here.

A new kind is a record here, an operation (`linear/`) and the kernels that know it. What planning, prices, messages,
flags and the capability table need to know of a kind they read from its record. In one vocabulary for all: of
Mamba-2, B and C are keys and queries, x is values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Transition(Enum):
    """What a token does to the state of the recurrence, `S <- M S + ...`, beside adding to it."""

    NONE = "no state"
    SCALAR = "a number a head"
    DENSE = "a matrix a head, of key_dim x key_dim"


class Per(Enum):
    """Of what there is one in a section."""

    GROUP = "key head"
    HEAD = "value head"


class Dim(Enum):
    """Features of each."""

    KEY = "key_dim"
    VALUE = "value_dim"
    ONE = "1"


@dataclass(frozen=True)
class SectionKind:
    """One of the tensors that travel in a head exchange.

    Attributes:
        name: as the operation calls it.
        per, dim: `[tokens, heads or groups, features]`.
        exact: it is never coded: gates, decays and step sizes.
    """

    name: str
    per: Per
    dim: Dim
    exact: bool = False


@dataclass(frozen=True)
class Argument:
    """One of the sizes that a kind takes.

    Attributes:
        field: of the shape: heads, groups, key_dim or value_dim.
        name: as `plan_linear` calls it.
        default: a number, or the field that it is as large as; None where it must be given.
    """

    field: str
    name: str
    default: int | str | None = None


@dataclass(frozen=True)
class LinearKind:
    """A kind of linear layer.

    Attributes:
        name: a value of `kind` of `plan_linear`.
        remark, mixer: what the bare rule and the whole mixer are, for `megatron-cp doctor`.
        sections: in the order of the operation's features; the first `convolved` of them are convolved, if any.
        keys, values: the names of the sections that hold those.
        transition: of the recurrence.
        arguments: what it is sized by; sizes that are not named are 1, or as many groups as heads.
        recurrence: the kind whose recurrence it has, with other inputs, and whose kernels compute it; its own if empty.
        head, group: what heads, and what they share, are called.
        takes_codec: whether heads are long enough to be coded.
        scales_queries: whether its operations take a scale.
    """

    name: str
    remark: str
    mixer: str
    sections: tuple[SectionKind, ...]
    convolved: int
    keys: str
    values: str
    transition: Transition
    arguments: tuple[Argument, ...]
    recurrence: str = ""
    head: str = "value head"
    group: str = "key head"
    takes_codec: bool = True
    scales_queries: bool = True

    @property
    def shared(self) -> str:
        """The word for what heads share, in few letters: "key heads", "groups"."""
        return f"{self.group.partition(' of ')[0]}s"

    @property
    def has_state(self) -> bool:
        return self.transition is not Transition.NONE

    @property
    def rule(self) -> str:
        """The kind that kernels know its recurrence by."""
        return self.recurrence or self.name

    @property
    def is_dense(self) -> bool:
        """Whether a segment's map is a matrix, as that of the delta rule: two products with the keys a token."""
        return self.transition is Transition.DENSE

    @property
    def stages(self) -> tuple[str, ...]:
        """The local work, by the names under which the operation hands it to the executor."""
        return (("conv",) if self.convolved else ()) + (("gates", "rule") if self.has_state else ())

    def argument(self, field: str) -> str | None:
        """What `plan_linear` calls a field of the shape; None where the kind has no such size."""
        return next((argument.name for argument in self.arguments if argument.field == field), None)


_KEYS = (SectionKind("q", Per.GROUP, Dim.KEY), SectionKind("k", Per.GROUP, Dim.KEY))
_DELTA = (
    Argument("heads", "heads"), Argument("groups", "key_heads", "heads"), Argument("key_dim", "head_dim"),
    Argument("value_dim", "value_head_dim", "key_dim"),
)  # fmt: skip

GDN = LinearKind(
    "gdn", "Gated DeltaNet", "the Gated DeltaNet mixer: convolution, gates and rule",
    sections=(
        *_KEYS, SectionKind("v", Per.HEAD, Dim.VALUE), SectionKind("beta", Per.HEAD, Dim.ONE, exact=True),
        SectionKind("alpha", Per.HEAD, Dim.ONE, exact=True),
    ),
    convolved=3, keys="k", values="v", transition=Transition.DENSE, arguments=_DELTA,
)  # fmt: skip
KDA = LinearKind(
    "kda", "Kimi Delta Attention", "the Kimi Delta Attention mixer: convolution, gates and rule",
    sections=(
        *_KEYS, SectionKind("v", Per.HEAD, Dim.VALUE), SectionKind("g", Per.HEAD, Dim.KEY, exact=True),
        SectionKind("beta", Per.HEAD, Dim.ONE, exact=True),
    ),
    convolved=3, keys="k", values="v", transition=Transition.DENSE, arguments=_DELTA,
)  # fmt: skip
MAMBA = LinearKind(
    "mamba", "Mamba-2", "the Mamba-2 mixer: convolution, step sizes and recurrence",
    sections=(
        SectionKind("x", Per.HEAD, Dim.VALUE), SectionKind("B", Per.GROUP, Dim.KEY),
        SectionKind("C", Per.GROUP, Dim.KEY), SectionKind("dt", Per.HEAD, Dim.ONE, exact=True),
    ),
    convolved=3, keys="B", values="x", transition=Transition.SCALAR,
    arguments=(
        Argument("heads", "heads"), Argument("groups", "groups", 1), Argument("key_dim", "state"),
        Argument("value_dim", "head_dim"),
    ),
    head="head", group="group of B and C", scales_queries=False,
)  # fmt: skip
CONV1D = LinearKind(
    "conv1d", "the causal convolution alone", "the causal convolution alone",
    sections=(SectionKind("x", Per.HEAD, Dim.ONE),),
    convolved=1, keys="x", values="x", transition=Transition.NONE, arguments=(Argument("heads", "channels"),),
    head="channel", group="channel", takes_codec=False, scales_queries=False,
)  # fmt: skip

KINDS = {kind.name: kind for kind in (GDN, KDA, MAMBA, CONV1D)}
