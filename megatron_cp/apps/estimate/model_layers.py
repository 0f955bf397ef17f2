"""`Block`: a layer of a model as data, with its mixer (attention or a linear layer) and its MLP. No torch in here."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from megatron_cp.errors import ArgumentError, checked_flag, checked_integer
from megatron_cp.plan import KINDS, Dim, Per, SectionKind
from megatron_cp.planner import AttentionSpec, LinearSpec

RECOMPUTATION = NONE, SELECTIVE, FULL, OPS = "none", "selective", "full", "ops"
BF16, FP32 = 2, 4  # bytes


class Gemm(NamedTuple):
    """A product of activations with a weight matrix.

    Attributes:
        count: number of such products for one token.
        in_features, out_features: shape of the weight; a token takes `2 * count * in_features * out_features`
            operations forward.
    """

    count: int  # type: ignore[assignment]  # a tuple's own `count` is of no use here
    in_features: int
    out_features: int

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of one token forward; as many as the weights that the token meets."""
        return self.count * self.in_features * self.out_features


class Moved(NamedTuple):
    """Features of a token that operations outside of products read and write, each of two bytes.

    Products read and write their own operands: their measured time holds that.

    Attributes:
        forward, backward: in the forward and in the backward.
        again: in the part of the forward that selective recomputation computes again.
    """

    forward: int
    backward: int
    again: int


@dataclass(frozen=True)
class AttentionMixer:
    """Softmax attention with its projections.

    Attributes:
        heads, kv_heads: number of query heads, and of key/value heads, which divides it.
        head_dim, value_head_dim: features of a query or key head, and of a value head.
        mask: a spelling of `Mask.named`, such as "causal" or "window:4095,0".
        output_gate: True if the query projection also makes a gate for each feature of the output.
        qk_norm: True if queries and keys are normalised head by head, or in latent attention the latents.
        bias: True if the projections of queries, keys and values have biases.
        output_bias: True if the output projection has a bias.
        sink: True for a learned score in each head's softmax.
        kv_rank: features of the latent from which multi-head latent attention makes keys and values; None if hidden
            states are projected to keys and values.
        query_rank: the same for queries.
        shared_key_dim: features of a key, among its `head_dim`, that all heads of latent attention share.

    Raises:
        ArgumentError: sizes that do not fit each other, or a mask that does not exist.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    mask: str = "causal"
    output_gate: bool = False
    qk_norm: bool = False
    bias: bool = False
    output_bias: bool = False
    sink: bool = False
    kv_rank: int | None = None
    query_rank: int | None = None
    shared_key_dim: int = 0

    def __post_init__(self) -> None:
        self.slot()
        _check_divides("kv_heads", self.kv_heads, "heads", self.heads)
        for name in ("output_gate", "qk_norm", "bias", "output_bias", "sink"):
            checked_flag(name, getattr(self, name))
        for name in ("kv_rank", "query_rank"):
            if getattr(self, name) is not None:
                checked_integer(name, getattr(self, name), 1)
        checked_integer("shared_key_dim", self.shared_key_dim, 0, self.head_dim - 1 if self.kv_rank else 0)

    @property
    def layer(self) -> str:
        """The name of such a layer for `--layer`."""
        return "attention"

    def slot(self) -> AttentionSpec:
        """Returns the layer's specification, without the choice of a scheme."""
        return AttentionSpec(self.heads, self.kv_heads, self.head_dim, self.value_head_dim, self.mask)

    def gemms(self, hidden_size: int) -> tuple[Gemm, ...]:
        """Returns the products of one layer."""
        queries = self._queries * 2 if self.output_gate else self._queries
        first, more = queries, []
        if self.query_rank:
            first, more = self.query_rank, [Gemm(1, self.query_rank, queries)]
        if self.kv_rank:
            first += self.kv_rank + self.shared_key_dim
            own_keys = self.kv_heads * (self.head_dim - self.shared_key_dim)
            more.append(Gemm(1, self.kv_rank, own_keys + self._values))
        else:
            first += self._keys + self._values
        return Gemm(1, hidden_size, first), *more, Gemm(1, self._outputs, hidden_size)

    def vectors(self, hidden_size: int) -> int:
        """Returns the number of parameters outside of products: norms, biases and sinks."""
        norms = self._latents or 2 * self.head_dim
        count = norms if self.qk_norm else 0
        count += self._queries + self._keys + self._values if self.bias else 0
        return count + (hidden_size if self.output_bias else 0) + (self.heads if self.sink else 0)

    def saved(self, *, selective: bool) -> int:
        """Returns the bytes that a token saves from the input norm to the output projection: see `activation_bytes`."""
        features = self._queries + self._keys + self._values + self._latents
        features += (self._latents or self._queries + self._keys) if self.qk_norm else 0
        features += 2 * self._outputs if self.output_gate else 0
        return BF16 * features

    def moved(self, hidden_size: int) -> Moved:
        """Returns the features that rotary positions, norms of heads and an output gate read and write."""
        normed = (self._latents or self._queries + self._keys) * self.qk_norm
        gated = self._outputs * self.output_gate
        rotated = 2 * (self._queries + self._keys)
        return Moved(rotated + 2 * normed + 3 * gated, rotated + 3 * normed + 5 * gated, 0)

    @property
    def _latents(self) -> int:
        """The features of the latents; 0 without latent attention."""
        return (self.query_rank or 0) + (self.kv_rank or 0)

    @property
    def _queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def _keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def _values(self) -> int:
        return self.kv_heads * self.value_head_dim

    @property
    def _outputs(self) -> int:
        return self.heads * self.value_head_dim


