"""Even packs by the model's flops beside even packs by predicted times: `python -m tools.pack_costs [--json]`.

What a pack costs decides which documents go together. Two costs are compared for the same documents: flops, and seconds
that were fitted to predicted steps of packs of many shapes. Both are judged alike: every pack's step is predicted, and
a global batch takes as long as its slowest replica.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megatron_cp.apps.estimate.job import Job
from megatron_cp.apps.estimate.model_files import read_model
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.apps.estimate.step import predict_step
from megatron_cp.data.even import GlobalBatch, even_packs
from megatron_cp.layout import Layout, Packing
from megatron_cp.planner.batch import AttentionSpec
from megatron_cp.planner.predict import Machine, machine
from megatron_cp.planner.predict.pack_cost import PackCost

MODELS, SIZES = ("llama3-8b", "qwen3-next", "nemotron-h"), (1, 4, 8)
REPLICAS, MICROBATCHES, TOKENS_PER_RANK = 8, 4, 16384
ROOM = 0.97  # of the budget that documents fill


class Steps:
    """Predicted milliseconds of packs of a model, each shape once."""

    def __init__(self, model: ModelSpec, cp_size: int, on: Machine) -> None:
        self.model, self.on, self.topology = model, on, on.topology(cp_size)
        self.choice = Job(cp_size, "balanced", sharding="none")
        self.known: dict[tuple[int, ...], float] = {}

    def of(self, lengths: Sequence[int]) -> float:
        """Returns the time of one pack, without the sums of gradients, which a step has once."""
        key = tuple(sorted(lengths))
        if key not in self.known:
            layout = Layout.balanced(Packing(key), self.choice.cp)
            price = predict_step(self.model, layout, self.choice, self.on, self.topology)
            self.known[key] = price.step - price.shards
        return self.known[key]

    def fitted(self, budget: int) -> PackCost:
        """The cost that is nearest to packs of 1 to 64 equal documents, whole and half full, by relative error."""
        shapes = [[size // count] * count for size in (budget, budget // 2) for count in (1, 2, 4, 16, 64)]
        taken = np.array([self.of(shape) for shape in shapes])
        rows = np.array([[1, sum(shape), sum(n * n for n in shape)] for shape in shapes], dtype=np.float64)
        pack, token, pair = np.linalg.lstsq(rows / taken[:, None], np.ones(len(shapes)))[0]
        return PackCost(max(pack, 0.0), max(token, 0.0), max(pair, 0.0))


def flops_of(model: ModelSpec) -> PackCost:
    """Returns the cost by Megatron's count of operations, which omits a few per cent: recurrences of linear layers."""
    slots = [slot for slot in model.slots() if isinstance(slot, AttentionSpec)]
    features = sum(slot.heads * (slot.head_dim + (slot.value_head_dim or slot.head_dim)) // 2 for slot in slots)
    return PackCost.of_flops(active_parameters=model.active_parameters, softmax_features=features)


def batches_of(budget: int, count: int, seed: int) -> Iterator[list[int]]:
    """The lengths of global batches, log-normal, which fill packs but for some room."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        lengths: list[int] = []
        while sum(lengths) < ROOM * budget * REPLICAS * MICROBATCHES:
            lengths.append(min(int(random.lognormal(7.0, 1.5)) + 1, budget))
        yield lengths[:-1]


def judged(name: str, cp_size: int, on: Machine, batches: int, seed: int) -> dict[str, Any]:
    """Steps of both packings and of best fit by tokens, over that of packs by predicted times."""
    model, budget = read_model(name), TOKENS_PER_RANK * cp_size
    steps = Steps(model, cp_size, on)
    flops = flops_of(model)
    head_dim = max(slot.head_dim for slot in model.slots() if isinstance(slot, AttentionSpec))
    costs = {"flops": flops, "rates": flops.at_rates_of(on.hardware, head_dim), "predicted": steps.fitted(budget),
             "tokens": PackCost(0.0, 1.0, 0.0)}  # fmt: skip
    taken: dict[str, list[float]] = {way: [] for way in costs}
    for lengths in batches_of(budget, batches, seed):
        for way, cost in costs.items():
            kind = GlobalBatch(REPLICAS, MICROBATCHES, cost)
            packs = even_packs(lengths, budget=budget, cost=cost, ranks=REPLICAS, microbatches=MICROBATCHES)
            taken[way].append(kind.step_time([steps.of([lengths[i] for i in pack]) if pack else 0.0 for pack in packs]))
    over = {way: np.array(times) / np.array(taken["predicted"]) - 1 for way, times in taken.items()}
    equal = {way: cost.token / cost.pair for way, cost in costs.items() if cost.pair}
    return {"model": name, "cp": cp_size, "equal_at": equal, "step_ms": float(np.mean(taken["predicted"])),
            "over": {way: (float(each.mean()), float(each.max())) for way, each in over.items()}}  # fmt: skip


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    on = machine(args.gpu)
    rows = [judged(name, size, on, args.batches, args.seed) for name in MODELS for size in SIZES]
    print(f"DP {REPLICAS}, {MICROBATCHES} microbatches, {TOKENS_PER_RANK:,} tokens a rank, {args.batches} steps, "
          f"{on.describe()}")  # fmt: skip
    print("\n| model | CP | pairs cost as much as tokens at: flops | rates | predicted | step ms | by flops over by "
          "predicted, mean / worst | by rates | by tokens |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|")  # fmt: skip
    for row in rows:
        over = " | ".join(" / ".join(f"{x:+.2%}" for x in row["over"][way]) for way in ("flops", "rates", "tokens"))
        equal = " | ".join(f"{row['equal_at'][way]:,.0f}" for way in ("flops", "rates", "predicted"))
        print(f"| {row['model']} | {row['cp']} | {equal} | {row['step_ms']:.0f} | {over} |")
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
