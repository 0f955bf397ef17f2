"""Jobs and faults as plain data. A case is decided by the campaign's seed and its number alone."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from random import Random

from megatron_cp.plan.schemes import SCHEMES

# What ends or holds up one rank: kind -> weight.
LOST = {"kill": 8, "kill_outside": 6, "stop": 5, "exit": 5, "interrupt": 4, "raise": 8}
HELD_UP = {"delay": 4}
PARENT = {"kill_parent": 4, "stop_and_kill_parent": 1}
SAVING = {"kill_in_save": 6}
# What one rank does not do as the others do.
CALL = {
    "dtype": 4, "batch": 3, "scale": 4, "softcap": 3, "sink_given": 2, "sink_values": 2, "dropout": 2, "seed": 2,
    "kernel": 2, "requires_grad": 5, "no_grad": 3, "inference_mode": 1,
}  # fmt: skip
PLAN = {"lengths": 3, "scheme": 3, "transport": 3, "chunks": 3, "codec": 3}
BEHAVIOUR = {"skip_layer": 4, "skip_backward": 3, "order": 3, "checkpoint": 4}
DISAGREE = CALL | PLAN | BEHAVIOUR
FAULTS = LOST | HELD_UP | PARENT | SAVING | DISAGREE

_OF_ATTENTION = ("batch", "softcap", "sink_given", "sink_values", "dropout", "seed")
_IN_TRAIN = ("kill", "kill_outside", "stop", "exit", "raise", "kill_parent", "kill_in_save")
TRAIN_SHARE = 0.12  # of those


@dataclass(frozen=True)
class Layer:
    """A layer: attention or the mixer of a linear layer. Layers of one `plan` number differ in weights alone."""

    kind: str
    scheme: str  # of attention; of linear layers the mode
    plan: int
    heads: int = 4
    groups: int = 2
    head_dim: int = 8
    transport: str = "collective"
    chunks: int | None = None
    codec: str = "none"
    mask: str = "causal"
    softcap: float = 0.0
    sink: bool = False
    dropout: float = 0.0
    checkpoint: bool = False


@dataclass(frozen=True)
class Fault:
    """A fault that is injected into a job.

    Attributes:
        kind: a kind of `FAULTS`.
        rank, step, layer: the place of the fault.
        phase: plan, before (a layer), forward, backward, reduce or save.
        operation: number of tensor operations before it, within forward or backward.
        seconds: length of a delay, or of the time until a signal from outside is sent.
        once: True for that step alone, False for all steps from then on.
        variant: number of the variant.
    """

    kind: str
    rank: int
    step: int
    layer: int
    phase: str = "before"
    operation: int = 0
    seconds: float = 0.0
    once: bool = True
    variant: int = 0


@dataclass(frozen=True)
class Case:
    """A job and its fault.

    Attributes:
        launch: "launcher" (`run_ranks`, or `megatron-cp train`) or "independent" (as torchrun starts them).
        spawn: of the launcher: new processes as users have them, not forks.
        train: `megatron-cp train` in place of the loop.
        replan: a plan a step; else one for all.
        agree: `check_agreement` of each plan.
        own_reduce: gradients are summed over a process group of their own.
        save: "none" or "megatron": by what `megatron-cp train` saves with.
        timeout: of the process groups, seconds.
        destroy: independent ranks destroy their process group when they end, whatever ends them.
        fresh: they are new processes as users have them, which end as scripts do, not forks that leave at once.
    """

    number: int
    cp_size: int
    layers: tuple[Layer, ...]
    lengths: tuple[int, ...]
    fault: Fault
    layout: str = "zigzag"
    steps: int = 3
    dtype: str = "float64"
    launch: str = "independent"
    spawn: bool = False
    train: bool = False
    replan: bool = True
    agree: bool = False
    own_reduce: bool = False
    save: str = "none"
    timeout: float = 8.0
    destroy: bool = True
    fresh: bool = False
    seed: int = 0

    def text(self) -> str:
        """Returns the case as `--case` takes it."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def of(cls, text: str) -> Case:
        """Makes a case of what `text` gave."""
        known = json.loads(text)
        layers = tuple(Layer(**layer) for layer in known["layers"])
        changed = {"layers": layers, "lengths": tuple(known["lengths"]), "fault": Fault(**known["fault"])}
        return cls(**{**known, **changed})