@dataclass(frozen=True)
class LinearMixer:
    """A linear layer with its projections; `LinearSpec` says what heads and sizes mean for each kind.

    Attributes:
        kind: a name in `KINDS`, of a kind with a state.
        heads, key_heads, head_dim, value_head_dim, conv_width: as in `LinearSpec`.
        vectors_per_layer: parameters outside of products: convolution, decays, step sizes and the output norm.
        decay_rank: features between the two projections of a decay that has several features a head (KDA).
        gate_rank: features between the two projections of the output gate; None for one projection.

    Raises:
        ArgumentError: a kind that does not exist, or sizes that do not fit each other.
    """

    kind: str
    heads: int
    key_heads: int
    head_dim: int
    value_head_dim: int
    conv_width: int = 4
    vectors_per_layer: int = 0
    decay_rank: int | None = None
    gate_rank: int | None = None

    def __post_init__(self) -> None:
        self.slot()
        if not KINDS[self.kind].has_state:
            raise ArgumentError("kind", self.kind, " or ".join(kind.name for kind in KINDS.values() if kind.has_state))
        _check_divides("key_heads", self.key_heads, "heads", self.heads)
        checked_integer("vectors_per_layer", self.vectors_per_layer, 0)
        for name in ("decay_rank", "gate_rank"):
            if getattr(self, name) is not None:
                checked_integer(name, getattr(self, name), 1)

    @property
    def layer(self) -> str:
        """The name of such a layer for `--layer`."""
        return self.kind

    def slot(self) -> LinearSpec:
        """Returns the layer's specification, without the choice of a mode."""
        sizes = (self.heads, self.key_heads, self.head_dim, self.value_head_dim, self.conv_width)
        return LinearSpec(self.kind, *sizes)

    def gemms(self, hidden_size: int) -> tuple[Gemm, ...]:
        """Returns the products of one layer."""
        direct = sum(self._widths.values()) + self._outputs + sum(rank - width for rank, width in self._low_rank)
        first, last = Gemm(1, hidden_size, direct), Gemm(1, self._outputs, hidden_size)
        return first, *(Gemm(1, rank, width) for rank, width in self._low_rank), last

    def vectors(self, hidden_size: int) -> int:
        """Returns the number of parameters outside of products."""
        return self.vectors_per_layer

    def saved(self, *, selective: bool) -> int:
        """Returns the bytes that a token saves from the input norm to the output projection: see `activation_bytes`."""
        norm_is_made_again = selective and KINDS[self.kind].is_dense
        features = sum(self._widths.values()) + self._outputs * (1 if norm_is_made_again else 2)
        return BF16 * (features + sum(rank for rank, _ in self._low_rank))

    def moved(self, hidden_size: int) -> Moved:
        """Returns the features that the gated norm reads and writes."""
        forward = 3 * self._outputs
        return Moved(forward, 5 * self._outputs, forward * KINDS[self.kind].is_dense)

    @property
    def _widths(self) -> dict[SectionKind, int]:
        """The features of each section that a head exchange sends; the output gate is none of them."""
        counts = {Per.GROUP: self.key_heads, Per.HEAD: self.heads}
        dims = {Dim.KEY: self.head_dim, Dim.VALUE: self.value_head_dim, Dim.ONE: 1}
        return {section: counts[section.per] * dims[section.dim] for section in KINDS[self.kind].sections}

    @property
    def _decay(self) -> int:
        """The features of a decay that has several features a head."""
        widths = self._widths.items()
        return sum(width for section, width in widths if section.exact and section.dim is not Dim.ONE)

    @property
    def _low_rank(self) -> list[tuple[int, int]]:
        """The rank and output features of each pair of low-rank projections."""
        pairs = ((self.decay_rank, self._decay), (self.gate_rank, self._outputs))
        return [(rank, width) for rank, width in pairs if rank]

    @property
    def _outputs(self) -> int:
        return self.heads * self.value_head_dim


