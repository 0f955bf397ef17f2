"""Trains a hybrid of Gated DeltaNet and attention on packed documents with context parallelism and FSDP2, torch alone.

python examples/fsdp2_hybrid.py --check                          # 2 x 2 local processes over gloo, against one rank
torchrun --standalone --nproc-per-node 8 examples/fsdp2_hybrid.py --cp 4      # 2 replicas of 4 ranks: NCCL or gloo
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed import all_reduce, destroy_process_group, get_backend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import megatron_cp as cp
from megatron_cp.executor import RankGroup, in_torchrun, run_ranks, start_torchrun_rank

VOCABULARY, HIDDEN, HELD_OUT = 64, 32, 10**6  # evaluation reads packs from that number on
TOLERANCE = 1e-5  # for every loss, in fp32


class Block(nn.Module):
    """A mixer and an MLP, each on normalised hidden states `[t, hidden]`."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer, self.mixer_norm, self.mlp_norm = mixer, nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.SiLU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor, batch: cp.LocalBatch, group: RankGroup | None) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), batch, group)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Three layers of Gated DeltaNet, then one of attention."""

    def __init__(self) -> None:
        super().__init__()
        linear = [cp.nn.GatedDeltaNet(HIDDEN, heads=4, key_heads=2, head_dim=8) for _ in range(3)]
        softmax = cp.nn.Attention(HIDDEN, heads=4, kv_heads=2, qk_norm=True)
        self.embedding, self.norm = nn.Embedding(VOCABULARY, HIDDEN), nn.RMSNorm(HIDDEN)
        self.blocks = nn.ModuleList(Block(mixer) for mixer in (*linear, softmax))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    @property
    def slots(self) -> list[cp.AttentionSpec | cp.LinearSpec]:
        """The specification of each layer, for which every batch is planned."""
        return [block.mixer.slot for block in self.blocks]

    def forward(self, batch: cp.LocalBatch, group: RankGroup | None) -> Tensor:
        x = self.embedding(batch.tokens)
        for block in self.blocks:
            x = block(x, batch, group)
        return F.cross_entropy(self.head(self.norm(x)), batch.labels, reduction="none")  # [t]


def pack(number: int, size: int) -> tuple[cp.Packing, Tensor]:
    """Draws a pack of documents of any lengths, as a data loader would. Every rank of a replica gets the same."""
    draw = torch.Generator().manual_seed(number)
    lengths = torch.randint(1, size // 2, (64,), generator=draw).cumsum(0).clamp(max=size).diff(prepend=torch.zeros(1))
    packing = cp.Packing([int(length) for length in lengths if length])
    start, step = torch.randint(VOCABULARY, (2, packing.total), generator=draw)
    places = torch.from_numpy(packing.cu_seqlens[:-1].repeat(packing.lengths))
    return packing, (start[places] + torch.arange(packing.total) * (step[places] % 3)) % VOCABULARY  # can be learnt


def train(world: RankGroup | None, args: argparse.Namespace) -> list[float]:
    """Trains on this rank; None trains on one rank alone. Returns the loss of each step, and of the evaluation."""
    torch.manual_seed(0)  # the same weights on every rank
    model, device, cp_group, everyone = Model(), "cpu", None, None
    replica, replicas, replica_group = 0, args.dp, None
    if world is not None:
        device = "cuda" if get_backend() == "nccl" else "cpu"
        mesh = init_device_mesh(device, (args.dp, args.cp), mesh_dim_names=("dp", "cp"))
        cp_group, everyone = mesh["cp"].get_group(), mesh["dp", "cp"]._flatten("dp_cp")
        replica, replicas, replica_group = mesh["dp"].get_local_rank(), 1, mesh["dp"].get_group()
        model.to(device)
        for block in model.blocks:
            fully_shard(block, mesh=everyone)
        fully_shard(model, mesh=everyone)
        everyone = everyone.get_group()
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)

    def batches(number: int) -> list[cp.LocalBatch]:
        """Returns this rank's batches of a step: its replica's pack, or with one rank the packs of all replicas."""
        packs = [pack(number * args.dp + each, args.seq_length) for each in range(replica, replica + replicas)]
        return [
            cp.shard_batch(tokens, cp.Layout.balanced(packing, args.cp if world else 1), cp_group, slots=model.slots,
                           device=device)
            for packing, tokens in packs
        ]  # fmt: skip

    def losses(number: int) -> Tensor:
        """Returns the mean over all tokens of a step; in backward, FSDP's mean of gradients is their sum."""
        local = batches(number)
        count = torch.tensor(sum(batch.num_tokens for batch in local), device=device)
        if replica_group is not None:
            all_reduce(count, group=replica_group)  # every rank of a replica has the whole pack's number
        mean = partial(cp.token_loss, group=everyone, num_tokens=int(count), averaged_gradients=world is not None)
        return sum(mean(model(batch, cp_group), batch) for batch in local)

    found = []
    for step in range(args.steps):
        loss = losses(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of whole gradients: FSDP's are DTensors
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    model.eval()
    with torch.no_grad():
        found.append(losses(HELD_OUT).item())
    if world is None or world.rank == 0:
        name = f"{args.dp} x {args.cp} ranks" if world else "one rank"
        print(f"{name}: loss {found[0]:.6f} to {found[-2]:.6f} in {args.steps} steps, held out {found[-1]:.6f}")
    return found


def main() -> None:
    """Trains on the ranks that torchrun started, or on local ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, default=2, help="ranks that share a pack")
    parser.add_argument(
        "--dp", type=int, default=2, help="number of replicas of local ranks; the size of a torchrun job decides it"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-length", type=int, default=256, help="tokens of a pack")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--check", action="store_true", help="train on one rank too, and compare the losses")
    args = parser.parse_args()
    if in_torchrun():
        world = start_torchrun_rank()
        args.dp, rank = world.size // args.cp, world.rank
        found = train(world, args)
        destroy_process_group()
    else:
        found, rank = run_ranks(train, args.dp * args.cp, args, kind="processes", timeout=None)[0], 0
    if args.check and rank == 0:
        torch.set_num_threads(1)
        error = max(abs(a - b) for a, b in zip(found, train(None, args), strict=True))
        print(f"losses differ by at most {error:.1e}")
        assert error < TOLERANCE


if __name__ == "__main__":
    main()