def draw(seed: int, number: int, timeout: float = 8.0) -> Case:
    """Draws the case of a number."""
    random = Random(f"{seed}/{number}")
    kind = random.choices(list(FAULTS), list(FAULTS.values()))[0]
    cp_size = random.choice((2, 2, 3, 4))
    case = Case(
        number,
        cp_size,
        _layers(random, cp_size),
        tuple(random.randint(1, 12) for _ in range(random.randint(2, 5))),
        Fault(kind, random.randrange(cp_size), 0, 0, variant=random.randrange(12)),
        layout=random.choice(("zigzag", "zigzag", "contiguous", "balanced", "random")),
        dtype=random.choice(("float64", "float64", "float32")),
        launch="launcher" if kind in PARENT else random.choice(("launcher", "independent")),
        replan=random.random() < 0.6,
        agree=random.random() < 0.25,
        own_reduce=random.random() < 0.5,
        save=random.choice(("none", "none", "megatron")),
        timeout=timeout,
        destroy=random.random() < 0.7,
        seed=random.randrange(10_000),
    )
    # New processes import for seconds; forks are as good but for how they start and end.
    is_new = random.random() < 0.05
    case = replace(case, spawn=is_new and case.launch == "launcher", fresh=is_new and case.launch == "independent")
    return _with_fault(random, case)


def _layers(random: Random, cp_size: int) -> tuple[Layer, ...]:
    kinds = [_layer(random, cp_size, plan) for plan in range(random.randint(1, 3))]
    chosen = [random.choice(kinds) for _ in range(random.randint(2, 3))]
    return tuple(replace(layer, checkpoint=random.random() < 0.25) for layer in chosen)


def _layer(random: Random, cp_size: int, plan: int, kind: str = "") -> Layer:
    kind = kind or random.choice(("attention", "attention", "attention", "gdn", "kda", "mamba", "conv1d"))
    heads, groups = random.choice(((4, 2), (4, 4), (6, 2), (8, 8), (3, 1)))
    transport = random.choice(("collective", "collective", "pairwise", "hierarchical"))
    layer = Layer(kind, "", plan, heads, groups, transport=transport)
    if kind != "attention":
        layer = replace(
            layer, scheme=random.choice(("headwise", "chunkwise", "redistribute")[: 2 + (kind != "conv1d")])
        )
    else:
        layer = replace(
            layer,
            scheme=random.choice(_schemes(cp_size)),
            mask=random.choice(("causal", "full", "window:3,0")),
            softcap=random.choice((0.0, 0.0, 2.0)),
            sink=random.random() < 0.25,
            dropout=random.choice((0.0, 0.0, 0.0, 0.3)),
        )
    if random.random() < 0.3 and _can_chunk(layer):
        layer = replace(_chunkable(layer), chunks=random.choice((1, 2)))
    if random.random() < 0.12 and _can_code(layer):
        layer = replace(layer, codec=random.choice(("fp8", "int8")))
    return layer


def _schemes(cp_size: int) -> tuple[str, ...]:
    """Returns the schemes that `cp_size` ranks can run; the full head exchange is in it twice."""
    return ("a2a", *(name for name, scheme in SCHEMES.items() if cp_size == 4 or not scheme.is_product))


def _can_chunk(layer: Layer) -> bool:
    return layer.scheme not in ("p2p", "chunkwise", "redistribute") and layer.kind != "conv1d"


def _chunkable(layer: Layer) -> Layer:
    return replace(layer, heads=8, groups=8)  # two a rank at four ranks


def _that_sends(layer: Layer) -> Layer:
    """Returns the layer in a scheme that always sends, because ranks do not notice a fault where nothing is sent."""
    others = {"exact": "all_gather", "chunkwise": "headwise", "redistribute": "headwise"}
    return replace(layer, scheme=others.get(layer.scheme, layer.scheme))


def _can_code(layer: Layer) -> bool:
    return layer.kind != "conv1d" and (layer.scheme == "headwise" or layer.scheme.startswith("a2a"))