def gated_delta_net(heads: int, key_heads: int, head_dim: int, value_head_dim: int, conv_width: int = 4) -> LinearMixer:
    """Returns the Gated DeltaNet layer of Qwen3-Next and Megatron: one input projection, a norm of one value head."""
    conv = (2 * key_heads * head_dim + heads * value_head_dim) * conv_width
    vectors = conv + 2 * heads + value_head_dim  # A_log and dt_bias a head, the output norm
    return LinearMixer("gdn", heads, key_heads, head_dim, value_head_dim, conv_width, vectors)


def kimi_delta_attention(
    heads: int, key_heads: int, head_dim: int, conv_width: int = 4, *, decay_rank: int, gate_rank: int | None
) -> LinearMixer:
    """Returns the Kimi Delta Attention layer of Kimi-Linear: two projections make the decay, one or two the gate."""
    conv = (2 * key_heads + heads) * head_dim * conv_width
    vectors = conv + heads + heads * head_dim + head_dim  # A_log a head, dt_bias a feature, the output norm
    ranks = {"decay_rank": decay_rank, "gate_rank": gate_rank}
    return LinearMixer("kda", heads, key_heads, head_dim, head_dim, conv_width, vectors, **ranks)


def mamba2(
    heads: int, groups: int, state: int, head_dim: int, conv_width: int = 4, *, conv_bias: bool = True
) -> LinearMixer:
    """Returns the Mamba-2 layer of mamba_ssm and Megatron: one input projection, a norm of all heads."""
    conv = (2 * groups * state + heads * head_dim) * (conv_width + conv_bias)
    vectors = conv + 3 * heads + heads * head_dim  # A_log, dt_bias and D a head, the output norm
    return LinearMixer("mamba", heads, groups, state, head_dim, conv_width, vectors)


Mixer = AttentionMixer | LinearMixer


