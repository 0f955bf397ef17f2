"""Trains on ragged packed batches over several ranks, and proves that it equals training on each document alone.

python examples/attention_without_megatron.py                            # 4 ranks, threads of this process
torchrun --standalone --nproc-per-node 2 examples/attention_without_megatron.py       # 2 ranks, processes: NCCL or gloo
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import megatron_cp as cp
from megatron_cp.executor import RankGroup, in_torchrun, run_ranks, start_torchrun_rank

# The documents of each microbatch of each step. Any lengths work: nothing is padded.
STEPS = [[[701, 1, 300, 23], [13]], [[2, 509]], [[5, 3, 1], [64, 64]]]
VOCABULARY, HEADS, KV_HEADS, HEAD_DIM = 256, 8, 2, 8
WIDTH = HEADS * HEAD_DIM
SLOT = cp.AttentionSpec(HEADS, KV_HEADS, head_dim=HEAD_DIM)  # the one kind of layer
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A layer of attention with rotary positions, over rows `[t]` without a batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv, self.out = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM), nn.Linear(WIDTH, WIDTH)
        draw = torch.Generator().manual_seed(0)  # the same weights on every rank, also where ranks are threads
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=draw)

    def forward(self, tokens: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).unflatten(1, (-1, HEAD_DIM)).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        return self.head(x + self.out(attend(rotated(q, position_ids), rotated(k, position_ids), v).flatten(1)))


def rotated(x: Tensor, position_ids: Tensor) -> Tensor:
    """Rotates each row by its position in its document."""
    half = x.shape[-1] // 2
    angles = position_ids[:, None, None] * 100 ** -torch.linspace(0, 1, half, dtype=x.dtype, device=x.device)
    first, second = x.split(half, dim=-1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


def train_step(model: Model, packs: list[tuple[cp.Packing, Tensor]], group: RankGroup, device: str) -> float:
    """Computes a step's gradients on every rank. Returns its loss: the mean over all tokens of all microbatches."""
    batches = [
        cp.shard_batch(tokens, cp.Layout.balanced(packing, group.size), group, slots=[SLOT], device=device)
        for packing, tokens in packs
    ]
    num_tokens, loss = sum(batch.num_tokens for batch in batches), torch.zeros((), device=device)
    for batch in batches:
        attend = partial(cp.attention, plan=batch.plan(SLOT), group=group)
        logits = model(batch.tokens, batch.position_ids, attend)
        losses = F.cross_entropy(logits, batch.labels, reduction="none")  # [t], of this rank's rows
        share = cp.token_loss(losses, batch, group, num_tokens=num_tokens)  # the same number on every rank
        share.backward()
        loss = loss + share.detach()
    cp.reduce_gradients(model, group)
    return loss.item()


def main(group: RankGroup, device: str = "cpu") -> None:
    """Trains on one rank of the group, and compares every step with each document alone."""
    model, alone = (Model().double().to(device) for _ in range(2))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, alone)]
    random = torch.Generator().manual_seed(0)
    if group.rank == 0:
        packing = cp.Packing(STEPS[0][0])
        print(SLOT.plan(cp.Layout.balanced(packing, group.size)).explain(item_size=8))
    for number, microbatches in enumerate(STEPS):
        # As from a data loader, every rank reads whole packs, and keeps its own rows of them.
        packs = [
            (cp.Packing(lengths), torch.randint(VOCABULARY, (sum(lengths),), generator=random))
            for lengths in microbatches
        ]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss, expected = train_step(model, packs, group, device), each_document_alone(alone, packs, device)
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        errors = {
            "loss": abs(loss - expected),
            "gradients": max((a.grad - b.grad).abs().max().item() for a, b in pairs),
        }
        for name, error in errors.items():
            assert error < 1e-10, f"{name} of step {number} is off by {error}"
            if group.rank == 0:
                print(
                    f"step {number}, {name}: {group.size} ranks and each document alone differ by at most {error:.1e}"
                )
        for optimizer in optimizers:
            optimizer.step()


def each_document_alone(model: Model, packs: list[tuple[cp.Packing, Tensor]], device: str) -> float:
    """Computes the gradients of the same step in one process, with torch's own attention. Returns the loss."""
    losses = []
    for packing, tokens in packs:
        for start, end in packing.spans():
            document = tokens[start:end].to(device)
            logits = model(document, torch.arange(end - start, device=device), causal)
            losses.append(F.cross_entropy(logits[:-1], document[1:], reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item()


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes torch's attention of one document, `[t, heads, head_dim]`."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


if __name__ == "__main__":
    if in_torchrun():
        main(start_torchrun_rank(), "cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.destroy_process_group()
    else:
        run_ranks(main, 4)