def _with_fault(random: Random, case: Case) -> Case:
    """Returns the case with a fault that it can have: at a random place, of a layer that the fault is about."""
    fault, kind = case.fault, case.fault.kind
    if kind in _IN_TRAIN and random.random() < TRAIN_SHARE:
        # Its layers are not run. Forks have the fault in them.
        case = replace(case, train=True, cp_size=2, layers=_layers(random, 2), save="megatron", spawn=False)
        fault = replace(fault, rank=fault.rank % 2)
    step, layer = random.randrange(case.steps), random.randrange(len(case.layers))
    fault = replace(fault, step=step, layer=layer, once=random.random() < 0.5)
    if kind in ("order", "skip_backward", "skip_layer"):
        fault = replace(fault, once=True)
    if kind in PLAN and not case.replan:
        fault = replace(fault, step=0, once=False)
    if kind in SAVING:
        case = replace(case, save="megatron")
        fault = replace(fault, phase="save", seconds=random.uniform(0, 0.15))
    elif kind in LOST | HELD_UP | PARENT:
        phases = ("forward", "before", "save") if case.train else (
            "plan", "before", "forward", "forward", "forward", "backward", "backward", "reduce"
        )  # fmt: skip
        operation = int(120 * random.random() ** 2)
        seconds = random.uniform(2, 10) if kind == "delay" else random.uniform(0, 0.03)
        fault = replace(fault, phase=random.choice(phases), operation=operation, seconds=seconds)
        if fault.phase == "plan" and not case.replan:
            fault = replace(fault, step=0)
        if kind == "delay":
            case = replace(case, timeout=max(30.0, case.timeout))  # what is late is waited for
    case = replace(case, fault=fault)
    return _with_layer(random, case) if kind in DISAGREE else case


def _with_layer(random: Random, case: Case) -> Case:
    """Returns the case with a layer in the fault's place on which the ranks can disagree so."""
    kind, old = case.fault.kind, case.layers[case.fault.layer]
    layer = old
    if kind in _OF_ATTENTION and old.kind != "attention":
        layer = _layer(random, case.cp_size, old.plan, "attention")
    if kind == "scale" and old.kind == "conv1d":
        layer = _layer(random, case.cp_size, old.plan, "gdn")
    if kind in ("chunks", "codec"):
        scheme = random.choice(("a2a", "a2a", "headwise"))
        if not (_can_chunk(layer) if kind == "chunks" else _can_code(layer)):
            layer = _layer(random, case.cp_size, old.plan, "attention" if scheme == "a2a" else "gdn")
            layer = replace(layer, scheme=scheme, chunks=None, codec="none")
        layer = replace(_chunkable(layer), chunks=random.choice((1, 2))) if kind == "chunks" else layer
    layer = replace(layer, sink=True) if kind == "sink_values" else layer
    if kind == "seed" and not layer.dropout:
        layer = replace(layer, dropout=0.3)
    if kind in ("skip_layer", "skip_backward"):
        layer = _that_sends(layer)
    dtype = "float32" if kind == "codec" else case.dtype
    # All layers of its plan are what it is.
    layers = tuple(replace(layer, checkpoint=other.checkpoint) if other.plan == old.plan else other
                   for other in case.layers)  # fmt: skip
    if kind == "order" and len({other.plan for other in layers}) == 1:
        layers = (*layers[:-1], _layer(random, case.cp_size, 9))
    return replace(case, layers=layers, dtype=dtype)


def deviated(layer: Layer, fault: Fault, cp_size: int) -> Layer:
    """The layer as a rank plans it that disagrees about the plan."""
    match fault.kind:
        case "scheme" if layer.kind == "attention":
            others = [name for name in dict.fromkeys(_schemes(cp_size)) if name != layer.scheme]
            chosen = replace(layer, scheme=others[fault.variant % len(others)], chunks=None)
            return chosen if _can_code(chosen) else replace(chosen, codec="none")
        case "scheme":
            return replace(layer, scheme="chunkwise" if layer.scheme == "headwise" else "headwise", chunks=None,
                           codec="none")  # fmt: skip
        case "transport":
            others = [name for name in ("collective", "pairwise", "hierarchical") if name != layer.transport]
            return replace(layer, transport=others[fault.variant % 2])
        case "chunks":
            return replace(layer, chunks=2 if layer.chunks == 1 else 1)
        case "codec":
            others = [name for name in ("none", "fp8", "int8", "fp8_e5m2") if name != layer.codec]
            return replace(layer, codec=others[fault.variant % 3])
    return layer


def deviated_lengths(lengths: tuple[int, ...], variant: int) -> tuple[int, ...]:
    """Other documents than the other ranks have: a token moved to another, one more, or two that changed places."""
    first, *rest = lengths
    match variant % 3:
        case 0:
            return (first + 1, *rest)
        case 1:
            return (first - 1, *rest[:-1], rest[-1] + 1)
    return (rest[-1] + 2, *rest[:-1], first)
