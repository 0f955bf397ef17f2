"""`Block`: a layer of a model as data, with its mixer (attention or a linear layer) and its MLP. No torch in here."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from megatron_cp.apps.estimate.mixers import BF16, FP32, AttentionMixer, Gemm, LinearMixer, Mixer, Moved
from megatron_cp.errors import ArgumentError, checked_flag, checked_integer

RECOMPUTATION = NONE, SELECTIVE, FULL, OPS = "none", "selective", "full", "ops"


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
        return *self.score_gemms(hidden_size), *self.routed_gemms(hidden_size), *self.dense_gemms(hidden_size)

    def score_gemms(self, hidden_size: int) -> tuple[Gemm, ...]:
        """Returns the products of the router and of the shared experts' gate, which are in bf16 in an FP8 job too."""
        gates = [self.experts] * bool(self.experts) + [1] * bool(self.shared_size and self.shared_gate)
        return tuple(Gemm(1, hidden_size, columns) for columns in gates)

    def routed_gemms(self, hidden_size: int) -> tuple[Gemm, ...]:
        """Returns the products of one token with its routed experts; none of a dense MLP."""
        return self._of_size(self.experts_per_token, self.intermediate_size, hidden_size) if self.experts else ()

    def dense_gemms(self, hidden_size: int) -> tuple[Gemm, ...]:
        """Returns the products that every token has: those of a dense MLP, or of shared experts."""
        size = self.shared_size if self.experts else self.intermediate_size
        return self._of_size(1, size, hidden_size) if size else ()

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
            ArgumentError: a block that is not attention, without latents or an output gate, and a gated dense MLP.
        """
        mixer, mlp = self.mixer, self.mlp
        is_dense = mlp is not None and mlp.gated and not mlp.experts
        is_plain = isinstance(mixer, AttentionMixer) and not (mixer.kv_rank or mixer.query_rank or mixer.output_gate)
        if not (is_dense and is_plain):
            remedy = "ops is known for attention without latents or an output gate, and a gated dense MLP."
            raise ArgumentError("recompute", OPS, "none or selective or full with these layers", remedy)
        assert isinstance(mixer, AttentionMixer)
        assert mlp is not None
        query, output = mixer.gemms(hidden_size)
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
        # A norm's output is the input of products behind it, but a router saves it in bf16.
        found = hidden_size * sum(not (isinstance(part, MLP) and part.experts) for part in self.parts) * is_kept
        if isinstance(self.mixer, AttentionMixer):
            found -= self.mixer.heads * self.mixer.value_head_dim
        if self.mlp is not None and self.mlp.experts:
            found += self.mlp.experts_per_token * (hidden_size + self.mlp.intermediate_size * is_kept)
            found += self.mlp.shared_size
        elif self.mlp is not None:
            found += self.mlp.intermediate_size
        return found


def check_recompute(recompute: str) -> None:
    """Refuses an unknown kind of recomputation."""
    if recompute not in RECOMPUTATION:
        raise ArgumentError("recompute", recompute, " or ".join(RECOMPUTATION))
