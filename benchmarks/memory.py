"""The memory of a training step with each lever beside context parallelism, in a process of its own.

    python -m benchmarks.memory --rows 4096,16384 --vocabulary 150000

Prints the largest resident set of a process beside that before the step, the step's seconds, and its loss. A step that
would need more than `--limit` bytes for its logits is left out.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

LEVERS = {
    "none": (),
    "logit_rows": ("logits",),
    "logit_rows, MLP in chunks": ("logits", "mlp"),
    "logit_rows, recomputed layers": ("logits", "layers"),
    "all three": ("logits", "mlp", "layers"),
}
LOGIT_BYTES = 14  # of bf16: the logits, and in fp32 their log-probabilities and two gradients


def step(rows: int, vocabulary: int, chunk: int, levers: tuple[str, ...]) -> str:
    """Runs a step of a small Llama in bf16 and returns what it took."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import megatron_cp as cp
    from megatron_cp.transformers import enable_context_parallel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=rows,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    parallel = enable_context_parallel(model, None, logit_rows=chunk if "logits" in levers else None)
    if "mlp" in levers:
        for layer in model.model.layers:
            cp.run_in_chunks(layer.mlp, chunk)
    if "layers" in levers:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    ids = torch.randint(3, vocabulary, (1, rows), generator=torch.Generator().manual_seed(1))
    batch = parallel.shard({"input_ids": ids, "labels": ids, "lengths": [rows // 4] * 4})
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    loss = model(**batch, num_items_in_batch=batch.num_items).loss
    loss.backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{(peak - before) / 2**20:.2f} GiB | {time.perf_counter() - start:.0f} s | {loss.item():.4f}"


def main() -> None:
    """Runs every lever in a process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="4096", help="rows of a rank (default: 4096)")
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--chunk", type=int, default=128, help="rows of a chunk (default: 128)")
    parser.add_argument("--limit", type=float, default=16e9, help="bytes that logits may take (default: 16e9)")
    parser.add_argument("--lever", choices=LEVERS, help="only this one, in this process")
    args = parser.parse_args()
    if args.lever is not None:
        print(step(int(args.rows), args.vocabulary, args.chunk, LEVERS[args.lever]))
        return
    print("| rows | lever | more memory in the step | time | loss |\n|---|---|---|---|---|")
    for rows in map(int, args.rows.split(",")):
        for lever, parts in LEVERS.items():
            if "logits" not in parts and rows * args.vocabulary * LOGIT_BYTES > args.limit:
                needs = rows * args.vocabulary * LOGIT_BYTES / 2**30
                print(f"| {rows} | {lever} | logits alone {needs:.0f} GiB, not run | | |", flush=True)
                continue
            command = [sys.executable, "-m", "benchmarks.memory", "--rows", str(rows), "--lever", lever]
            command += ["--vocabulary", str(args.vocabulary), "--chunk", str(args.chunk)]
            found = subprocess.run(command, capture_output=True, text=True, check=True)
            print(f"| {rows} | {lever} | {found.stdout.strip().splitlines()[-1]} |", flush=True)


if __name__ == "__main__":
    main()
