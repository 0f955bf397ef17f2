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
from megatron_cp.apps.estimate.model_layers import NONE, Block
from megatron_cp.errors import checked_integer
from megatron_cp.plan import COLLECTIVE, Transport
from megatron_cp.planner import Slot, Tower, checked_search

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
        tower: the vision tower, which no number of the model counts; None without one.
        from_megatron: True if it was read from Megatron's flags, so that its layers are Megatron's.

    Raises:
        ArgumentError: no word, no block, or too many.

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
    tower: Tower | None = None
    from_megatron: bool = False

    def __post_init__(self) -> None:
        checked_integer("vocab_size", self.vocab_size, 1)
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
        search_seconds: float = 0.0,
    ) -> tuple[Slot, ...]:
        """Returns the slot of every mixer, in order, as `BatchPlan` takes them.

        Linear layers between two attentions are a run, even if MLPs are between them. Each has all of them in its
        `run`, and the model's hidden size, so that hidden states can be redistributed around them.

        Args:
            scheme, ulysses_degree: attention's.
            mode: the mode of linear layers.
            head_chunks, transport, codec: for attention and linear layers.
            search_seconds: attention's; see `plan_attention`.

        Raises:
            ArgumentError: a choice that does not exist, or a search in a model without attention.
        """
        both: dict[str, Any] = {"head_chunks": head_chunks, "transport": Transport.named(transport), "codec": codec}
        of_attention = {"scheme": scheme, "ulysses_degree": ulysses_degree, "search_seconds": search_seconds, **both}
        of_linear = {"mode": mode, **both}
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
        tables = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return sum(map(sum, self.block_parameters)) + self.hidden_size + tables

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

    @property
    def head_bytes(self) -> int:
        """The bytes that a token saves in the final norm and the loss: 2 h, and a probability of 4 bytes a word."""
        return 2 * BF16 * self.hidden_size + FP32 * self.vocab_size

    def recomputed_bytes(self, recompute: str, *, mlp_in_rows: bool = False) -> int:
        """Returns the bytes of one token that backward recomputes for one block at a time, at most."""
        sizes = (
            block.saved(self.hidden_size, NONE, mlp_in_rows=mlp_in_rows)
            - block.saved(self.hidden_size, recompute, mlp_in_rows=mlp_in_rows)
            for block in dict.fromkeys(self.blocks)
        )
        return max(sizes)
