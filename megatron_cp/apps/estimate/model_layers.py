"""`Block`: a layer of a model as data, with its mixer (attention or a linear layer) and its MLP. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_cp.apps.estimate.mixers import BF16, FP32, AttentionMixer, Mixer
from megatron_cp.errors import ArgumentError, checked_integer

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
        checked_integer("experts_per_token", self.experts_per_token, min(self.experts, 1), self.experts)

    def weights(self, hidden_size: int) -> int:
        """Returns the number of weights that a token meets: its experts, the shared ones, and the router's."""
        if not self.experts:
            return self._products(self.intermediate_size, hidden_size)
        routed = self.experts_per_token * self._products(self.intermediate_size, hidden_size)
        scores = hidden_size * (self.experts + (1 if self.shared_size and self.shared_gate else 0))
        return routed + scores + self._products(self.shared_size, hidden_size)

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
        return self._products(self.intermediate_size, hidden_size) + self._biases(self.intermediate_size, hidden_size)

    def saved(self, hidden_size: int, *, selective: bool, in_rows: bool = False) -> int:
        """Returns the bytes that a token saves between the norm before the MLP and its end: see `Block.saved`."""
        if in_rows:  # its input, which is the norm's output
            return BF16 * hidden_size if selective else 0
        first = self._first  # for the activation's backward
        if not self.experts:
            return BF16 * (first + 1) * self.intermediate_size
        routed = hidden_size + (first + (not selective)) * self.intermediate_size
        shared = (first + 1) * self.shared_size
        return FP32 * self.experts + BF16 * (self.experts_per_token * routed + shared)

    @property
    def gradient_bytes(self) -> int:
        """The bytes of a token's gradients, of the first product, that backward makes beside what is saved."""
        return BF16 * self._first * max(self.experts_per_token, 1) * self.intermediate_size

    @property
    def _first(self) -> int:
        """The features of the first product, in intermediate sizes."""
        return 2 if self.gated else 1

    def _products(self, size: int, hidden_size: int) -> int:
        return hidden_size * size * (3 if self.gated else 2)

    def _biases(self, size: int, hidden_size: int) -> int:
        return (size * (2 if self.gated else 1) + hidden_size) * self.bias


@dataclass(frozen=True)
class Block:
    """A layer of the model: a mixer, an MLP, or one after the other, each with a norm before it.

    Attributes:
        mixer: attention or a linear layer.
        mlp: a dense MLP or a mixture of experts.
        post_norms: True if the outputs are normalised as well, as in Gemma.
    """

    mixer: Mixer | None = None
    mlp: MLP | None = None
    post_norms: bool = False

    @property
    def parts(self) -> tuple[Mixer | MLP, ...]:
        """The mixer and the MLP, as far as the block has them."""
        return tuple(part for part in (self.mixer, self.mlp) if part is not None)

    def weights(self, hidden_size: int) -> int:
        """Returns the number of weights that one token is multiplied with."""
        return sum(part.weights(hidden_size) for part in self.parts)

    def vectors(self, hidden_size: int) -> int:
        """Returns the number of parameters that every token meets outside of products, norms included."""
        norms = len(self.parts) * hidden_size * (2 if self.post_norms else 1)
        return norms + sum(part.vectors(hidden_size) for part in self.parts)

    def parameters(self, hidden_size: int) -> tuple[int, int]:
        """Returns the number of parameters outside of routed experts, and of all routed experts."""
        met = self.weights(hidden_size) + self.vectors(hidden_size)
        if self.mlp is None or not self.mlp.experts:
            return met, 0
        expert = self.mlp.expert(hidden_size)
        return met - self.mlp.experts_per_token * expert, self.mlp.experts * expert

    def saved(self, hidden_size: int, recompute: str, *, mlp_in_rows: bool = False) -> int:
        """Returns the bytes that one token's forward saves in bf16, without those that the mixing operations save.

        An attention's output and log-sum-exp, and what a linear layer's convolution and recurrence save with its
        output, depend on the plan: see `job_memory.py`. Their inputs are counted here. In features of two bytes, with
        `h` hidden size, `q k v` features of all query, key and value heads, `o` those of the output (heads times
        value_head_dim), `i` intermediate size, `s` that of the shared experts, `e` experts per token:

            each norm            h, and h for its output, which projections read; Gemma's norms of outputs h more
            attention            q + k + v; of heads that are normalised q + k more; with an output gate 2 o more
              latent             the rank of each latent more; twice, where latents are normalised
            linear layer         its sections as they are sent, and 2 o: the output gate, and the gated norm's output
              low rank           each rank more
            MLP                  3 i, gated; 2 i otherwise
            mixture of experts   e (h + 3 i) + 3 s, gated; e (h + 2 i) + 2 s otherwise; and a score of 4 bytes an expert

        With "ops" (torchtitan's selective checkpoints: attention's output and every second product's are saved)
        a dense block saves 2 h + q + v + i.

        Residual sums, rotary embeddings and dropout of probability 0 save nothing. A mixture is that of Megatron, which
        scales an expert's activation and not its output.

        Args:
            hidden_size: features of a hidden state.
            recompute: "none"; "selective" recomputes in backward what costs no product, as Megatron does with
                `--recompute-granularity selective --recompute-modules core_attn layernorm moe_act gdn_norm_out`:
                outputs of norms before projections (h each), activations of routed experts (e i), gated norms of gdn
                and kda (o); "full" recomputes all of a block but its input, h; "ops" recomputes keys, output projection
                and up projection, and all that is no product.
            mlp_in_rows: True if the MLP runs on a few rows at a time, and saves only its input, h.
        """
        if recompute == FULL:
            return BF16 * hidden_size
        if recompute == OPS:
            return BF16 * self._saved_by_ops(hidden_size)
        selective = recompute == SELECTIVE
        # A norm saves its input. Its output is saved as the input of the product behind it.
        norms = len(self.parts) * ((1 if selective else 2) + self.post_norms) * hidden_size
        mixer = self.mixer.saved(selective=selective) if self.mixer else 0
        return BF16 * norms + mixer + self._saved_by_mlp(hidden_size, selective, mlp_in_rows)

    def _saved_by_mlp(self, hidden_size: int, selective: bool, in_rows: bool) -> int:
        return self.mlp.saved(hidden_size, selective=selective, in_rows=in_rows) if self.mlp else 0

    def _saved_by_ops(self, hidden_size: int) -> int:
        """Returns the features of the input and of the products that "ops" saves: q, v, gate and down.

        Raises:
            ArgumentError: a block that is not attention, without latents or an output gate, and a gated dense MLP.
        """
        mixer, mlp = self.mixer, self.mlp
        is_dense = mlp is not None and mlp.gated and not mlp.experts
        is_plain = isinstance(mixer, AttentionMixer) and not (mixer.kv_rank or mixer.query_rank or mixer.output_gate)
        if not (is_dense and is_plain):
            remedy = (
                "ops is known only for attention without latents and without an output gate, and for gated dense MLPs."
            )
            raise ArgumentError("recompute", OPS, "none or selective or full with these layers", remedy)
        assert isinstance(mixer, AttentionMixer)
        assert mlp is not None
        values = mixer.kv_heads * mixer.value_head_dim
        return 2 * hidden_size + mixer.heads * mixer.head_dim + values + mlp.intermediate_size
