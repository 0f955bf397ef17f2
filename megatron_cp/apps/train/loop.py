"""The training loop of one rank: Megatron's schedule, optimizer and checkpoints around our batches."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from tqdm import tqdm

from megatron_cp.apps.train import checkpoint
from megatron_cp.apps.train.options import METRICS, Run, TrainingOptions
from megatron_cp.apps.train.record import draws_pictures, entries_of
from megatron_cp.apps.train.run_folder import CHECKPOINTS, write_whole, writing
from megatron_cp.apps.train.setup import Training, build_training, start_model_parallel
from megatron_cp.data import PackedStream, read_corpus, read_tokenizer
from megatron_cp.errors import ArgumentError
from megatron_cp.executor import TorchGroup, launch, naming_lost_ranks, set_timeout
from megatron_cp.layout import Layout, Packing
from megatron_cp.megatron import (
    ShardedBatch,
    forward_step,
    gradients_reduced_one_by_one,
    layer_slots,
    layout_options,
    run_megatron_on_cpu,
    shard_batch,
)
from megatron_cp.plan import AUTO, Plan
from megatron_cp.planner import choose_layout, layout_by_name, save_picture

FIRST_GRADIENTS, PLAN_PICTURE = "first_gradients.pt", "plan.png"


def train(world: TorchGroup, run: Run, device: str) -> dict[str, Any]:
    """Trains on this rank, from the run's checkpoint or its seed, and returns a summary.

    Returns:
        `steps, first_loss, final_loss, tokens_per_second, pad_tokens`, and `threads` of a rank; the same on every rank.

    Raises:
        ArgumentError: a model, data or checkpoint that cannot be used; before the first step, on every rank.
    """
    if device == "cpu":
        run_megatron_on_cpu()
        return _trained(world, run, torch.device(device))
    with gradients_reduced_one_by_one():
        return _trained(world, run, torch.device(device, torch.cuda.current_device()))


def _trained(world: TorchGroup, run: Run, where: torch.device) -> dict[str, Any]:
    options = run.options
    corpus = read_corpus(options.data_path, read_tokenizer(options.tokenizer_model))
    start = checkpoint.check_checkpoint(run.resume, options, corpus.vocab_size) if run.resume else 0
    cp_group = start_model_parallel(options)
    wait = 60 * options.distributed_timeout_minutes
    long_wait = max(wait, launch.FIRST_STEP)
    set_timeout(long_wait)  # Megatron made groups of its own
    replicas = parallel_state.get_data_parallel_world_size()
    if options.global_batch_size % replicas:
        raise ArgumentError("global_batch_size", options.global_batch_size, f"a multiple of the {replicas} replicas")
    training = build_training(options, corpus.vocab_size, cp_group, where)
    if run.resume:
        checkpoint.load_checkpoint(run.resume, training)
    batches = _Batches(PackedStream(corpus, options.seq_length, options.seed), training, options, start)
    schedule, log = get_forward_backward_func(), _Log(run, world.rank, start)
    everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
    training.model.train()
    for step in range(start + 1, options.train_iters + 1):
        with naming_lost_ranks(f"step {step} of training"):
            began = time.perf_counter()
            training.model.zero_grad_buffer()
            training.optimizer.zero_grad()
            sums = schedule(
                forward_step_func=forward_step,
                data_iterator=batches,
                model=[training.model],
                num_microbatches=options.global_batch_size // replicas,
                seq_length=options.seq_length,
                micro_batch_size=1,
                forward_only=False,
            )
            if step == start + 1 and run.first_gradients and world.rank == 0:
                run.first_gradients.mkdir(parents=True, exist_ok=True)
                checkpoint.save_gradients(run.first_gradients / FIRST_GRADIENTS, training)
            if step == start + 1 and run.save and world.rank == 0 and draws_pictures():
                with writing(run.folder, PLAN_PICTURE):
                    save_picture(batches.first_plans, run.folder / PLAN_PICTURE)
            _, grad_norm, _ = training.optimizer.step()
            lr = training.optimizer.param_groups[0]["lr"]
            training.scheduler.step(increment=options.global_batch_size)
            total = torch.stack([entry["lm loss"].double() for entry in sums]).sum(0)
            dist.all_reduce(total, group=everyone)
            loss = (total[0] / total[1].clamp(min=1)).item()  # waits for the device
            learnt = round(total[1].item())
            tokens, pad_tokens = batches.take_counts()
            entry = {"step": step, "loss": loss, "grad_norm": float(grad_norm), "lr": lr, "tokens": tokens,
                     "loss_tokens": learnt, "pad_tokens": pad_tokens}  # fmt: skip
            log.step(entry, time.perf_counter() - began)
            if step == start + 1:  # ranks import and compile at different speeds in it
                set_timeout(wait)
            due = options.save_interval and step % options.save_interval == 0
            if run.save and (due or step == options.train_iters):
                set_timeout(long_wait)  # one rank may write, hash or sync for long while others wait
                shape = options.shape(corpus.vocab_size)
                checkpoint.save_checkpoint(run.folder / CHECKPOINTS, training, shape, step)
                set_timeout(wait)
    log.close()
    parallel_state.destroy_model_parallel()
    return {**log.summary(), "threads": torch.get_num_threads()}


class _Batches:
    """Iterates over this rank's share of one pack after another, for Megatron's schedules."""

    def __init__(self, stream: PackedStream, training: Training, options: TrainingOptions, steps_done: int) -> None:
        self._stream, self._training, self._options = stream, training, options
        self._layers = layer_slots(training.model)  # all layers: Megatron's pipeline has one stage here
        self._replicas = parallel_state.get_data_parallel_world_size()
        self._next = steps_done * options.global_batch_size + parallel_state.get_data_parallel_rank()
        self._tokens = self._pad_rows = 0
        self.first_plans: Sequence[Plan] = ()  # one of each kind of layer, for the first pack

    def __iter__(self) -> Iterator[ShardedBatch]:
        return self

    def __next__(self) -> ShardedBatch:
        packing, tokens = self._stream.pack(self._next)
        batch = shard_batch(
            tokens,
            self._layout(packing),
            self._training.cp_group,
            slots=dict.fromkeys(self._layers),
            loss_mask=self._stream.loss_weights(self._next),
            device=self._training.device,
            seed=self._next,
        )
        self._next += self._replicas
        self._tokens += packing.total
        self._pad_rows += batch.pad_rows
        if not self.first_plans and (plans := batch.packed_seq_params.plans) is not None:
            self.first_plans = plans.plans
        return batch

    def _layout(self, packing: Packing) -> Layout:
        options, size = self._options, self._options.context_parallel_size
        # With `shard_batch`'s options, a plan that was made to choose is not made again.
        rows = layout_options(self._training.config)
        if options.cp_layout == AUTO:
            return choose_layout(packing, size, self._layers, **rows).layout
        return layout_by_name(options.cp_layout, packing, size, **rows)

    def take_counts(self) -> tuple[int, int]:
        """Returns the tokens, and the rows that hold none, of all replicas since the last call."""
        counts = torch.tensor([self._tokens, self._pad_rows])
        self._tokens = self._pad_rows = 0
        if self._replicas > 1:
            counts = counts.to(self._training.device)
            dist.all_reduce(counts, group=parallel_state.get_data_parallel_group())
        tokens, pad_rows = counts.tolist()
        return tokens, pad_rows


class _Log:
    """Writes metrics to disk and shows a progress bar on rank 0; collects numbers for the summary on every rank."""

    def __init__(self, run: Run, rank: int, start: int) -> None:
        self._entries: list[dict[str, Any]] = []
        self._folder, self._cp_size = run.folder, run.options.context_parallel_size
        self._file: TextIO | None = None
        if rank == 0:
            run.folder.mkdir(parents=True, exist_ok=True)
            path = run.folder / METRICS
            kept = [entry for entry in entries_of(run.folder) if entry["step"] <= start]
            with writing(run.folder, METRICS):
                write_whole(path, "".join(json.dumps(entry) + "\n" for entry in kept))
                self._file = path.open("a")
            tqdm.set_lock(threading.RLock())  # tqdm's own lock spans processes, and a rank that is killed leaks it
            self._bar = tqdm(
                total=run.options.train_iters, initial=start, desc=run.name, unit="step", dynamic_ncols=True,
                mininterval=0.2 if sys.stderr.isatty() else 20,  # a log file gets a line every 20 seconds
            )  # fmt: skip

    def step(self, entry: dict[str, Any], seconds: float) -> None:
        rate = entry["tokens"] / seconds
        self._entries.append({**entry, "seconds": seconds})
        if self._file is None:
            return
        more = {"seconds": round(seconds, 4), "tokens_per_second": round(rate, 1)}
        with writing(self._folder, METRICS):
            self._file.write(json.dumps({**entry, **more, "context_parallel_size": self._cp_size}) + "\n")
            self._file.flush()
        self._bar.set_postfix_str(f"loss {entry['loss']:.4f}, {rate:,.0f} tokens/s", refresh=False)
        self._bar.update()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._bar.close()

    def summary(self) -> dict[str, Any]:
        timed = self._entries[1:] or self._entries  # the first step also warms up
        return {
            "steps": len(self._entries),
            "first_loss": self._entries[0]["loss"],
            "final_loss": self._entries[-1]["loss"],
            "tokens_per_second": round(sum(e["tokens"] for e in timed) / sum(e["seconds"] for e in timed), 1),
            "pad_tokens": sum(entry["pad_tokens"] for entry in self._entries),
        }
