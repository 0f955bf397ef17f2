"""`Job`: what is given of a job beside its model and batch: parallel sizes, sharding, recomputation. No torch in here.

The order of ranks is Megatron's: tensor, context, expert within data, data, and pipeline last.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.apps.estimate.mixers import AttentionMixer, LinearMixer
from megatron_cp.apps.estimate.model_layers import FULL, MLP, OPS, RECOMPUTATION
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.errors import ArgumentError, checked_integer
from megatron_cp.planner import Machine, Topology

SHARDINGS = ("none", "zero1", "zero3")
GRADIENTS = ("fp32", "bf16")


@dataclass(frozen=True)
class Job:
    """The sizes of a job, as far as they change the shapes and the memory of its layers.

    Attributes:
        cp: context-parallel size.
        layout: "zigzag", "contiguous" or "balanced".
        scheme, ulysses_degree: attention's; "auto" compares all.
        mode: the mode of linear layers; "auto" compares all.
        recompute: as `Block.saved` takes it.
        head_chunks, transport, codec: for attention and linear layers; see `plan_attention`.
        sharding: how parameters, gradients and optimizer are sharded over the ranks that have the same ones: "none";
            "zero1" (optimizer: Megatron's distributed optimizer); "zero3" (all of them: FSDP).
        replicas: data-parallel size.
        hardware: value of `--cp-hardware` if flags leave a mode to "auto"; None for its default.
        search_seconds: for tiles of attention; see `plan_attention`.
        tp: tensor-parallel size, with sequence parallelism.
        pp: number of pipeline stages. A stage holds as many microbatches as there are stages from it to the end.
        ep: expert-parallel size: ranks among tp * cp * replicas that share the experts.
        gradients: "fp32" or "bf16", in which gradients are summed over microbatches and ranks.
        logit_rows: rows whose logits are in memory at the same time; None for all. See `sum_in_chunks`.
        mlp_rows: rows that an MLP runs on at the same time; None for all. See `run_in_chunks`.
        saved_on_host: True if the inputs of layers that are recomputed are in host memory. See `saved_on_host`.
    """

    cp: int
    layout: str
    scheme: str = "auto"
    ulysses_degree: int | None = None
    mode: str = "auto"
    recompute: str = "selective"
    head_chunks: int | None = None
    transport: str = "collective"
    codec: str = "none"
    sharding: str = "zero1"
    replicas: int = 1
    hardware: str | None = None
    search_seconds: float = 0.0
    tp: int = 1
    pp: int = 1
    ep: int = 1
    gradients: str = "fp32"
    logit_rows: int | None = None
    mlp_rows: int | None = None
    saved_on_host: bool = False

    def layers_of(self, stage: int, layers: int) -> range:
        """Returns the numbers of a stage's layers, of so many; the last stage has fewer if they do not divide."""
        each = -(-layers // self.pp)
        return range(each * stage, min(each * (stage + 1), layers))

    @property
    def gpus(self) -> int:
        """The number of ranks of the job."""
        return self.stage_ranks * self.pp

    @property
    def stage_ranks(self) -> int:
        """The number of ranks of a pipeline stage, among which experts are shared."""
        return self.tp * self.cp * self.replicas

    def topology(self, on: Machine, hosts: int | None = None) -> Topology:
        """Returns the hosts of one context-parallel group, whose ranks are `tp` apart.

        Raises:
            ArgumentError: hosts are given where ranks of other degrees stand between.
        """
        if self.tp == 1:
            return on.topology(self.cp, hosts)
        if hosts is not None:
            raise ArgumentError(
                "hosts", hosts, "None with tp above 1", "With tensor parallelism, ranks fill whole hosts."
            )
        return on.topology(self.cp, [rank * self.tp // on.ranks_per_host for rank in range(self.cp)])

    def check(self, model: ModelSpec, on: Machine) -> None:
        """Refuses degrees that the model or the machine does not divide into.

        Raises:
            ArgumentError: such a degree, or a choice that does not exist.
        """
        for name, allowed in (("sharding", SHARDINGS), ("gradients", GRADIENTS), ("recompute", RECOMPUTATION)):
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), " or ".join(allowed))
        for name in ("replicas", "tp", "pp", "ep"):
            checked_integer(name, getattr(self, name), 1)
        for name in ("logit_rows", "mlp_rows"):
            if getattr(self, name) is not None:
                checked_integer(name, getattr(self, name), 1)
        if self.saved_on_host and self.recompute != FULL:
            remedy = "What is moved are the inputs of layers that are recomputed: take full recomputation."
            raise ArgumentError("saved_on_host", True, f"only with recompute {FULL}", remedy)
        if self.mlp_rows is not None and model.from_megatron:
            remedy = "Megatron's MLPs return a bias beside their rows, which run_in_chunks refuses: recompute layers."
            raise ArgumentError("mlp_rows", self.mlp_rows, "None for a model of Megatron's flags", remedy)
        if self.mlp_rows is not None and self.recompute == OPS:
            remedy = "An MLP in chunks is recomputed as a whole: ops cannot save some of its products."
            raise ArgumentError("mlp_rows", self.mlp_rows, f"None with recompute {OPS}", remedy)
        if self.recompute == OPS and self.sharding != "zero3":
            remedy = "ops is PyTorch's selective checkpointing, which goes with its sharding."
            raise ArgumentError("recompute", OPS, "none or selective or full without sharding zero3", remedy)
        if self.tp > 1 and on.ranks_per_host % self.tp:
            raise ArgumentError("tp", self.tp, f"a divisor of the {on.ranks_per_host} ranks of a host")
        for mixer, name, count in _counts(model):
            if count % self.tp:
                raise ArgumentError("tp", self.tp, f"a divisor of {count}, the {name} of {mixer}")
        layers = len(model.blocks)
        if not self.layers_of(self.pp - 1, layers):
            raise ArgumentError("pp", self.pp, f"stages that divide {layers} layers, or leave some for the last")
        if self.sharding == "zero3" and self.pp > 1:
            raise ArgumentError(
                "sharding",
                "zero3",
                "zero1 with pp above 1",
                "With zero3, every microbatch would gather all weights again.",
            )
        mlps = [model.blocks[kind].mlp for kind in dict.fromkeys(model.kinds)]
        experts = [mlp.experts for mlp in mlps if mlp is not None and mlp.experts]
        if self.ep > 1 and (not experts or self.stage_ranks % self.ep or any(count % self.ep for count in experts)):
            wanted = f"a divisor of {self.stage_ranks} ranks of a stage and of {max(experts, default=0)} experts"
            raise ArgumentError("ep", self.ep, wanted if experts else "1 without experts")


def _counts(model: ModelSpec) -> list[tuple[str, str, int]]:
    """Returns the numbers that tensor parallelism divides: what has them, their name, and the number."""
    found: dict[tuple[str, str, int], None] = {}
    for part in (part for kind in dict.fromkeys(model.kinds) for part in model.blocks[kind].parts):
        if isinstance(part, AttentionMixer):
            found["attention", "key/value heads", part.kv_heads] = None
        elif isinstance(part, LinearMixer):
            found[part.kind, "key heads", part.key_heads] = None
        elif isinstance(part, MLP) and (part.shared_size or not part.experts):
            found["an MLP", "features", part.shared_size or part.intermediate_size] = None
    return list(found)
