"""Nine jobs with their parts, beside published throughput: `python -m tools.job_tables`.

Nothing here is fitted to what is published: the numbers are compared after they were predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_cp.apps.estimate.job import Job
from megatron_cp.apps.estimate.mixers import AttentionMixer
from megatron_cp.apps.estimate.model_layers import MLP, Block
from megatron_cp.apps.estimate.model_presets import PRESETS
from megatron_cp.apps.estimate.models import ModelSpec
from megatron_cp.apps.estimate.step import StepPrice, predict_step
from megatron_cp.layout import Packing
from megatron_cp.planner import Machine, layout_by_name, machine


def qwen3_moe() -> ModelSpec:
    """Returns Qwen3-30B-A3B, by its published configuration."""
    block = Block(AttentionMixer(32, 4, 128, 128, qk_norm=True), MLP(768, experts=128, experts_per_token=8))
    return ModelSpec("Qwen3-30B-A3B", 2048, 151936, False, (block,) * 48)


def gpt_oss() -> ModelSpec:
    """Returns GPT-OSS-120B, by its published configuration."""
    experts = MLP(2880, bias=True, experts=128, experts_per_token=4)
    full = AttentionMixer(64, 8, 64, 64, bias=True, output_bias=True, sink=True)
    sliding = replace(full, mask="window:127,0")
    return ModelSpec("GPT-OSS-120B", 2880, 201088, False, (Block(sliding, experts), Block(full, experts)) * 18)


@dataclass(frozen=True)
class Published:
    """A job with its published tokens a second and GPU."""

    name: str
    model: ModelSpec
    gpu: str
    tokens: tuple[int, ...]
    job: Mapping[str, Any]
    throughput: float
    source: str
    gibibytes: float | None = None


LLAMA = PRESETS["llama3-8b"]
TITAN = "torchtitan, benchmarks of December 2024, table {}"
BRIDGE = "Megatron-Bridge, performance summary, {}"
SUMS = {"gradients": "bf16"}  # of all of Megatron-Bridge's recipes
JOBS = (
    Published(
        "Llama-3.1-8B, 8 H100, FSDP, compile, bf16, 2 x 8k", LLAMA, "500 W", (8192,) * 2,
        {"replicas": 8, "sharding": "zero3", "recompute": "ops"}, 6667, TITAN.format(1), 77.0,
    ),
    Published(
        "the same, 1 x 128k, cp 4, FP8, full recomputation", LLAMA, "500 W", (131072,),
        {"cp": 4, "replicas": 2, "sharding": "zero3", "precision": "fp8", "recompute": "full", "scheme": "p2p"},
        1071, TITAN.format(2), 84.0,
    ),
    Published(
        "Qwen3-30B-A3B, 16 H100, FP8, PP 2, EP 8, 2 x 4k", qwen3_moe(), "h100", (4096,) * 2,
        {"pp": 2, "interleave": 24, "ep": 8, "replicas": 8, "microbatches": 32, "precision": "fp8",
         "recompute": "none", **SUMS}, 5275, BRIDGE.format("25.11"),
    ),
    Published(
        "GPT-OSS-120B, 64 H100, bf16, PP 4, EP 8, 1 x 4k", gpt_oss(), "h100", (4096,),
        {"pp": 4, "ep": 8, "replicas": 16, "microbatches": 32, **SUMS}, 5630, BRIDGE.format("25.11"),
    ),
    Published(
        "GPT-OSS-120B, 64 B200, bf16, EP 8, 4 x 4k", gpt_oss(), "b200", (4096,) * 4,
        {"ep": 8, "replicas": 64, "microbatches": 2, **SUMS}, 8213, BRIDGE.format("25.11"),
    ),
    Published(
        "Llama-3-8B, 8 H100, FP8, 1 x 8k", LLAMA, "h100", (8192,),
        {"replicas": 8, "microbatches": 16, "sharding": "zero3", "precision": "fp8", "recompute": "full",
         "recompute_layers": 5, **SUMS}, 14451, BRIDGE.format("25.11"),
    ),
    Published(
        "Llama-3-70B, 64 H100, FP8, TP 4, PP 8 x 5, 1 x 8k", PRESETS["llama3-70b"], "h100", (8192,),
        {"tp": 4, "pp": 8, "interleave": 5, "replicas": 2, "microbatches": 64, "precision": "fp8", "recompute": "none",
         "tp_overlap": True, **SUMS}, 1602, BRIDGE.format("25.11"),
    ),
    Published(
        "job 5 with 5 microbatches, five months later", gpt_oss(), "b200", (4096,) * 4,
        {"ep": 8, "replicas": 64, "microbatches": 5, **SUMS}, 13568, BRIDGE.format("26.04.01"),
    ),
    Published(
        "Qwen3-30B-A3B, 8 B200, FP8, EP 8, 4 x 4k", qwen3_moe(), "b200", (4096,) * 4,
        {"ep": 8, "replicas": 8, "microbatches": 16, "precision": "fp8", **SUMS}, 27136, BRIDGE.format("26.04.01"),
    ),
)  # fmt: skip


def gpu(name: str) -> Machine:
    """Returns a preset, or torchtitan's GPU: 96 GB at 2.4 TB/s, limited to 500 W, with PyTorch's own attention.

    Rates fall with the clock, and the power of a clock with its voltage is its third power, so that 500 of 700 W leave
    0.89. A line between the data sheets of H100 NVL (835e12 in bf16 at 400 W) and H100 SXM gives 0.90.
    """
    if name != "500 W":
        return machine(name)
    on, clock = machine("h100-fa2"), (500 / 700) ** (1 / 3)
    of = on.hardware
    return replace(on, hardware=replace(
        of, name="h100-500w", matrix=of.matrix * clock, copy=0.8 * 2.4e12 / 2, memory=0.98 * 96e9,
        attention=tuple((size, ahead * clock, back * clock) for size, ahead, back in of.attention),
        products=tuple((kind, rate * clock, *rest) for kind, rate, *rest in of.products),
    ))  # fmt: skip


def priced(case: Published) -> StepPrice:
    """Returns the price of a job, in the fastest layout."""
    on, packing = gpu(case.gpu), Packing(list(case.tokens))
    given = {"cp": 1, "layout": "contiguous", **case.job}
    rows = []
    for layout in ("contiguous", "zigzag", "balanced") if given["cp"] > 1 else ("contiguous",):
        job = Job(**{**given, "layout": layout})
        held = layout_by_name(layout, packing, job.cp, align=job.tp)
        rows.append(predict_step(case.model, held, job, on, job.topology(on)))
    return min(rows, key=lambda row: row.step)


def main() -> None:
    """Prints the table of parts, of what would change each job, and of what was published."""
    rows = [(case, priced(case)) for case in JOBS]
    names = [name for name in rows[0][1].parts if any(row.parts[name] >= 0.05 for _, row in rows)]
    print("| part, ms | " + " | ".join(str(number + 1) for number in range(len(rows))) + " |")
    print("|:--|" + "--:|" * len(rows))
    for name in names:
        print(f"| {name} | " + " | ".join(f"{row.parts[name]:,.1f}" for _, row in rows) + " |")
    print("| **step** | " + " | ".join(f"**{row.step:,.1f}**" for _, row in rows) + " |")
    print("| GiB a rank | " + " | ".join(f"{row.memory.total / 2**30:.1f}" for _, row in rows) + " |")
    print("| utilisation | " + " | ".join(
        f"{row.mfu(gpu(case.gpu).hardware.matrix_peak):.0%}" for case, row in rows) + " |\n")  # fmt: skip
    for case, row in rows:
        large = sorted(((value / row.step, name) for name, value in row.parts.items()), reverse=True)
        changes = ", ".join(f"{name} {0.1 / share:.0%}" for share, name in large if share >= 0.04)
        print(f"- {case.name}: {changes}")
    print(
        "\n| job | predicted tokens/s/GPU | published | predicted / published | GiB, predicted / published | source |"
    )
    print("|:--|--:|--:|--:|--:|:--|")
    for case, row in rows:
        found = row.tokens_per_second_per_gpu
        ratio = found / case.throughput
        memory = f"{row.memory.total / 2**30:.1f} / {case.gibibytes or '-'}"
        print(f"| {case.name} | {found:,.0f} | {case.throughput:,.0f} | {ratio:.2f} | {memory} | {case.source} |")


if __name__ == "__main__":
    main()
