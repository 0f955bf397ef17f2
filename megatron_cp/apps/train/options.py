"""The options of a training run, spelled as Megatron's flags if it has one. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_cp.errors import ArgumentError
from megatron_cp.layout import Layout, Packing
from megatron_cp.plan import AUTO, REDISTRIBUTE, may_exchange_heads, scheme_named
from megatron_cp.planner import MAX_CONV_WIDTH, AttentionSpec, checked_search, machine, require

if TYPE_CHECKING:
    from megatron_cp.data import Corpus

METRICS = "metrics.jsonl"  # in a run's folder: a line for each step
_READ_DOCUMENTS, _READ_TOKENS = 64, 1024  # of a corpus, to know it again: milliseconds, on disk too


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
        ("megatron_cp.megatron.specs", "hybrid_stack_spec"),
        "module and name of the layer spec: a function for GPTModel, a ModuleSpec for HybridModel",
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
    experimental_attention_variant: str | None = _model(None, "gated_delta_net: GPTModel with GatedDeltaNet layers")
    linear_attention_freq: int = _model(4, "GPTModel: every n-th layer is softmax attention")
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
        None, "number of tokens before and after a query that attention sees", nargs=2, type=int
    )
    window_attn_skip_freq: int | None = _model(None, "every n-th layer sees all tokens, without a window")
    softmax_type: str = _model(
        "vanilla",
        "off-by-one and learnable add a sink to each head's softmax",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    attention_dropout: float = _optimised(0.0, "share of attention weights dropped")
    position_embedding_type: str = _model("rope", "position embedding", choices=("rope", "none"))
    norm_epsilon: float = _model(1e-5, "added to the mean square in norms")
    rotary_base: int = _model(10000, "period of the slowest rotary phase")
    make_vocab_size_divisible_by: int = _flag(128, "pads the vocabulary to a multiple of this", "model")
    # Parallelism.
    context_parallel_size: int = _parallel(1, "ranks that share the tokens of a pack")
    tensor_model_parallel_size: int = _parallel(1, "ranks that share each layer's weights")
    data_parallel_size: int = _parallel(1, "replicas on local ranks; torchrun's job decides its own")
    sequence_parallel: bool = _parallel(False, "split norms over the tensor-parallel ranks")
    cp_comm_type: tuple[str, ...] = _parallel(("auto",), "attention's scheme, one or one for each layer", nargs="+")
    linear_cp_mode: str = _parallel("auto", "linear layers' scheme: headwise, chunkwise, redistribute or auto")
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = _parallel(
        None, "for a2a+...: ranks of one head exchange, and number of such groups", nargs=2, type=int
    )
    cp_head_chunks: int | None = _parallel(None, "chunks in which heads are exchanged, or keys are gathered")
    cp_transport: str = _parallel(
        "collective", "how messages are sent: collective, pairwise, hierarchical, shared_memory or symmetric_memory"
    )
    cp_codec: str = _parallel("none", "coding of heads, keys and values in messages: none, fp8, fp8_e5m2 or int8")
    cp_hardware: str | None = _parallel(None, "machine for which auto predicts: a preset such as h100, or a file")
    cp_search: float = _parallel(
        0.0,
        "seconds for which OR-Tools may look for better tiles, for each pack and direction; above 0, auto "
        "considers tiled too",
        metavar="SECONDS",
    )
    cp_layout: str = _parallel(
        "balanced", "layout of tokens over ranks: balanced, contiguous, zigzag, or auto, the fastest for each pack"
    )
    distributed_timeout_minutes: float = _parallel(
        0.75, "longest wait for another rank; ten minutes in the first step and while saving"
    )
    # Data.
    data_path: str | None = _data(
        None,
        "a folder of text files, a .jsonl file of texts or conversations, a text file, or the prefix of a "
        "Megatron .bin/.idx pair (default: the source files of Python's standard library)",
    )
    tokenizer_model: str | None = _data(None, "a Hugging Face tokenizer.json (default: bytes)")
    vocab_size: int | None = _data(None, "vocabulary of a .bin/.idx pair whose tokenizer is not given")
    seq_length: int = _data(4096, "most tokens of a pack, which is a microbatch over all context-parallel ranks")
    global_batch_size: int = _data(1, "packs of a step")
    cp_even_packs: bool = _data(
        False, "assign a step's documents to its packs so that replicas take equally long, by the model's flops"
    )
    validation: float = _data(0.0, "share of the documents, the last ones, that are held out for validation")
    eval_interval: int | None = _data(None, "steps between validations (default: one at the end)")
    eval_iters: int = _data(10, "global batches of a validation; fewer if that many are not held out")
    sample_tokens: int = _data(16, "tokens that the model adds to two documents' beginnings at the end; 0 for none")
    # Optimisation.
    train_iters: int = _optimised(100, "training steps")
    # Fields with `kept` are part of the optimizer's state in a checkpoint: Megatron finds its groups of weights by
    # them, or loads them with the groups.
    lr: float = _optimised(1e-3, "learning rate", kept=True)
    min_lr: float = _optimised(0.0, "learning rate at the end of decay", kept=True)
    lr_warmup_iters: int = _optimised(20, "steps of warm-up; a fifth of the run if that is less")
    lr_decay_style: str = _optimised(
        "constant", "learning rate after the warm-up", choices=("constant", "linear", "cosine")
    )
    lr_decay_iters: int | None = _optimised(None, "steps until min-lr (default: train-iters)")
    weight_decay: float = _optimised(0.01, "AdamW's weight decay", kept=True)
    adam_beta1: float = _optimised(0.9, "AdamW's beta1", kept=True)
    adam_beta2: float = _optimised(0.95, "AdamW's beta2", kept=True)
    clip_grad: float = _optimised(1.0, "largest gradient norm; 0 for no clipping")
    seed: int = _optimised(1234, "seed of weights and of the order of documents")
    bf16: bool = _optimised(False, "bf16 weights with fp32 master weights")
    use_distributed_optimizer: bool = _optimised(False, "shard the optimizer over data-parallel ranks (CUDA)")
    recompute_granularity: str | None = _optimised(None, "recompute activations", choices=("full", "selective"))
    # Checkpoints.
    save_interval: int | None = _flag(None, "steps between checkpoints (default: one at the end)", "checkpoints")

    @property
    def model_parallel_size(self) -> int:
        return self.tensor_model_parallel_size * self.context_parallel_size

    def shape(self, vocab_size: int) -> dict[str, Any]:
        """Returns the options that a checkpoint and the run that loads it must share; `vocab_size` is the data's."""
        fixed = [entry for entry in fields(self) if entry.metadata.get("shape") or entry.metadata.get("kept")]
        shape = {entry.name: getattr(self, entry.name) for entry in fixed}
        # Padded entries of the vocabulary are in the softmax too, and more tensor-parallel ranks may pad further.
        shape |= {"vocab_size": vocab_size, "padded_vocab_size": self.padded_vocab_size(vocab_size)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in shape.items()}

    def data(self, corpus: Corpus) -> dict[str, Any]:
        """Returns the options and corpus that decide which documents a step reads.

        The corpus is known by the lengths of its documents and by the first tokens of some of them, all over it.
        """
        lengths = np.asarray(corpus.lengths, np.int64)
        digest = hashlib.blake2b(lengths.tobytes(), digest_size=8)
        for document in np.unique(np.linspace(0, lengths.size - 1, _READ_DOCUMENTS).astype(int)).tolist():
            length = min(int(lengths[document]), _READ_TOKENS)
            digest.update(np.asarray(corpus.tokens(document, 0, length), np.int64).tobytes())
        documents = f"{lengths.size} documents of {int(lengths.sum())} tokens ({digest.hexdigest()})"
        sizes = {name: getattr(self, name) for name in ("seq_length", "global_batch_size", "seed")}
        return {**sizes, "data_path": documents}

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Returns the vocabulary's size as Megatron pads it, so that tensor-parallel ranks share it evenly."""
        multiple = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return -(-vocab_size // multiple) * multiple

    def check(self) -> None:
        """Refuses options that are wrong, before anything starts."""
        for entry in fields(self):
            _check_kind(entry, getattr(self, entry.name))
        self._check_numbers()
        self._check_names()
        self._check_wire()
        self._check_divisors()
        self._check_together()

    def _check_numbers(self) -> None:
        least: dict[str, float] = dict.fromkeys(_COUNTS, 1)
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
        for name in ("adam_beta1", "adam_beta2", "attention_dropout", "validation"):
            if not 0 <= getattr(self, name) < 1:
                raise ArgumentError(name, getattr(self, name), "at least 0 and less than 1")
        for name, smallest, meaning in (
            ("window_size", -1, "tokens to see, -1 for all"),
            ("hierarchical_context_parallel_sizes", 1, "numbers of ranks, at least 1"),
        ):
            values = getattr(self, name)
            if values is not None and (len(values) != 2 or min(values) < smallest):
                raise ArgumentError(name, values, f"two {meaning}")

    def _check_names(self) -> None:
        if len(self.spec) != 2:
            raise ArgumentError("spec", self.spec, "a module and a name")
        named = {"cp_layout": "layout", "linear_cp_mode": "mode", "cp_transport": "transport", "cp_codec": "codec"}
        spelled = {name: require(kind, getattr(self, name), name=name) for name, kind in named.items()}
        schemes = tuple(require("scheme", scheme, name="cp_comm_type") for scheme in self.cp_comm_type)
        for name, value in {**spelled, "cp_comm_type": schemes}.items():
            object.__setattr__(self, name, value)  # the table's spelling, by which all else asks
        machine(self.cp_hardware, argument="cp_hardware")
        for scheme in schemes:
            self._check_scheme(scheme)

    def _check_together(self) -> None:
        """Refuses options that contradict each other."""
        if self.seq_length < self.context_parallel_size:
            raise ArgumentError(
                "seq_length", self.seq_length, f"at least one token for each of {self.context_parallel_size} ranks"
            )
        if self.linear_conv_kernel_dim > MAX_CONV_WIDTH:
            allowed = f"an integer from 1 to {MAX_CONV_WIDTH}"
            raise ArgumentError("linear_conv_kernel_dim", self.linear_conv_kernel_dim, allowed)
        if self.linear_cp_mode == REDISTRIBUTE.name and self.sequence_parallel and self.context_parallel_size > 1:
            raise ArgumentError(
                "linear_cp_mode", "redistribute", "headwise, chunkwise or auto with --sequence-parallel"
            )
        if self.position_embedding_type == "rope" and self.kv_channels % 2:
            raise ArgumentError("kv_channels", self.kv_channels, "even numbers with --position-embedding-type rope")
        if self.lr_warmup_iters and self.lr_warmup_iters >= (self.lr_decay_iters or self.train_iters):
            raise ArgumentError(
                "lr_warmup_iters",
                self.lr_warmup_iters,
                f"less than the {self.lr_decay_iters or self.train_iters} steps",
            )
        if self.min_lr > self.lr:
            raise ArgumentError("min_lr", self.min_lr, f"at most the learning rate, {self.lr}")

    def _check_wire(self) -> None:
        """Refuses options of messages that no layer of the model sends: they would silently do nothing."""
        stacks = dict.fromkeys(("hybrid_stack_spec", "local_hybrid_stack_spec"), self.hybrid_layer_pattern)
        layers = {**stacks, "gpt_layer_spec": "*"}.get(self.spec[-1])
        schemes = self.cp_comm_type if layers is None or "*" in layers else ()
        alone = self.context_parallel_size == 1  # then all attention is by auto
        checked_search(self.cp_search, [AUTO] if alone else schemes, name="cp_search")
        if alone or layers is None:
            return  # a spec of the user's own, of any layers
        headwise = may_exchange_heads(self.linear_cp_mode) and (
            any(kind in layers for kind in "GM") or self.experimental_attention_variant is not None
        )
        if self.cp_codec != "none" and not headwise and not schemes:
            remedy = "No layer of this model sends heads or keys: --linear-cp-mode headwise does."
            raise ArgumentError("cp_codec", self.cp_codec, "none", remedy)
        if (
            self.cp_head_chunks is not None
            and not headwise
            and not any(scheme_named(scheme).takes_chunks for scheme in schemes)
        ):
            remedy = "No layer of this model has head chunks: rings and chunkwise layers have none."
            raise ArgumentError("cp_head_chunks", self.cp_head_chunks, "nothing", remedy)

    def _check_scheme(self, scheme: str) -> None:
        """Refuses a scheme now that would be refused half a minute later, when the first layer is built."""
        flags = {"scheme": "cp_comm_type", "ulysses_degree": "hierarchical_context_parallel_sizes"}
        sizes = self.hierarchical_context_parallel_sizes if scheme_named(scheme).is_product else None
        if sizes is not None and sizes[0] * sizes[1] != self.context_parallel_size:
            allowed = f"two factors of the {self.context_parallel_size} context-parallel ranks"
            raise ArgumentError("hierarchical_context_parallel_sizes", sizes, allowed)
        heads, groups = (max(n // self.tensor_model_parallel_size, 1) for n in (
            self.num_attention_heads, self.num_query_groups
        ))  # fmt: skip
        if heads % groups:
            return  # refused below
        if self.context_parallel_size == 1:
            scheme, sizes = "auto", None  # the layers take these on one rank
        chunks = self.cp_head_chunks if scheme_named(scheme).takes_chunks else None
        slot = AttentionSpec(
            heads, groups, 1, 1, scheme=scheme, ulysses_degree=sizes[0] if sizes else None, head_chunks=chunks
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the layer warns about ranks without heads
                slot.plan(Layout.contiguous(Packing([1]), self.context_parallel_size))
        except ArgumentError as error:
            flag = flags.get(error.argument, f"cp_{error.argument}")
            raise ArgumentError(flag, error.given, error.allowed, error.remedy) from None

    def _check_divisors(self) -> None:
        tp = self.tensor_model_parallel_size
        for name, heads, kind in (
            ("num_query_groups", self.num_attention_heads, "query"),
            ("linear_num_key_heads", self.linear_num_value_heads, "value"),
            ("mamba_num_groups", self.mamba_num_heads, "Mamba"),
        ):
            if heads % getattr(self, name):
                raise ArgumentError(name, getattr(self, name), f"a divisor of the {heads} {kind} heads")
        shared = ["num_attention_heads", "linear_num_key_heads", "ffn_hidden_size", "hidden_size"]
        if "M" in self.hybrid_layer_pattern:
            shared.append("mamba_num_groups")
        for name in shared:
            if getattr(self, name) % tp:
                raise ArgumentError(
                    "tensor_model_parallel_size", tp, f"a divisor of {name.replace('_', '-')}, {getattr(self, name)}"
                )
        if self.num_query_groups % tp and tp % self.num_query_groups:
            raise ArgumentError(
                "num_query_groups", self.num_query_groups, f"a multiple or a divisor of the {tp} tensor-parallel ranks"
            )
        if self.global_batch_size % self.data_parallel_size:
            raise ArgumentError(
                "global_batch_size", self.global_batch_size, f"a multiple of the {self.data_parallel_size} replicas"
            )
        if self.sequence_parallel and tp == 1:
            raise ArgumentError("sequence_parallel", True, "on with --tensor-model-parallel-size above 1")


def _check_kind(entry: Field[Any], value: Any) -> None:
    """Refuses a value that the command line could not have made, such as one from a file."""
    kind, _, rest = str(entry.type).partition(" | ")
    allowed, fits = _KINDS[kind]
    if not (value is None and rest) and not fits(value):
        raise ArgumentError(entry.name, value, f"{allowed} or nothing" if rest else allowed)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# The values that a field of each type may hold.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("an integer", _is_integer),
    "float": ("a number", lambda value: isinstance(value, float) or _is_integer(value)),
    "str": ("a text", lambda value: isinstance(value, str)),
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "tuple[str, ...]": ("texts", lambda value: isinstance(value, tuple) and all(isinstance(v, str) for v in value)),
    "tuple[int, ...]": ("integers", lambda value: isinstance(value, tuple) and all(map(_is_integer, value))),
}
_COUNTS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "linear_attention_freq", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "mamba_num_heads", "mamba_head_dim", "mamba_state_dim",
    "mamba_num_groups", "rotary_base", "make_vocab_size_divisible_by",
    "context_parallel_size", "tensor_model_parallel_size", "data_parallel_size", "vocab_size", "seq_length",
    "global_batch_size", "train_iters", "lr_decay_iters", "save_interval", "eval_interval", "eval_iters",
    "cp_head_chunks", "window_attn_skip_freq",
)  # fmt: skip
_WEEK = 7 * 24 * 60  # in minutes
_AMOUNTS = ("seed", "sample_tokens", "lr_warmup_iters", "lr", "min_lr", "weight_decay", "clip_grad", "norm_epsilon")


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
    tensorboard: str | None = None
    wandb: str | None = None