@dataclass(frozen=True)
class MLP:
    """Two products with an activation between them, or a mixture of such experts.

    Attributes:
        intermediate_size: features between the products, of the dense MLP or of one expert.
        gated: True if the first product also makes a gate, as in SwiGLU.
        bias: True if both products, and a router, have biases.
        experts: number of experts in a mixture; 0 for a dense MLP.
        experts_per_token: number of experts to which a router sends a token.
        shared_size: intermediate size of all experts that every token takes; 0 for none.
        shared_gate: True if a number for each token scales the shared experts' output.
        router_bias: True if the router has a number for each expert that balances them.

    Raises:
        ArgumentError: sizes that do not fit each other.
    """

    intermediate_size: int
    gated: bool = True
    bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared_size: int = 0
    shared_gate: bool = False
    router_bias: bool = False

    def __post_init__(self) -> None:
        checked_integer("intermediate_size", self.intermediate_size, 1)
        checked_integer("experts", self.experts, 0)
        checked_integer("experts_per_token", self.experts_per_token, min(self.experts, 1), self.experts)
        checked_integer("shared_size", self.shared_size, 0)
        for name in ("gated", "bias", "shared_gate", "router_bias"):
            checked_flag(name, getattr(self, name))
        if self.shared_size and not self.experts:
            raise ArgumentError("shared_size", self.shared_size, "0 without experts")

    def gemms(self, hidden_size: int) -> tuple[Gemm, ...]:
        """Returns the products of one token."""
        first, *more = self.dense_gemms(hidden_size)
        return first, *self.routed_gemms(hidden_size), *more

    def routed_gemms(self, hidden_size: int) -> tuple[Gemm, ...]:
        """Returns the products of one token with its routed experts; none of a dense MLP."""
        return self._of_size(self.experts_per_token, self.intermediate_size, hidden_size) if self.experts else ()

    def dense_gemms(self, hidden_size: int) -> tuple[Gemm, ...]:
        """Returns the products that every token has: those of a dense MLP, or of router and shared experts."""
        if not self.experts:
            return self._of_size(1, self.intermediate_size, hidden_size)
        found = [Gemm(1, hidden_size, self.experts)]
        if self.shared_size:
            found += self._of_size(1, self.shared_size, hidden_size)
        return *found, *([Gemm(1, hidden_size, 1)] if self.shared_size and self.shared_gate else [])

    def vectors(self, hidden_size: int) -> int:
        """Returns the number of parameters that one token meets outside of products."""
        if not self.experts:
            return self._biases(self.intermediate_size, hidden_size)
        shared = self._biases(self.shared_size, hidden_size) if self.shared_size else 0
        routed = self.experts_per_token * self._biases(self.intermediate_size, hidden_size)
        return shared + routed + self.experts * (self.bias + self.router_bias)

    def expert(self, hidden_size: int) -> int:
        """Returns the number of parameters of one routed expert; 0 for a dense MLP."""
        if not self.experts:
            return 0
        weights = sum(gemm.multiply_adds for gemm in self._of_size(1, self.intermediate_size, hidden_size))
        return weights + self._biases(self.intermediate_size, hidden_size)

    def saved(self, hidden_size: int, *, selective: bool) -> int:
        """Returns the bytes that a token saves between the norm before the MLP and its end: see `activation_bytes`."""
        first = 2 if self.gated else 1  # times the intermediate size, for the activation's backward
        if not self.experts:
            return BF16 * (first + 1) * self.intermediate_size
        routed = hidden_size + (first + (not selective)) * self.intermediate_size
        shared = (first + 1) * self.shared_size
        return FP32 * self.experts + BF16 * (self.experts_per_token * routed + shared)

    def moved(self, hidden_size: int) -> Moved:
        """Returns the features that activations, a router's scores, shared experts' gate and biases read and write."""
        forward, backward = (3, 5) if self.gated else (2, 3)
        routed = self.intermediate_size * self.experts_per_token
        width = routed + self.shared_size if self.experts else self.intermediate_size
        scores = 4 * self.experts  # in fp32
        shared = hidden_size * self.shared_gate
        biases = max(self.experts_per_token, 1) * self._biases(self.intermediate_size, hidden_size)
        return Moved(
            forward * width + scores + 3 * shared, backward * width + scores + 5 * shared + biases, forward * routed
        )

    def _of_size(self, count: int, size: int, hidden_size: int) -> tuple[Gemm, Gemm]:
        return Gemm(count, hidden_size, size * (2 if self.gated else 1)), Gemm(count, size, hidden_size)

    def _biases(self, size: int, hidden_size: int) -> int:
        return (size * (2 if self.gated else 1) + hidden_size) * self.bias


