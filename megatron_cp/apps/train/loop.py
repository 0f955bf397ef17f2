"""The training loop of one rank: Megatron's schedule, optimizer and checkpoints around our batches."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from tqdm import tqdm

from megatron_cp.apps.train import checkpoint
from megatron_cp.apps.train.options import METRICS, Run, TrainingOptions
from megatron_cp.apps.train.pack_cost import pack_cost_of
from megatron_cp.apps.train.run_folder import CHECKPOINTS, write_whole, writing
from megatron_cp.apps.train.setup import Training, build_training, layers_of, start_model_parallel
from megatron_cp.data import Corpus, GlobalBatch, PackedStream, read_corpus, read_tokenizer
from megatron_cp.errors import ArgumentError
from megatron_cp.executor import TorchGroup, launch, naming_lost_ranks, set_timeout
from megatron_cp.layout import Layout, Packing
from megatron_cp.megatron import (
    IndexedCorpus,
    ShardedBatch,
    forward_step,
    gradients_reduced_one_by_one,
    layer_slots,
    layout_options,
    run_megatron_on_cpu,
    shard_batch,
)
from megatron_cp.plan import AUTO
from megatron_cp.planner import CHOICES, BatchPlan, choose_layout, layout_by_name, machine, save_picture

FIRST_GRADIENTS, PLAN_PICTURE = "first_gradients", "plan.png"


def load_corpus(options: TrainingOptions) -> Corpus:
    """Returns the documents that the options name.

    Raises:
        ArgumentError: they cannot be read, or there is none.
    """
    if not IndexedCorpus.is_prefix(options.data_path):
        if options.vocab_size is not None:
            raise ArgumentError("vocab_size", options.vocab_size, "only with a .bin/.idx pair as --data-path")
        return read_corpus(options.data_path, read_tokenizer(options.tokenizer_model))
    assert options.data_path is not None
    vocab_size = options.vocab_size
    if options.tokenizer_model is not None:
        vocab_size = read_tokenizer(options.tokenizer_model).vocab_size
    if vocab_size is None:
        raise ArgumentError("vocab_size", None, "the vocabulary of the .bin/.idx pair, or its --tokenizer-model")
    return IndexedCorpus(options.data_path, vocab_size)


def packed_stream(options: TrainingOptions, corpus: Corpus, replicas: int) -> PackedStream:
    """Returns the packs of a run.

    Args:
        options: the run's options.
        corpus: its documents.
        replicas: number of data-parallel ranks; they divide the packs of a step.

    Raises:
        ArgumentError: a spec or a pattern that does not exist.
    """
    even = None
    if options.cp_even_packs:
        flops = pack_cost_of(options, layers_of(options), options.padded_vocab_size(corpus.vocab_size))
        cost = flops.at_rates_of(machine(options.cp_hardware).hardware, options.kv_channels)
        even = GlobalBatch(replicas, options.global_batch_size // replicas, cost)
    return PackedStream(corpus, options.seq_length, options.seed, even=even)


def train(world: TorchGroup, run: Run, device: str) -> dict[str, Any]:
    """Trains on this rank, from the run's checkpoint or its seed, and returns a summary.

    Args:
        world: all ranks of the job.
        run: the run, the same on every rank.
        device: "cpu", or "cuda" for this rank's current device.

    Returns:
        `steps, first_loss, final_loss, tokens_per_second, pad_tokens`; the same on every rank.

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
    corpus = load_corpus(options)
    start = checkpoint.check_checkpoint(run.resume, options, corpus.vocab_size) if run.resume else 0
    cp_group = start_model_parallel(options)
    wait = 60 * options.distributed_timeout_minutes
    long_wait = max(wait, launch.FIRST_STEP)
    set_timeout(long_wait)  # Megatron made groups of its own
    replicas = parallel_state.get_data_parallel_world_size()
    if options.global_batch_size % replicas:
        raise ArgumentError("global_batch_size", options.global_batch_size, f"a multiple of the {replicas} replicas")
    stream = packed_stream(options, corpus, replicas)
    training = build_training(options, corpus.vocab_size, cp_group, where)
    if run.resume:
        checkpoint.load_checkpoint(run.resume, training)
    batches = _Batches(stream, training, options, start)
    schedule = get_forward_backward_func()
    log = _Log(run, world.rank, start)
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
            if step == start + 1:
                if run.keep_first_gradients and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
                    tp_rank = parallel_state.get_tensor_model_parallel_rank()
                    checkpoint.save_gradients(run.folder / f"{FIRST_GRADIENTS}.{tp_rank}.pt", training)
                if world.rank == 0:
                    batches.save_picture(run.folder / PLAN_PICTURE)  # a run that is cut short has one too
            _, grad_norm, _ = training.optimizer.step()
            lr = training.optimizer.param_groups[0]["lr"]
            training.scheduler.step(increment=options.global_batch_size)
            total = torch.stack([entry["lm loss"].double() for entry in sums]).sum(0)
            dist.all_reduce(total, group=everyone)
            loss = (total[0] / total[1].clamp(min=1)).item()  # waits for the device
            tokens = round(total[1].item()) // options.context_parallel_size  # every rank of a batch logs all of them
            log.step(step, loss, float(grad_norm), lr, tokens, batches.take_counts(), time.perf_counter() - began)
            if step == start + 1:  # ranks import and compile at different speeds in it
                set_timeout(wait)
            due = options.save_interval and step % options.save_interval == 0
            if run.save and (due or step == options.train_iters):
                shape = options.shape(corpus.vocab_size)
                set_timeout(long_wait)  # one rank may write, hash or sync for long while others wait
                checkpoint.save_checkpoint(run.folder / CHECKPOINTS, training, shape, step, options.data(corpus))
                set_timeout(wait)
    log.close()
    if world.rank == 0:
        batches.save_picture(run.folder / PLAN_PICTURE)
    parallel_state.destroy_model_parallel()
    return log.summary()


