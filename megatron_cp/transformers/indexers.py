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
# keys to their positions.
_SELECTING = ("DeepseekV32Attention", "GlmMoeDsaAttention")
_ROTATIONS = {
    "DeepseekV32Indexer": "apply_rotary_pos_emb",
    "GlmMoeDsaIndexer": "apply_rotary_pos_emb_interleave",
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


def selects_keys(module: nn.Module) -> bool:
    """True if the module is attention whose queries choose keys, by an indexer of its own or of a layer before."""
    return any(kind.__name__ in _SELECTING for kind in type(module).__mro__)


def is_indexer(module: nn.Module) -> bool:
    """True if the module is an indexer that is computed exactly here."""
    return _rotation(module) is not None


@torch.no_grad()
def indexer_rows(module: Any, hidden: Tensor, latent_queries: Tensor, phases: tuple[Tensor, Tensor]) -> IndexerRows:
    """Computes an indexer's tensors as its stock class does, for rows `[1, t, ...]`."""
    name = _rotation(module)
    assert name is not None
    rotary, scale = module.qk_rope_head_dim, module.n_heads**-0.5 * module.softmax_scale
    queries = module.wq_b(latent_queries).unflatten(-1, (module.n_heads, module.head_dim))
    keys = module.k_norm(module.wk(hidden)).unsqueeze(2)
    rotate = getattr(sys.modules[_stock_class(module).__module__], name)
    turned = rotate(queries[..., :rotary], keys[..., :rotary], *phases, unsqueeze_dim=2)
    queries, keys = (torch.cat([a, b[..., rotary:]], -1)[0] for a, b in zip(turned, (queries, keys), strict=True))
    weights = module.weights_proj(hidden.to(module.weights_proj.weight.dtype))[0].float() * scale
    return IndexerRows(queries, keys.squeeze(1), weights)


def _rotation(module: nn.Module) -> str | None:
    return _ROTATIONS.get(_stock_class(module).__name__)


def _stock_class(module: nn.Module) -> type:
    """Returns the module's class in transformers, also after it has been replaced by one of the same name."""
    return next((kind for kind in reversed(type(module).__mro__) if kind.__name__ in _ROTATIONS), type(module))
