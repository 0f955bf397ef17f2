"""Trains a hybrid model of transformers on packed documents over two ranks with FSDP2, with the losses of one rank.

python examples/train_transformers.py --compare          # 2 local processes over gloo; what `make train-hf` runs
torchrun --standalone --nproc-per-node 8 examples/train_transformers.py --cp 4  # 2 replicas of 4 ranks: NCCL or gloo

The model is a tiny random Qwen3-Next (Gated DeltaNet and gated attention), the data the source files of Python's
standard library. `--compare` then trains the stock class on one rank, one document at a time, and prints the largest
difference of the losses.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedModel

from megatron_cp.data import PackedStream, read_corpus, read_tokenizer
from megatron_cp.executor import RankGroup, in_torchrun, run_ranks, start_torchrun_rank
from megatron_cp.transformers import enable_context_parallel

WARMUP = 20  # steps
LOSS_TOLERANCE = 1e-3  # over all steps: both runs round in fp32, and drift apart as any two orders of summing do


def build(vocab_size: int) -> PreTrainedModel:
    """Builds the model with the same weights on every rank. It has no experts: rounding would change their routing."""
    if not torch.cuda.is_available():
        sys.modules.setdefault("fla", None)  # the stock class would take its kernels, which need GPUs
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=1, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=32, mlp_only_layers=[0, 1, 2, 3], pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config).train()


def train(world: RankGroup, args: argparse.Namespace) -> None:
    """Trains on one rank of the job."""
    device = "cuda" if torch.cuda.is_available() and dist.get_backend() == "nccl" else "cpu"
    replicas = world.size // args.cp
    mesh = init_device_mesh(device, (replicas, args.cp), mesh_dim_names=("dp", "cp"))
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    stream = PackedStream(read_corpus(None, read_tokenizer(None)), args.seq_length)
    model = build(stream.corpus.vocab_size).to(device)
    parallel = enable_context_parallel(model, mesh["cp"], layout="balanced")  # the second line; `shard` is the third
    for layer in model.model.layers:
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)

    optimizer, log = torch.optim.AdamW(model.parameters(), args.lr), Log(args, f"CP={args.cp}", world.rank == 0)
    for step in range(args.steps):
        began = time.perf_counter()
        packing, tokens = stream.pack(step * replicas + mesh["dp"].get_local_rank())
        ids = torch.from_numpy(tokens)[None]
        batch = parallel.shard({"input_ids": ids, "labels": ids, "lengths": packing.lengths}, seed=step)
        labels = torch.tensor(batch.num_items, device=device)
        dist.all_reduce(labels, group=mesh["dp"].get_group())
        loss = model(**batch, num_items_in_batch=labels).loss  # this rank's share
        (loss * everyone.size()).backward()  # FSDP takes the mean of gradients over as many ranks
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update(optimizer, args.lr, step)
        total = loss.detach().clone()
        dist.all_reduce(total)
        log.step(total.item(), float(norm.full_tensor()), packing.total * replicas, time.perf_counter() - began)


def train_stock(args: argparse.Namespace, replicas: int) -> None:
    """Trains the stock class on one rank, with each document of a step by itself."""
    torch.set_num_threads(1)  # as on every rank: with small tensors, threads mostly wait for each other
    stream = PackedStream(read_corpus(None, read_tokenizer(None)), args.seq_length)
    model = build(stream.corpus.vocab_size)
    optimizer, log = torch.optim.AdamW(model.parameters(), args.lr), Log(args, "stock, CP=1", is_first=True)
    for step in range(args.steps):
        began, total = time.perf_counter(), 0.0
        packs = [stream.pack(step * replicas + replica) for replica in range(replicas)]
        documents = [torch.from_numpy(tokens[a:b]) for packing, tokens in packs for a, b in packing.spans()]
        labels = sum(len(document) - 1 for document in documents)
        for document in documents:
            if len(document) > 1:
                logits = model(input_ids=document[None], use_cache=False).logits[0, :-1]
                loss = cross_entropy(logits.float(), document[1:], reduction="sum") / labels
                loss.backward()
                total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update(optimizer, args.lr, step)
        log.step(total, norm.item(), sum(len(document) for document in documents), time.perf_counter() - began)


def update(optimizer: torch.optim.Optimizer, lr: float, step: int) -> None:
    """Takes a step of the optimizer, whose learning rate rises over the first steps."""
    optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / WARMUP)
    optimizer.step()
    optimizer.zero_grad()


class Log:
    """Writes metrics to disk and shows a progress bar, on the first rank."""

    def __init__(self, args: argparse.Namespace, name: str, is_first: bool) -> None:
        self._file = None
        if is_first:
            args.run_dir.mkdir(parents=True, exist_ok=True)
            self._file = metrics(args.run_dir, name).open("w")
            self._bar = tqdm(total=args.steps, desc=name, unit="step", mininterval=0.2 if sys.stderr.isatty() else 20)

    def step(self, loss: float, norm: float, tokens: int, seconds: float) -> None:
        """Records one step."""
        if self._file is None:
            return
        entry = {
            "step": self._bar.n + 1,
            "loss": loss,
            "grad_norm": norm,
            "tokens": tokens,
            "seconds": round(seconds, 4),
        }
        print(json.dumps(entry), file=self._file, flush=True)
        self._bar.set_postfix_str(f"loss {loss:.4f}, {tokens / seconds:,.0f} tokens/s", refresh=False)
        self._bar.update()


def metrics(folder: Path, name: str) -> Path:
    """Returns the file of a run's steps."""
    return folder / ("reference.jsonl" if name.startswith("stock") else "metrics.jsonl")


