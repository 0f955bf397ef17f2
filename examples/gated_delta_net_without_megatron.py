"""Runs Gated DeltaNet on a ragged packed batch over several ranks, and proves that it equals each document alone.

python examples/gated_delta_net_without_megatron.py                            # 4 ranks, threads of this process
torchrun --standalone --nproc-per-node 2 examples/gated_delta_net_without_megatron.py  # 2 processes: NCCL or gloo
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import megatron_cp as cp
from megatron_cp.executor import RankGroup, in_torchrun, run_ranks, start_torchrun_rank

LENGTHS = [701, 1, 300, 23]  # any lengths work: nothing is padded
HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM, TAPS = 8, 4, 16, 32, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM  # of q, k and v
SHAPE = {"heads": HEADS, "key_heads": KEY_HEADS, "head_dim": KEY_DIM, "value_head_dim": VALUE_DIM}
INPUTS = {"qkv": (CHANNELS,), "beta": (HEADS,), "alpha": (HEADS,), "z": (HEADS, VALUE_DIM)}  # for each token
WEIGHTS = {"conv": (CHANNELS, TAPS), "A_log": (HEADS,), "dt_bias": (HEADS,)}


def mixer(inputs: list[Tensor], weights: list[Tensor], plan: cp.Plan, group: RankGroup | None = None) -> Tensor:
    """Runs the mixer with one exchange in and one out. Norm and output gate act on own tokens, so z is never sent."""
    *sent, z = inputs
    out = cp.gated_delta_net(*sent, plan, group, **dict(zip(WEIGHTS, weights, strict=True)))
    return F.rms_norm(out, [VALUE_DIM]) * F.silu(z)


def main(group: RankGroup, device: str = "cpu") -> None:
    """Runs the mixer on one rank of the group, and compares its output and gradients with each document alone."""
    packing = cp.Packing(LENGTHS)
    layout = cp.Layout.contiguous(packing, cp_size=group.size)  # who holds which tokens
    plan = cp.plan_linear(packing, layout, kind="gdn", **SHAPE)
    cp.check_agreement(plan, group)  # once for each new batch, outside the step
    if group.rank == 0:
        print(plan.explain(item_size=8))

    # A job would read only its own tokens; here every rank draws the whole batch, to have something to compare with.
    random = torch.Generator().manual_seed(0)
    shapes = [*((packing.total, *shape) for shape in INPUTS.values()), *WEIGHTS.values(), (packing.total, *INPUTS["z"])]
    drawn = [torch.randn(*shape, dtype=torch.float64, generator=random).to(device) for shape in shapes]
    inputs, weights, gradient = drawn[: len(INPUTS)], drawn[len(INPUTS) : -1], drawn[-1]

    local = [layout.shard(x, group.rank).requires_grad_() for x in inputs]
    shared = [weight.clone().requires_grad_() for weight in weights]
    out = mixer(local, shared, plan, group)
    out.backward(layout.shard(gradient, group.rank))

    found = [cp.gather(x, layout, group) for x in (out.detach(), *(x.grad for x in local))]
    cp.reduce_gradients(shared, group)  # each rank had its tokens' share of the weights' gradients
    found += [weight.grad for weight in shared]
    expected = each_document_alone(packing, inputs, weights, gradient)
    for name, ours, theirs in zip(("out", *INPUTS, *WEIGHTS), found, expected, strict=True):
        error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        assert error < 1e-10, f"{name} is off by {error}"
        if group.rank == 0:
            what = name if name == "out" else f"gradient of {name}"
            print(f"{what:>19}: {group.size} ranks and each document alone differ by at most {error:.1e}")


def each_document_alone(
    packing: cp.Packing, inputs: list[Tensor], weights: list[Tensor], gradient: Tensor
) -> list[Tensor]:
    """Returns the output and all gradients on one rank, computed one document after another."""
    leaves = [x.clone().requires_grad_() for x in (*inputs, *weights)]
    documents = []
    for start, end in packing.spans():
        alone = cp.Packing([end - start])
        plan = cp.plan_linear(alone, cp.Layout.contiguous(alone, cp_size=1), kind="gdn", **SHAPE)
        documents.append(mixer([x[start:end] for x in leaves[: len(inputs)]], leaves[len(inputs) :], plan))
    out = torch.cat(documents)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


if __name__ == "__main__":
    if in_torchrun():
        main(start_torchrun_rank(), "cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.destroy_process_group()
    else:
        run_ranks(main, 4)
