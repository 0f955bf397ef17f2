"""`LinearKind`: a kind of linear layer as a record. No torch in here.

A new kind is a record here, an operation (`linear/`) and the kernels that know it. Planning, messages, flags and the
capability table read what they need to know of a kind from its record. A new recurrence also needs its rates, `rule` in
each preset of a machine (`planner/predict/presets/`). All kinds share one vocabulary:
Mamba-2's B and C are keys and queries, its x is values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Transition(Enum):
    """The effect of a token on the state of the recurrence, `S <- M S + ...`, beside the term that it adds."""

    NONE = "no state"
    SCALAR = "a number a head"
    DENSE = "a matrix a head, of key_dim x key_dim"


class Per(Enum):
    """The unit of which a section has one entry."""

    GROUP = "key head"
    HEAD = "value head"


class Dim(Enum):
    """The number of features of an entry."""

    KEY = "key_dim"
    VALUE = "value_dim"
    ONE = "1"


@dataclass(frozen=True)
class SectionKind:
    """A tensor that travels in a head exchange.

    Attributes:
        name: the operation's name for it.
        per, dim: its shape `[tokens, heads or groups, features]`.
        exact: True if a codec must never be used for it: gates, decays and step sizes.
        has_steps: True if there is such a tensor for each step that a token makes.
    """

    name: str
    per: Per
    dim: Dim
    exact: bool = False
    has_steps: bool = False

    def names(self, steps: int) -> list[str]:
        """Returns the names of its tensors: "k", "k2" and so on, one for each step."""
        return [self.name, *(f"{self.name}{step}" for step in range(2, steps + 1) if self.has_steps)]


@dataclass(frozen=True)
class Argument:
    """A size that a kind takes.

    Attributes:
        field: the field of the shape: heads, groups, key_dim, value_dim or steps.
        name: its name as an argument of `plan_linear`.
        default: a number, or the field whose value it takes; None if it is required.
    """

    field: str
    name: str
    default: int | str | None = None


@dataclass(frozen=True)
class LinearKind:
    """A kind of linear layer.

    Attributes:
        name: a value of `kind` of `plan_linear`.
        remark, mixer: descriptions of the bare rule and of the whole mixer, for `megatron-cp doctor`.
        sections: in the order of the operation's features; the first `convolved` of them are convolved.
        keys, values: the names of the sections that hold keys and values.
        transition: the form of the state's transition.
        arguments: the sizes that it takes; other sizes are 1, or as many groups as heads.
        recurrence: the kind whose recurrence and kernels it uses with other inputs; empty for its own.
        rates: the kind by whose measured rates the time of its kernels is predicted; empty for its own.
        head, group: the nouns for a head, and for what heads share.
        takes_codec: True if its heads are long enough to be coded.
        scales_queries: True if its operations take a scale.
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
    rates: str = ""
    head: str = "value head"
    group: str = "key head"
    takes_codec: bool = True
    scales_queries: bool = True

    @property
    def shared(self) -> str:
        """The short noun for what heads share: "key heads", "groups"."""
        return f"{self.group.partition(' of ')[0]}s"

    @property
    def has_state(self) -> bool:
        return self.transition is not Transition.NONE

    @property
    def rule(self) -> str:
        """The name by which kernels know its recurrence."""
        return self.recurrence or self.name

    @property
    def measured_rule(self) -> str:
        """The recurrence whose rates machine files have."""
        return self.rates or self.rule

    @property
    def is_dense(self) -> bool:
        """True if a segment's transition is a matrix, as in the delta rule: two products with the keys a token."""
        return self.transition is Transition.DENSE

    @property
    def stages(self) -> tuple[str, ...]:
        """The local work, by the names under which the operation hands it to the executor."""
        return (("conv",) if self.convolved else ()) + (("gates", "rule") if self.has_state else ())

    def counts(self, num_sections: int) -> list[int]:
        """Returns the number of tensors of each section, given that of all: one, or one for each step of a token."""
        with_steps = sum(section.has_steps for section in self.sections)
        steps = (num_sections - len(self.sections)) // with_steps + 1 if with_steps else 1
        return [steps if section.has_steps else 1 for section in self.sections]

    def num_convolved(self, num_sections: int) -> int:
        """Returns the number of tensors that are convolved, given that of all."""
        return sum(self.counts(num_sections)[: self.convolved])

    def argument(self, field: str) -> str | None:
        """Returns the argument of `plan_linear` that sets a field of the shape; None if the kind has no such size."""
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
GDN2 = LinearKind(
    "gdn2", "Gated DeltaNet-2", "the Gated DeltaNet-2 mixer: convolution, gates and rule",
    sections=(
        *_KEYS, SectionKind("v", Per.HEAD, Dim.VALUE), SectionKind("g", Per.GROUP, Dim.KEY, exact=True),
        SectionKind("b", Per.GROUP, Dim.KEY, exact=True), SectionKind("w", Per.HEAD, Dim.VALUE, exact=True),
    ),
    convolved=3, keys="k", values="v", transition=Transition.DENSE, arguments=_DELTA, rates="kda",
)  # fmt: skip
GDP = LinearKind(
    "gdp", "Gated DeltaProduct", "the Gated DeltaProduct mixer: convolution, gates and rule",
    sections=(
        SectionKind("v", Per.HEAD, Dim.VALUE, has_steps=True), SectionKind("k", Per.GROUP, Dim.KEY, has_steps=True),
        SectionKind("q", Per.GROUP, Dim.KEY), SectionKind("beta", Per.HEAD, Dim.ONE, exact=True, has_steps=True),
        SectionKind("alpha", Per.HEAD, Dim.ONE, exact=True),
    ),
    convolved=3, keys="k", values="v", transition=Transition.DENSE, recurrence="gdn",
    arguments=(*_DELTA, Argument("steps", "num_householder", 1)),
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

KINDS = {kind.name: kind for kind in (GDN, KDA, GDN2, GDP, MAMBA, CONV1D)}