def losses(folder: Path, name: str) -> list[float]:
    """Reads the losses of a run."""
    return [json.loads(line)["loss"] for line in metrics(folder, name).read_text().splitlines()]


def draw(folder: Path, curves: dict[str, list[float]]) -> None:
    """Draws losses over steps, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print("loss.png is not drawn: matplotlib is not installed. Run: pip install '.[plot]'", file=sys.stderr)
        return

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for (name, values), (width, color) in zip(curves.items(), ((1.2, "#0072b2"), (5, "0.8")), strict=False):
        axes.plot(range(1, len(values) + 1), values, label=name, linewidth=width, color=color, zorder=-width)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.legend(frameon=False)
    figure.savefig(folder / "loss.png", dpi=130)


def main() -> int:
    """Trains, and compares if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cp", type=int, default=2, help="context-parallel ranks of a replica")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seq-length", type=int, default=2048, help="the most tokens of a pack")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--run-dir", type=Path, default=Path("runs") / f"hf-{time.strftime('%Y-%m-%d-%H%M%S')}")
    parser.add_argument("--compare", action="store_true", help="train the stock class on one rank too")
    args = parser.parse_args()
    size, is_first = args.cp, True
    if in_torchrun():
        world = start_torchrun_rank()
        size, is_first = world.size, world.rank == 0
        try:
            train(world, args)
        finally:
            dist.destroy_process_group()
    else:
        run_ranks(train, size, args, kind="processes", timeout=None)
    if not is_first:
        return 0
    curves = {f"CP={args.cp}": losses(args.run_dir, "CP")}
    if args.compare:
        train_stock(args, size // args.cp)
        curves["stock class, CP=1, each document alone"] = losses(args.run_dir, "stock")
    draw(args.run_dir, curves)
    ours, *theirs = curves.values()
    print(f"CP={args.cp}: {args.steps} steps, loss {ours[0]:.4f} to {ours[-1]:.4f}; in {args.run_dir}")
    if not theirs:
        return 0
    worst = max(abs(a - b) for a, b in zip(ours, theirs[0], strict=True))
    agree = worst <= LOSS_TOLERANCE
    print(f"max_loss_diff {worst:.3g} over {args.steps} steps: {'they agree' if agree else 'THEY DO NOT AGREE'}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
