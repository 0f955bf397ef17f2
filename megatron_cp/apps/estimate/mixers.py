"""`AttentionMixer` and `LinearMixer`: a layer's attention or linear layer as data. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.plan import KINDS, Dim, Per, SectionKind
from megatron_cp.planner import AttentionSpec, LinearSpec
from megatron_cp.softmax import checked_options

BF16, FP32 = 2, 4  # bytes


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
        softcap: limit of the scores; 0 for none.
        softmax_scale: factor of the scores; None for `head_dim ** -0.5`.
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
    softcap: float = 0.0
    softmax_scale: float | None = None
    kv_rank: int | None = None
    query_rank: int | None = None
    shared_key_dim: int = 0

    def __post_init__(self) -> None:
        self.slot()
        checked_options(self.head_dim, softmax_scale=self.softmax_scale, softcap=self.softcap)

    @property
    def layer(self) -> str:
        """The name of such a layer for `--layer`."""
        return "attention"

    @property
    def latent(self) -> tuple[int, int] | None:
        """The features of the shared key and of the latent, where latents could travel; else None."""
        return (self.shared_key_dim, self.kv_rank) if self.kv_rank and self.shared_key_dim else None

    def slot(self) -> AttentionSpec:
        """Returns the layer's specification, without the choice of a scheme."""
        return AttentionSpec(self.heads, self.kv_heads, self.head_dim, self.value_head_dim, self.mask)

    def weights(self, hidden_size: int) -> int:
        """Returns the number of weights of the projections."""
        queries = self._queries * 2 if self.output_gate else self._queries
        found = self._outputs * hidden_size
        found += self.query_rank * (hidden_size + queries) if self.query_rank else hidden_size * queries
        if not self.kv_rank:
            return found + hidden_size * (self._keys + self._values)
        own_keys = self.kv_heads * (self.head_dim - self.shared_key_dim)
        return found + hidden_size * (self.kv_rank + self.shared_key_dim) + self.kv_rank * (own_keys + self._values)

    def vectors(self, hidden_size: int) -> int:
        """Returns the number of parameters outside of products: norms, biases and sinks."""
        norms = self._latents or 2 * self.head_dim
        count = norms if self.qk_norm else 0
        count += self._queries + self._keys + self._values if self.bias else 0
        return count + (hidden_size if self.output_bias else 0) + (self.heads if self.sink else 0)

    def saved(self, *, selective: bool) -> int:
        """Returns the bytes that a token saves from the input norm to the output projection: see `Block.saved`."""
        features = self._queries + self._keys + self._values + self._latents
        features += (self._latents or self._queries + self._keys) if self.qk_norm else 0
        features += 2 * self._outputs if self.output_gate else 0
        return BF16 * features

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
        ArgumentError: sizes that do not fit each other.
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

    @property
    def layer(self) -> str:
        """The name of such a layer for `--layer`."""
        return self.kind

    def slot(self) -> LinearSpec:
        """Returns the layer's specification, without the choice of a mode."""
        sizes = (self.heads, self.key_heads, self.head_dim, self.value_head_dim, self.conv_width)
        return LinearSpec(self.kind, *sizes)

    def weights(self, hidden_size: int) -> int:
        """Returns the number of weights of the projections."""
        direct = sum(self._widths.values()) + 2 * self._outputs + sum(rank - width for rank, width in self._low_rank)
        return hidden_size * direct + sum(rank * width for rank, width in self._low_rank)

    def vectors(self, hidden_size: int) -> int:
        """Returns the number of parameters outside of products."""
        return self.vectors_per_layer

    def saved(self, *, selective: bool) -> int:
        """Returns the bytes that a token saves from the input norm to the output projection: see `Block.saved`."""
        norm_is_made_again = selective and KINDS[self.kind].is_dense
        features = sum(self._widths.values()) + self._outputs * (1 if norm_is_made_again else 2)
        return BF16 * (features + sum(rank for rank, _ in self._low_rank))

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