class _Counts(NamedTuple):
    """Counts over the packs of some steps.

    Attributes:
        tokens: tokens in them.
        pad_rows: rows that hold no token.
        layouts: number of packs with each layout; empty unless a layout is chosen for each pack.
        why: the reason for the layout of the run's first pack; empty in later counts.
    """

    tokens: int
    pad_rows: int
    layouts: dict[str, int]
    why: str


class _Batches:
    """Iterates over this rank's share of one pack after another, for Megatron's schedules."""

    def __init__(self, stream: PackedStream, training: Training, options: TrainingOptions, steps_done: int) -> None:
        self._stream, self._training, self._options = stream, training, options
        self._layers = layer_slots(training.model)  # all layers: Megatron's pipeline has one stage here
        self._why, self._told = "", False  # the first pack has its layout
        self._replicas = parallel_state.get_data_parallel_world_size()
        self._next = steps_done * options.global_batch_size + parallel_state.get_data_parallel_rank()
        self._tokens = self._pad_rows = 0
        self._layouts = dict.fromkeys(CHOICES, 0)
        self._shown: BatchPlan | None = None  # plans of the pack with the most documents so far

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
        if self._shown is None or packing.num_documents > self._shown.layout.packing.num_documents:
            self._shown = batch.packed_seq_params.plans
        return batch

    def _layout(self, packing: Packing) -> Layout:
        options = self._options
        size = options.context_parallel_size
        # With `shard_batch`'s options, a plan that was made to choose is not made again.
        rows = layout_options(self._training.config)
        if options.cp_layout != AUTO:
            return layout_by_name(options.cp_layout, packing, size, **rows)
        choice = choose_layout(packing, size, self._layers, **rows)
        if not self._told:
            self._why, self._told = choice.explain(), True
        self._layouts[choice.name] += 1
        return choice.layout

    def take_counts(self) -> _Counts:
        """Returns the counts of all replicas since the last call."""
        counts = torch.tensor([self._tokens, self._pad_rows, *self._layouts.values()])
        self._tokens = self._pad_rows = 0
        self._layouts = dict.fromkeys(CHOICES, 0)
        if self._replicas > 1:
            counts = counts.to(self._training.device)
            dist.all_reduce(counts, group=parallel_state.get_data_parallel_group())
        tokens, pad_rows, *packs = counts.tolist()
        why, self._why = self._why, ""
        return _Counts(tokens, pad_rows, {name: n for name, n in zip(CHOICES, packs, strict=True) if n}, why)

    def save_picture(self, path: Path) -> None:
        """Draws the layout of the pack with the most documents so far."""
        plans = self._shown.plans if self._shown else []
        if plans:
            with writing(path.parent, path.name):
                save_picture(next((plan for plan in plans if plan.kind == "attention"), plans[0]), path)


class _Log:
    """Writes metrics to disk and shows a progress bar on rank 0; collects numbers for the summary on every rank."""

    def __init__(self, run: Run, rank: int, start: int) -> None:
        self._losses: list[float] = []
        self._tokens = self._pad_tokens = 0
        self._seconds: list[tuple[int, float]] = []
        self._folder, self._cp_size = run.folder, run.options.context_parallel_size
        self._file: TextIO | None = None
        self._bar: Any = None
        if rank == 0:
            run.folder.mkdir(parents=True, exist_ok=True)
            path = run.folder / METRICS
            kept = [line for line in _lines(path) if _step(line) <= start] if start else []
            with writing(run.folder, METRICS):
                write_whole(path, "".join(kept))
                self._file = path.open("a")
            tqdm.set_lock(threading.RLock())  # tqdm's own lock spans processes, and a rank that is killed leaks it
            self._bar = tqdm(
                total=run.options.train_iters,
                initial=start,
                desc=run.name,
                unit="step",
                dynamic_ncols=True,
                mininterval=0.2 if sys.stderr.isatty() else 20,  # a log file gets a line every 20 seconds
            )

    def step(
        self, step: int, loss: float, grad_norm: float, lr: float, labelled: int, counts: _Counts, seconds: float
    ) -> None:
        tokens, pad_tokens, layouts, why = counts
        self._losses.append(loss)
        self._pad_tokens += pad_tokens
        self._seconds.append((tokens, seconds))
        if self._file is None:
            return
        entry = {
            "step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens": tokens, "loss_tokens": labelled,
            "pad_tokens": pad_tokens, "seconds": round(seconds, 4), "tokens_per_second": round(tokens / seconds, 1),
            "context_parallel_size": self._cp_size, **({"layouts": layouts} if layouts else {}),
            **({"layout_choice": why} if why else {}),
        }  # fmt: skip
        with writing(self._folder, METRICS):
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        if why:
            tqdm.write(why, file=sys.stderr)
        shown = f"loss {loss:.4f}, {tokens / seconds:,.0f} tokens/s, {self._pad_tokens} pad tokens"
        shown += "".join(f", {packs} {name}" for name, packs in layouts.items())
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._bar.close()

    def summary(self) -> dict[str, Any]:
        timed = self._seconds[1:] or self._seconds  # the first step also warms up
        return {
            "steps": len(self._losses),
            "first_loss": self._losses[0],
            "final_loss": self._losses[-1],
            "tokens_per_second": round(sum(t for t, _ in timed) / sum(s for _, s in timed), 1),
            "pad_tokens": self._pad_tokens,
        }


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True) if path.exists() else []


def _step(line: str) -> float:
    """Returns the step of a line of metrics; infinity if the line is damaged, or unfinished since a run was killed."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return float("inf")