@dataclass(frozen=True)
class Block:
    """A layer of the model: a mixer, an MLP, or one after the other, each with a norm before it.

    Attributes:
        mixer: attention or a linear layer.
        mlp: a dense MLP or a mixture of experts.
        post_norms: True if the outputs are normalised as well, as in Gemma.

    Raises:
        ArgumentError: neither a mixer nor an MLP, or something else in their places.
    """

    mixer: Mixer | None = None
    mlp: MLP | None = None
    post_norms: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.mixer, AttentionMixer | LinearMixer | None):
            raise ArgumentError("mixer", self.mixer, "an AttentionMixer, a LinearMixer or None")
        if not isinstance(self.mlp, MLP | None) or (self.mlp is None and self.mixer is None):
            raise ArgumentError("mlp", self.mlp, "an MLP" + (" or None" if self.mixer else ""))
        checked_flag("post_norms", self.post_norms)

    @property
    def parts(self) -> tuple[Mixer | MLP, ...]:
        """The mixer and the MLP, as far as the block has them."""
        return tuple(part for part in (self.mixer, self.mlp) if part is not None)

    def gemms(self, hidden_size: int) -> tuple[Gemm, ...]:
        """Returns the products of one token."""
        return tuple(itertools.chain.from_iterable(part.gemms(hidden_size) for part in self.parts))

    def vectors(self, hidden_size: int) -> int:
        """Returns the number of parameters that every token meets outside of products, norms included."""
        norms = len(self.parts) * hidden_size * (2 if self.post_norms else 1)
        return norms + sum(part.vectors(hidden_size) for part in self.parts)

    def parameters(self, hidden_size: int) -> tuple[int, int]:
        """Returns the number of parameters outside of routed experts, and of all routed experts."""
        met = sum(gemm.multiply_adds for gemm in self.gemms(hidden_size)) + self.vectors(hidden_size)
        if self.mlp is None or not self.mlp.experts:
            return met, 0
        expert = self.mlp.expert(hidden_size)
        return met - self.mlp.experts_per_token * expert, self.mlp.experts * expert

    def saved(self, hidden_size: int, recompute: str, *, fp8: bool = False) -> int:
        """Returns the bytes that one token's forward saves for backward: see `ModelSpec.activation_bytes`.

        Args:
            hidden_size: features of a hidden state.
            recompute: what backward computes again.
            fp8: True if products save their inputs in one byte an element, as Transformer Engine's do. An attention's
                output is then saved twice, for itself and for the product behind it.
        """
        check_recompute(recompute)
        if recompute == FULL:
            return BF16 * hidden_size
        if recompute == OPS:
            return BF16 * self._saved_by_ops(hidden_size)
        if fp8:
            return self.saved(hidden_size, recompute) - self._narrower(hidden_size, recompute)
        selective = recompute == SELECTIVE
        # A norm saves its input. Its output is saved as the input of the product behind it.
        norms = len(self.parts) * ((1 if selective else 2) + self.post_norms) * hidden_size
        mixer = self.mixer.saved(selective=selective) if self.mixer else 0
        return BF16 * norms + mixer + (self.mlp.saved(hidden_size, selective=selective) if self.mlp else 0)

    def moved(self, hidden_size: int) -> Moved:
        """Returns the features that norms, residual sums and the parts' own operations read and write."""
        parts = [part.moved(hidden_size) for part in self.parts]
        norms = len(self.parts) * hidden_size
        twice = norms * (2 if self.post_norms else 1)
        return Moved(
            2 * twice + 3 * norms + sum(part.forward for part in parts),
            3 * twice + 3 * norms + sum(part.backward for part in parts),
            2 * norms + sum(part.again for part in parts),
        )

    def repeated(self, hidden_size: int) -> tuple[Gemm, ...]:
        """Returns the products that "ops" computes again: every second one, as `ModelSpec.activation_bytes` says.

        Raises:
            ArgumentError: a block that is not attention, without latents, and a gated dense MLP.
        """
        mixer, mlp = self.mixer, self.mlp
        if not isinstance(mixer, AttentionMixer) or mixer.kv_rank or mlp is None or mlp.experts or not mlp.gated:
            allowed = "another word for blocks that are not attention without latents and a gated dense MLP"
            raise ArgumentError("recompute", OPS, allowed)
        query, *_, output = mixer.gemms(hidden_size)
        keys = mixer.kv_heads * mixer.head_dim
        return Gemm(1, query.in_features, keys), output, Gemm(1, hidden_size, mlp.intermediate_size)

    def _saved_by_ops(self, hidden_size: int) -> int:
        """Returns the features of the input and of the products that are not `repeated`: q, v, gate and down."""
        self.repeated(hidden_size)
        assert isinstance(self.mixer, AttentionMixer)
        assert self.mlp is not None
        values = self.mixer.kv_heads * self.mixer.value_head_dim
        return 2 * hidden_size + self.mixer.heads * self.mixer.head_dim + values + self.mlp.intermediate_size

    def _narrower(self, hidden_size: int, recompute: str) -> int:
        """Returns the bytes by which inputs of products in FP8 are smaller than in bf16."""
        is_kept = recompute != SELECTIVE
        found = hidden_size * len(self.parts) * is_kept
        if isinstance(self.mixer, AttentionMixer):
            found -= self.mixer.heads * self.mixer.value_head_dim
        if self.mlp is not None and self.mlp.experts:
            found += self.mlp.experts_per_token * (hidden_size + self.mlp.intermediate_size * is_kept)
            found += self.mlp.shared_size
        elif self.mlp is not None:
            found += self.mlp.intermediate_size
        return found


def _check_divides(argument: str, divisor: int, name: str, number: int) -> None:
    if number % divisor:
        raise ArgumentError(argument, divisor, f"a divisor of {name}, which is {number}")


def check_recompute(recompute: str) -> None:
    """Refuses an unknown kind of recomputation."""
    if recompute not in RECOMPUTATION:
        raise ArgumentError("recompute", recompute, " or ".join(RECOMPUTATION))
