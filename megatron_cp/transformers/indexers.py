"""Indexers of transformers' sparse attention: their queries, keys and weights, by which queries choose keys.

The stock module returns the keys that it chose among this rank's own. Ours returns what `sparse_attention` needs to
choose among those of all ranks.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Class names of attention that chooses keys; and of indexers, each with the function by which it turns its queries and
# keys to their positions, and True if it turns their last features and not their first.
_SELECTING = (
    "AXK2Attention", "DeepseekV32Attention", "Dots3NoteTextAttention", "GlmMoeDsaAttention", "HYV4Attention",
    "MistralLarge4TextAttention",
)  # fmt: skip
_ROTATIONS = {
    "AXK2Indexer": ("apply_rotary_pos_emb", False),
    "DeepseekV32Indexer": ("apply_rotary_pos_emb", False),
    "Dots3NoteTextIndexer": ("apply_rotary_pos_emb_interleave", False),
    "GlmMoeDsaIndexer": ("apply_rotary_pos_emb_interleave", False),
    "HYV4Indexer": ("apply_rotary_pos_emb", True),
    "MistralLarge4TextIndexer": ("apply_rotary_pos_emb_interleave", False),
}


@dataclass
class IndexerRows:
    """The tensors of an indexer for this rank's rows, and the choice once attention has made it.

    Layers that share a choice are given the object of the layer that chose.
    """

    queries: Tensor
    keys: Tensor
    weights: Tensor
    chosen: Tensor | None = None


def selects_keys(module: Any) -> bool:
    """True if the module is attention whose queries choose keys, by an indexer of its own or of a layer before."""
    if not any(kind.__name__ in _SELECTING for kind in type(module).__mro__):
        return False
    return module.indexer is not None or bool(getattr(module, "skip_topk", False))


def is_indexer(module: nn.Module) -> bool:
    """True if the module is an indexer that is computed exactly here."""
    return _stock_class(module).__name__ in _ROTATIONS


@torch.no_grad()
def indexer_rows(module: Any, hidden: Tensor, *args: Any) -> IndexerRows:
    """Computes an indexer's tensors as its stock class does, for rows `[1, t, ...]`.

    Args:
        args: those of the stock class after `hidden`: the latents of queries, where queries are computed from them, and
            the rotary phases; then the mask, and the rows' positions.
    """
    kind = _stock_class(module)
    name, at_end = _ROTATIONS[kind.__name__]
    latent_queries, phases, *others = args if hasattr(module, "q_lora_rank") else (None, *args)
    if latent_queries is None:
        latent_queries = module.q_input_norm(hidden)
    queries = module.wq_b(latent_queries).unflatten(-1, (module.n_heads, module.head_dim))
    if hasattr(module, "softmax_scaling"):
        queries = module.softmax_scaling(queries, others[1], head_dim_first=False)
    keys = module.k_norm(module.wk(hidden).to(module.k_norm.weight.dtype)).to(hidden.dtype).unsqueeze(2)
    if getattr(module, "use_rope", True):
        rotate, size = getattr(sys.modules[kind.__module__], name), module.head_dim - module.qk_rope_head_dim
        sizes = [size, module.qk_rope_head_dim] if at_end else [module.qk_rope_head_dim, size]
        (q_parts, k_parts) = (list(rows.split(sizes, -1)) for rows in (queries, keys))
        place = int(at_end)
        q_parts[place], k_parts[place] = rotate(q_parts[place], k_parts[place], *phases, unsqueeze_dim=2)
        queries, keys = torch.cat(q_parts, -1), torch.cat(k_parts, -1)
    scale = module.n_heads**-0.5 * module.softmax_scale
    weights = module.weights_proj(hidden.to(module.weights_proj.weight.dtype))[0].float() * scale
    return IndexerRows(queries[0], keys[0].squeeze(1), weights)


def _stock_class(module: nn.Module) -> type:
    """Returns the module's class in transformers, also after it has been replaced by one of the same name."""
    return next((kind for kind in reversed(type(module).__mro__) if kind.__name__ in _ROTATIONS), type(module))
