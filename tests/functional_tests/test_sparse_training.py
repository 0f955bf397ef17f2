"""Training of a small model whose attention chooses keys: over ranks its losses are those of one rank."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks

HIDDEN, HEADS, OWN, SHARED, VALUE, RANK, VOCABULARY = 24, 3, 6, 4, 6, 12, 32
SLOT = cp.AttentionSpec(
    HEADS, HEADS, OWN + SHARED, VALUE, scheme="exact", latent=(SHARED, RANK), topk=8, indexer=(2, 8)
)  # fmt: skip


class Layer(nn.Module):
    """Latent attention to the keys that an indexer chooses, with the indexer's loss, and a feed-forward layer."""

    def __init__(self):
        super().__init__()
        sizes = {
            "q": HEADS * (OWN + SHARED), "latent": RANK, "shared": SHARED, "index_q": 16, "index_k": 8,
            "index_weights": 2,
        }  # fmt: skip
        self.projections = nn.ModuleDict({name: nn.Linear(HIDDEN, size, bias=False) for name, size in sizes.items()})
        self.up = nn.Parameter(torch.randn(HEADS, OWN + VALUE, RANK) * RANK**-0.5)
        self.out = nn.Linear(HEADS * VALUE, HIDDEN, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.wide, self.narrow = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden, batch, group):
        x = self.norms[0](hidden)
        rows = {name: project(x if name[:5] != "index" else x.detach()) for name, project in self.projections.items()}
        q, index_q = rows["q"].unflatten(1, (HEADS, -1)), rows["index_q"].unflatten(1, (2, -1))
        index = {"index_q": index_q, "index_k": rows["index_k"], "index_weights": rows["index_weights"]}
        found = cp.sparse_attention(
            q, rows["shared"], rows["latent"], batch.plan(SLOT), group, up=self.up, **index, index_loss="sparse"
        )
        hidden = hidden + self.out(found.out.flatten(1))
        return hidden + self.narrow(F.silu(self.wide(self.norms[1](hidden)))), found.index_loss


def built():
    torch.manual_seed(0)
    modules = [nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(256, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)]
    return nn.ModuleList([*modules, Layer(), Layer()]).double()


def trained(group, model, steps, layout):
    """Returns the losses of the model and of its indexers, step by step."""
    model = copy.deepcopy(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    random = torch.Generator().manual_seed(1)
    for step in range(steps):
        lengths = torch.randint(1, 60, (5,), generator=random).tolist()
        tokens = torch.randint(VOCABULARY, (sum(lengths),), generator=random).sort().values  # which one can learn
        own = getattr(cp.Layout, layout)(cp.Packing(lengths), group.size)
        batch = cp.shard_batch(tokens, own, group, slots=[SLOT], seed=step)
        hidden, of_indexers = model[0](batch.tokens) + model[1](batch.position_ids), []
        for layer in model[3:]:
            hidden, loss = layer(hidden, batch, group)
            of_indexers.append(loss)
        loss = cp.token_loss(F.cross_entropy(model[2](hidden), batch.labels, reduction="none"), batch, group)
        index_loss = cp.token_loss(torch.stack(of_indexers, 1).sum(1), batch, group)
        (loss + 0.1 * index_loss).backward()
        cp.reduce_gradients(model, group)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), index_loss.item()))
    return torch.tensor(losses, dtype=torch.float64)


def differences(size, steps, layout):
    """Returns the losses of one rank, and the most by which those of several ranks differ."""
    model = built()
    (alone,) = run_ranks(trained, 1, model, steps, layout)
    return alone, max((each - alone).abs().max().item() for each in run_ranks(trained, size, model, steps, layout))


def test_ten_steps_over_ranks_are_those_of_one_rank():
    alone, difference = differences(3, 10, "balanced")
    assert difference < 1e-9
    assert alone[-1, 0] < alone[0, 0]


@pytest.mark.thorough
def test_a_hundred_steps_over_two_ranks_are_those_of_one_rank():
    alone, difference = differences(2, 100, "zigzag")
    print(f"losses {alone[0].tolist()} to {alone[-1].tolist()}, apart by {difference:.1e}")
    assert difference < 1e-8
    assert (alone[-10:].mean(0) < alone[:10].mean(0)).all()
