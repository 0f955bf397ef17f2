"""Causal attention of a ragged packed batch over several ranks, and the proof that it equals each document alone.

python examples/attention_without_megatron.py                            # 4 ranks, threads of this process
torchrun --nproc-per-node 2 examples/attention_without_megatron.py       # 2 ranks, processes: NCCL or gloo
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import megatron_cp as cp
from megatron_cp.executor.groups import RankGroup
from megatron_cp.executor.launch import in_torchrun, run_ranks, start_torchrun_rank

LENGTHS = [701, 1, 300, 23]  # any lengths do: nothing is padded
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64


def main(group: RankGroup, device: str = "cpu") -> None:
    """What every rank runs."""
    packing = cp.Packing(LENGTHS)
    layout = cp.Layout.zigzag(packing, cp_size=group.size)  # who holds which tokens
    plan = cp.plan_attention(packing, layout, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    cp.check_agreement(plan, group)  # once for each new batch, outside the step
    if group.rank == 0:
        print(plan.explain(item_size=8))

    # A job would read only its own tokens; here every rank draws the whole batch, to have something to compare with.
    random = torch.Generator().manual_seed(0)
    q, k, v, gradient = (
        torch.randn(packing.total, heads, HEAD_DIM, dtype=torch.float64, generator=random).to(device)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    inputs = [layout.shard(x, group.rank).requires_grad_() for x in (q, k, v)]
    out = cp.attention(*inputs, plan, group)
    out.backward(layout.shard(gradient, group.rank))

    expected = each_document_alone(packing, q, k, v, gradient)
    for name, local, whole in zip(("out", "dq", "dk", "dv"), (out, *(x.grad for x in inputs)), expected, strict=True):
        error = (cp.gather(local.detach(), layout, group) - whole).abs().max().item()
        assert error < 1e-10, f"{name} is off by {error}"
        if group.rank == 0:
            print(f"{name:>3}: {group.size} ranks and each document alone differ by at most {error:.1e}")


def each_document_alone(packing: cp.Packing, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v, by torch's own attention."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    documents = []
    for start, end in packing.spans():
        document = (x[None, start:end].transpose(1, 2) for x in (q, k, v))
        documents.append(F.scaled_dot_product_attention(*document, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    out = torch.cat(documents)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), gradient)]


if __name__ == "__main__":
    if in_torchrun():
        main(start_torchrun_rank(), "cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.destroy_process_group()
    else:
        run_ranks(main, 4)
