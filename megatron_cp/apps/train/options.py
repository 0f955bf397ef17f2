"""The options of a training run, spelled as Megatron's flags if it has one. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from megatron_cp.errors import ArgumentError
from megatron_cp.planner import MAX_CONV_WIDTH, machine, require

_SPECS = "megatron_cp.megatron.specs"
SPECS = tuple((_SPECS, name) for name in ("hybrid_stack_spec", "local_hybrid_stack_spec", "gpt_layer_spec"))
METRICS = "metrics.jsonl"  # in a run's folder: a line for each step


def _flag(default: Any, help_text: str, group: str, **rest: Any) -> Any:
    return field(default=default, metadata={"help": help_text, "group": group, **rest})


_model = partial(_flag, group="model", shape=True)
_parallel, _data, _optimised = (partial(_flag, group=name) for name in ("parallelism", "data", "optimisation"))


@dataclass(frozen=True)
class TrainingOptions:
    """The options of a training run. Every field is a flag of `megatron-cp train`: `train_iters` is `--train-iters`.

    The defaults are a small hybrid model that trains on two CPU cores in minutes.
    """

    # The model.
    spec: tuple[str, ...] = _model(
        SPECS[0],
        "module and name of the layer spec: gpt_layer_spec is for GPTModel, the others for HybridModel",
        nargs=2,
        metavar=("MODULE", "NAME"),
    )
    hybrid_layer_pattern: str = _model(
        "GG*-GG*-", "HybridModel's layers: M Mamba-2, G GatedDeltaNet, * attention, - MLP"
    )
    num_layers: int = _model(4, "GPTModel's layers")
    hidden_size: int = _model(128, "features of a token")
    ffn_hidden_size: int = _model(352, "features inside an MLP")
    num_attention_heads: int = _model(4, "query heads")
    num_query_groups: int = _model(2, "key/value heads")
    kv_channels: int = _model(32, "features of an attention head")
    qk_layernorm: bool = _model(False, "normalise queries and keys")
    linear_num_key_heads: int = _model(2, "GatedDeltaNet's query and key heads")
    linear_num_value_heads: int = _model(4, "GatedDeltaNet's value heads")
    linear_key_head_dim: int = _model(32, "features of GatedDeltaNet's key heads")
    linear_value_head_dim: int = _model(32, "features of GatedDeltaNet's value heads")
    linear_conv_kernel_dim: int = _model(4, "taps of GatedDeltaNet's convolution")
    mamba_num_heads: int = _model(8, "Mamba-2's heads")
    mamba_head_dim: int = _model(32, "features of Mamba-2's heads")
    mamba_state_dim: int = _model(16, "features of Mamba-2's state")
    mamba_num_groups: int = _model(2, "groups of Mamba-2's heads that share B and C")
    window_size: tuple[int, ...] | None = _model(
        None, "numbers of tokens before and after a query that the query sees", nargs=2, type=int
    )
    softmax_type: str = _model(
        "vanilla",
        "off-by-one and learnable add a sink to each head's softmax",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    rotary_base: int = _model(10000, "base of the periods of rotary phases")
    # Parallelism.
    context_parallel_size: int = _parallel(1, "ranks that share the tokens of a pack")
    data_parallel_size: int = _parallel(1, "number of replicas on local ranks; under torchrun the job decides it")
    cp_comm_type: tuple[str, ...] = _parallel(("auto",), "attention's scheme, one value or one a layer", nargs="+")
    linear_cp_mode: str = _parallel("auto", "linear layers' mode: headwise, chunkwise, redistribute or auto")
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = _parallel(
        None, "for a2a+...: number of ranks that exchange heads, and number of such groups", nargs=2, type=int
    )
    cp_head_chunks: int | None = _parallel(None, "number of chunks in which to exchange heads, or to gather keys")
    cp_transport: str = _parallel(
        "collective", "how messages are sent: collective, pairwise, hierarchical, shared_memory or symmetric_memory"
    )
    cp_codec: str = _parallel("none", "quantisation of heads, keys and values in messages: none, fp8, fp8_e5m2 or int8")
    cp_hardware: str | None = _parallel(None, "machine for which auto predicts: a preset such as h100, or a file")
    cp_search: float = _parallel(
        0.0,
        "seconds for which OR-Tools may search for better tiles, for each pack and direction; above 0, auto "
        "also considers tiled",
        metavar="SECONDS",
    )
    cp_layout: str = _parallel(
        "balanced", "layout of tokens over ranks: balanced, contiguous, zigzag, or auto (the fastest for each pack)"
    )
    distributed_timeout_minutes: float = _parallel(
        0.75, "longest wait for another rank; ten minutes in the first step and while saving"
    )
    # Data.
    data_path: str | None = _data(
        None,
        "a folder of text files, a .jsonl file of texts or conversations, or a text file (default: the source files of "
        "Python's standard library)",
    )
    tokenizer_model: str | None = _data(None, "a Hugging Face tokenizer.json (default: bytes)")
    seq_length: int = _data(4096, "maximum tokens of a pack, which is one microbatch of all context-parallel ranks")
    global_batch_size: int = _data(1, "number of packs in a step")
    # Optimisation.
    train_iters: int = _optimised(100, "training steps")
    # Fields with `kept` are part of the optimizer's state in a checkpoint: Megatron finds its groups of weights by
    # them, or loads them with the groups.
    lr: float = _optimised(1e-3, "learning rate", kept=True)
    lr_warmup_iters: int = _optimised(20, "steps of warm-up; if not given, at most a fifth of the run")
    weight_decay: float = _optimised(0.01, "AdamW's weight decay", kept=True)
    adam_beta1: float = _optimised(0.9, "AdamW's beta1", kept=True)
    adam_beta2: float = _optimised(0.95, "AdamW's beta2", kept=True)
    clip_grad: float = _optimised(1.0, "maximum gradient norm; 0 for no clipping")
    seed: int = _optimised(1234, "seed of weights and of the order of documents")
    bf16: bool = _optimised(False, "bf16 weights with fp32 master weights")
    recompute_granularity: str | None = _optimised(None, "recompute activations", choices=("full", "selective"))
    # Checkpoints.
    save_interval: int | None = _flag(None, "steps between checkpoints (default: one at the end)", "checkpoints")

    def shape(self, vocab_size: int) -> dict[str, Any]:
        """Returns the options that a checkpoint and the run that loads it must share; `vocab_size` is the data's."""
        fixed = [entry for entry in fields(self) if entry.metadata.get("shape") or entry.metadata.get("kept")]
        shape = {entry.name: getattr(self, entry.name) for entry in fixed}
        shape["vocab_size"] = vocab_size
        return {name: list(value) if isinstance(value, tuple) else value for name, value in shape.items()}

    def check(self) -> None:
        """Refuses options that are wrong, before anything starts; Megatron's and ours, and layers, refuse the rest."""
        if self.spec not in SPECS:
            remedy = "To train other layers, use a Megatron job of your own."
            raise ArgumentError("spec", " ".join(self.spec), " or ".join(map(" ".join, SPECS)), remedy)
        machine(self.cp_hardware, argument="cp_hardware")
        for scheme in self.cp_comm_type:
            require("scheme", scheme, name="cp_comm_type")
        self._check_numbers()
        self._check_together()

    def _check_numbers(self) -> None:
        counts = (entry.name for entry in fields(self) if entry.type in ("int", "int | None"))
        least: dict[str, float] = dict.fromkeys(counts, 1)
        least |= dict.fromkeys(_AMOUNTS, 0) | {"seq_length": 2}  # a next-token label needs two
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and not smallest <= value < float("inf"):
                kind = "a finite number of at least" if isinstance(value, float) else "at least"
                raise ArgumentError(name, value, f"{kind} {smallest:g}")
            if isinstance(value, int) and value >= 2**63:
                raise ArgumentError(name, value, "less than 2**63")
        if not 0.01 <= self.distributed_timeout_minutes <= _WEEK:
            allowed = f"minutes from 0.01 to {_WEEK}"
            raise ArgumentError("distributed_timeout_minutes", self.distributed_timeout_minutes, allowed)
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ArgumentError(name, getattr(self, name), "at least 0 and less than 1")
        for name, smallest, meaning in (
            ("window_size", -1, "tokens to see, -1 for all"),
            ("hierarchical_context_parallel_sizes", 1, "numbers of ranks, at least 1"),
        ):
            values = getattr(self, name)
            if values is not None and (len(values) != 2 or min(values) < smallest):
                raise ArgumentError(name, values, f"two {meaning}")

    def _check_together(self) -> None:
        """Refuses options that contradict each other."""
        if self.seq_length < self.context_parallel_size:
            raise ArgumentError(
                "seq_length", self.seq_length, f"at least one token for each of {self.context_parallel_size} ranks"
            )
        if self.linear_conv_kernel_dim > MAX_CONV_WIDTH:
            allowed = f"an integer from 1 to {MAX_CONV_WIDTH}"
            raise ArgumentError("linear_conv_kernel_dim", self.linear_conv_kernel_dim, allowed)
        if self.kv_channels % 2:
            raise ArgumentError(
                "kv_channels", self.kv_channels, "an even number, since rotary positions rotate pairs of features"
            )
        if self.lr_warmup_iters and self.lr_warmup_iters >= self.train_iters:
            raise ArgumentError("lr_warmup_iters", self.lr_warmup_iters, f"less than the {self.train_iters} steps")
        for name, heads, kind in (
            ("num_query_groups", self.num_attention_heads, "query"),
            ("linear_num_key_heads", self.linear_num_value_heads, "value"),
            ("mamba_num_groups", self.mamba_num_heads, "Mamba"),
        ):
            if heads % getattr(self, name):
                raise ArgumentError(name, getattr(self, name), f"a divisor of the {heads} {kind} heads")
        if self.global_batch_size % self.data_parallel_size:
            raise ArgumentError(
                "global_batch_size", self.global_batch_size, f"a multiple of the {self.data_parallel_size} replicas"
            )


_WEEK = 7 * 24 * 60  # in minutes
_AMOUNTS = ("seed", "lr_warmup_iters", "lr", "weight_decay", "clip_grad", "cp_search")


@dataclass(frozen=True)
class Run:
    """A training run: its options, its folder and its start.

    Attributes:
        name: text beside the progress bar.
        first_gradients: a folder to write the gradients of the first step to, for comparing; None for nowhere.
    """

    options: TrainingOptions
    folder: Path
    resume: Path | None = None
    name: str = "train"
    save: bool = True
    first_gradients: Path | None = None
