"""`latent_attention`: multi-latent attention whose latents travel, and are expanded to keys and values on arrival, or
not at all.

DeepSeek-V2 (arXiv 2405.04434) projects a token to one latent, from which an up-projection makes the keys and values of
all heads, and to one rotary key that all heads share. The two are many times smaller than what they are expanded to:
576 numbers where 128 heads of 192 and 128 features have 40,960.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_cp.errors import ArgumentError
from megatron_cp.executor.arguments import check_plan, check_tensor
from megatron_cp.executor.autocast import lowered
from megatron_cp.executor.groups import Group
from megatron_cp.executor.no_compile import no_compile
from megatron_cp.plan.plan import Plan
from megatron_cp.softmax.attention import refuse_selection
from megatron_cp.softmax.expansion import of_tokens
from megatron_cp.softmax.kernels import AttentionKernel
from megatron_cp.softmax.on_rank import AttentionOnRank


@no_compile
def latent_attention(
    q: Tensor,
    latent: Tensor,
    shared_key: Tensor,
    up: Tensor,
    plan: Plan,
    group: Group | None = None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    kernel: str | AttentionKernel = "auto",
) -> Tensor:
    """Computes multi-latent attention within each document, over the ranks of `group`; differentiable.

    It is `attention` of keys `[up's first features of the latent, shared_key]` and values `up's last features of the
    latent`, by the plan's `latent_mode`:

        expand      sends latents and shared keys, in every scheme and in both directions, and expands them where they
                    are used, once more in backward. A rank so expands all keys that its queries see.
        absorb      sends the same, multiplies own queries by the keys' part of `up`, and own results by the values':
                    attention of one key head of r + shared features.
        heads       expands own latents, and sends keys and values.

    Args:
        q: `[t, heads, head_dim]`, this rank's rows in the plan's layout, whose last features meet the shared key.
        latent: `[s, r]`, this rank's latents in the keys' layout, after their norm.
        shared_key: `[s, shared]`, the rotary keys, after their phases.
        up: `[heads, head_dim - shared + value_head_dim, r]`, the up-projection's weight, the same on every rank. Its
            gradient is this rank's share, to be summed over ranks, as any parameter's.
        plan: from `plan_attention(..., latent=(shared, r))`.
        group, softmax_scale, softcap, sink, dropout, seed, kernel: see `attention`.

    Returns:
        `[t, heads, value_head_dim]`, zero in pad rows and for queries that see no key.

    Raises:
        ArgumentError: tensors, group or kernel that do not fit the plan. Raised before anything is sent.

    Example:
        >>> packing = Packing([3, 1])
        >>> layout = Layout.contiguous(packing, cp_size=1)
        >>> plan = plan_attention(packing, layout, heads=2, head_dim=6, value_head_dim=4, latent=(2, 8))
        >>> q, latent, shared_key = torch.ones(4, 2, 6), torch.ones(4, 8), torch.ones(4, 2)
        >>> latent_attention(q, latent, shared_key, torch.ones(2, 4 + 4, 8), plan).shape
        torch.Size([4, 2, 4])
    """
    check_plan(plan, "attention", "plan_attention")
    refuse_selection(plan)
    if plan.attend is None or plan.attend.latent is None:
        raise ArgumentError("plan", "a plan of keys and values", "one of latents", "Plan with latent=(shared, rank).")
    options = {"softmax_scale": softmax_scale, "softcap": softcap, "dropout": dropout, "seed": seed}
    q, latent, shared_key, up = lowered(q, latent, shared_key, up)
    layer = AttentionOnRank(plan, group, q, sink, kernel, options)
    shared, rank, made_size, mode = plan.attend.latent
    block, own_size = plan.sections.blocks[0], plan.sections.blocks[0].head_dim - shared
    rows, key_rows = (int(each.row_counts[layer.ranks.rank]) for each in (plan.layout, plan.kv_layout))
    check_tensor("q", q, (rows, *layer.batch, block.num_heads, block.head_dim), like=q, layout=plan.layout)
    for name, tensor, size in (("latent", latent, rank), ("shared_key", shared_key, shared)):
        wanted = (key_rows, *layer.batch, size)
        check_tensor(name, tensor, wanted, like=q, same_dtype=True, layout=plan.kv_layout)
    check_tensor("up", up, (block.num_heads, made_size, rank), like=q, same_dtype=True)
    key, value = shared_key.unsqueeze(-2), latent.unsqueeze(-2)  # as they travel
    if mode == "heads":
        tokens = int(plan.kv_layout.token_counts[layer.ranks.rank])
        made = of_tokens(lambda x: (x @ up.flatten(0, 1).T).unflatten(-1, up.shape[:2]), latent, tokens)
        key = torch.cat([made[..., :own_size], key.expand(*made.shape[:-1], shared)], -1)
        value = made[..., own_size:]
    comm = layer.agree("latent_attention", q, key, value, up)
    return layer.run(comm, layer.first_shapes([q, key, value]), up=up if plan.attend.latent.travels else None)
