"""`ModelSpec`: a whole model as data: its layers' slots, weight products, parameters and saved activations.

No torch in here. `model_presets.py` has the known models, `model_files.py` reads others. All numbers are for one token
and the whole model; the caller divides them for tensor, expert, pipeline and data parallelism.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_cp.apps.estimate.mixers import BF16, FP32, AttentionMixer, LinearMixer
from megatron_cp.apps.estimate.model_layers import NONE, Block, check_recompute
from megatron_cp.errors import ArgumentError, checked_flag, checked_integer
from megatron_cp.plan import COLLECTIVE, Transport
from megatron_cp.planner import Slot, checked_search

MAX_LAYERS = 10_000  # a mistyped number must not take all memory


@dataclass(frozen=True)
class ModelSpec:
    """A language model: an embedding, blocks, a norm and an output head.

    Attributes:
        name: the model's name in reports.
        hidden_size: features of a hidden state.
        vocab_size: rows of the embedding and of the output head, padding included.
        tied_embeddings: True if the output head has the embedding's weights.
        blocks: the layers, in order.
        source: the source of the numbers, and the parts of it that were not read.

    Raises:
        ArgumentError: impossible sizes, or blocks that are none.

    Example:
        >>> from megatron_cp.apps.estimate.mixers import AttentionMixer
        >>> from megatron_cp.apps.estimate.model_layers import MLP
        >>> attention = AttentionMixer(heads=8, kv_heads=2, head_dim=16, value_head_dim=16)
        >>> model = ModelSpec("small", 128, 1000, True, (Block(attention, MLP(256)),) * 4)
        >>> model.parameters, len(model.slots())
        (686208, 4)
    """

    name: str
    hidden_size: int
    vocab_size: int
    tied_embeddings: bool
    blocks: tuple[Block, ...]
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            if not isinstance(getattr(self, name), str):
                raise ArgumentError(name, getattr(self, name), "a string")
        checked_integer("hidden_size", self.hidden_size, 1)
        checked_integer("vocab_size", self.vocab_size, 1)
        checked_flag("tied_embeddings", self.tied_embeddings)
        if not isinstance(self.blocks, tuple) or not all(isinstance(block, Block) for block in self.blocks):
            raise ArgumentError("blocks", self.blocks, "a tuple of Block")
        checked_integer("blocks", len(self.blocks), 1, MAX_LAYERS)

    def with_mask(self, mask: str) -> ModelSpec:
        """Returns the model with another mask in every layer of softmax attention.

        Args:
            mask: a spelling of `Mask.named`, such as "causal" or "strided".

        Raises:
            ArgumentError: a mask that does not exist.
        """
        mixers = {
            mixer: replace(mixer, mask=mask)
            for mixer in {block.mixer for block in self.blocks}
            if isinstance(mixer, AttentionMixer)
        }
        blocks = tuple(
            replace(block, mixer=mixers[block.mixer]) if isinstance(block.mixer, AttentionMixer) else block
            for block in self.blocks
        )
        return replace(self, blocks=blocks)

    # -- layers under context parallelism ------------------------------------------------------------------------------

    def slots(
        self,
        *,
        scheme: str = "auto",
        ulysses_degree: int | None = None,
        mode: str = "auto",
        head_chunks: int | None = None,
        transport: Transport | str = COLLECTIVE,
        codec: str = "none",
        item_size: int = 2,
        search_seconds: float = 0.0,
    ) -> tuple[Slot, ...]:
        """Returns the slot of every mixer, in order, as `BatchPlan` takes them.

        Linear layers between two attentions are a run, even if MLPs are between them. Each has all of them in its
        `run`, and the model's hidden size, so that hidden states can be redistributed around them.

        Args:
            scheme, ulysses_degree: attention's.
            mode: the mode of linear layers.
            head_chunks, transport, codec: for attention and linear layers.
            item_size: bytes of an activation's element, for predictions.
            search_seconds: attention's; see `plan_attention`.

        Raises:
            ArgumentError: a choice that does not exist, or a search in a model without attention.
        """
        both: dict[str, Any] = {"head_chunks": head_chunks, "transport": Transport.named(transport), "codec": codec}
        of_attention = {"scheme": scheme, "ulysses_degree": ulysses_degree, "search_seconds": search_seconds, **both}
        of_linear = {"mode": mode, "item_size": item_size, **both}
        mixers = [block.mixer for block in self.blocks if block.mixer is not None]
        attends = any(isinstance(mixer, AttentionMixer) for mixer in mixers)
        checked_search(search_seconds, [scheme] * attends)
        alone = {
            mixer: replace(mixer.slot(), **(of_linear if isinstance(mixer, LinearMixer) else of_attention))
            for mixer in dict.fromkeys(mixers)
        }
        found: list[Slot] = []
        for is_linear, group in itertools.groupby(mixers, lambda mixer: isinstance(mixer, LinearMixer)):
            members = [alone[mixer] for mixer in group]
            run: dict[str, Any] = {"run": tuple(members), "hidden_size": self.hidden_size} if is_linear else {}
            made = {slot: replace(slot, **run) if run else slot for slot in dict.fromkeys(members)}
            found += [made[slot] for slot in members]
        return tuple(found)

    # -- parameters ----------------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> int:
        """The number of all parameters. Biases of norms and learned positions are not counted."""
        mixtures = (block.mlp for block in self.blocks if block.mlp)
        resting = sum((mlp.experts - mlp.experts_per_token) * mlp.expert(self.hidden_size) for mlp in mixtures)
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        return self.active_parameters + resting + embedding

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The number of the first block that equals each block, which is cheaper to compare than blocks are."""
        first = dict(zip(reversed(self.blocks), reversed(range(len(self.blocks))), strict=True))
        return tuple(first[block] for block in self.blocks)

    @cached_property
    def block_parameters(self) -> tuple[tuple[int, int], ...]:
        """The number of parameters of each block: outside of routed experts, and of all its experts."""
        known = {block: block.parameters(self.hidden_size) for block in dict.fromkeys(self.blocks)}
        return tuple(known[block] for block in self.blocks)

    @property
    def active_parameters(self) -> int:
        """The number of parameters that one token meets: its own experts, the embedding only as a tied output head."""
        blocks = sum(
            times * (block.weights(self.hidden_size) + block.vectors(self.hidden_size))
            for block, times in Counter(self.blocks).items()
        )
        return blocks + self.hidden_size + self.hidden_size * self.vocab_size

    # -- activations ---------------------------------------------------------------------------------------------------

    def activation_bytes(self, recompute: str = "none", *, output_head: bool = True) -> int:
        """Returns the bytes that one token's forward saves in bf16, without those that the mixing operations save.

        An attention's output and log-sum-exp, and what a linear layer's convolution and recurrence save with its
        output, depend on the plan: see `memory.py`. Their inputs are counted here. In features of two bytes, with
        `h` hidden size, `q k v` features of all query, key and value heads, `o` those of the output (heads times
        value_head_dim), `i` intermediate size, `s` that of the shared experts, `e` experts per token:

            each norm            h, and h for its output, which projections read; Gemma's norms of outputs h more
            attention            q + k + v; of heads that are normalised q + k more; with an output gate 2 o more
              latent             the rank of each latent more; twice, where latents are normalised
            linear layer         its sections as they are sent, and 2 o: the output gate, and the gated norm's output
              low rank           each rank more
            MLP                  3 i, gated; 2 i otherwise
            mixture of experts   e (h + 3 i) + 3 s, gated; e (h + 2 i) + 2 s otherwise; and a score of 4 bytes an expert
            output head          2 h, and a probability of 4 bytes a word

        With "ops" (torchtitan's selective checkpoints: attention's output and every second product's are saved)
        a dense block saves 2 h + q + v + i.

        Residual sums, rotary embeddings and dropout of probability 0 save nothing. A mixture is that of Megatron, which
        scales an expert's activation and not its output.

        Args:
            recompute: "none"; "selective" recomputes in backward what costs no product, as Megatron does with
                `--recompute-granularity selective --recompute-modules core_attn layernorm moe_act gdn_norm_out`:
                outputs of norms before projections (h each), activations of routed experts (e i), gated norms of gdn
                and kda (o); "full" recomputes all of a block but its input: h a block;
                "ops" recomputes keys, output projection and up projection, and all that is no product.
            output_head: True counts the final norm and the loss over the vocabulary.

        Raises:
            ArgumentError: another word for `recompute`.
        """
        check_recompute(recompute)
        blocks = sum(times * block.saved(self.hidden_size, recompute) for block, times in Counter(self.blocks).items())
        return blocks + (2 * BF16 * self.hidden_size + FP32 * self.vocab_size if output_head else 0)

    def recomputed_bytes(self, recompute: str = "none") -> int:
        """Returns the bytes of one token that backward recomputes for one block at a time, at most.

        They come on top of `activation_bytes`.

        Raises:
            ArgumentError: another word for `recompute`.
        """
        check_recompute(recompute)
        sizes = (
            block.saved(self.hidden_size, NONE) - block.saved(self.hidden_size, recompute)
            for block in dict.fromkeys(self.blocks)
        )
        return max(sizes)
