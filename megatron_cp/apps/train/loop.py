"""The training loop of one rank: Megatron's schedule, optimizer and checkpoints around our batches."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from tqdm import tqdm

from megatron_cp.apps.train import checkpoint
from megatron_cp.apps.train.documents import read_text, split_corpus
from megatron_cp.apps.train.evaluate import validation_loss, write_samples
from megatron_cp.apps.train.options import METRICS, Run, TrainingOptions
from megatron_cp.apps.train.pack_cost import pack_cost_of
from megatron_cp.apps.train.run_folder import CHECKPOINTS, write_whole, writing
from megatron_cp.apps.train.setup import Training, build_training, layers_of, start_model_parallel
from megatron_cp.apps.train.trackers import Trackers
from megatron_cp.data import Corpus, GlobalBatch, PackedStream, is_indexed, read_tokenizer
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
from megatron_cp.plan import AUTO, REDISTRIBUTE, Plan, size
from megatron_cp.planner import CHOICES, BatchPlan, choose_layout, layout_by_name, machine, save_picture

FIRST_GRADIENTS, PLAN_PICTURE = "first_gradients", "plan.png"


def load_corpus(options: TrainingOptions) -> Corpus:
    """Returns the documents that the options name."""
    text = read_text(options)
    if text is not None:
        return text
    assert options.data_path is not None
    vocab_size = options.vocab_size
    if options.tokenizer_model is not None:
        vocab_size = read_tokenizer(options.tokenizer_model).vocab_size
    if vocab_size is None:
        raise ArgumentError("vocab_size", None, "the vocabulary of the .bin/.idx pair, or its --tokenizer-model")
    return IndexedCorpus(options.data_path, vocab_size)


def packed_stream(options: TrainingOptions, corpus: Corpus, replicas: int) -> PackedStream:
    """Returns the packs of a run."""
    even = None
    if options.cp_even_packs:
        flops = pack_cost_of(options, layers_of(options), options.padded_vocab_size(corpus.vocab_size))
        cost = flops.at_rates_of(machine(options.cp_hardware).hardware, options.kv_channels)
        even = GlobalBatch(replicas, options.global_batch_size // replicas, cost)
    return PackedStream(corpus, options.seq_length, options.seed, even=even)


def train(world: TorchGroup, run: Run, device: str) -> dict[str, Any]:
    """Trains on this rank, from the run's checkpoint or its seed, and returns a summary.

    Returns:
        `steps, first_loss, final_loss, validation_loss, tokens_per_second, pad_tokens`; the same on every rank.
        Beside them what reports show: `layers`, the plans of the pack with the most documents, `samples`, texts that
        the model wrote, and `threads` of a rank.

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
    corpus, held_out = split_corpus(options, load_corpus(options))
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
    validation = None
    for step in range(start + 1, options.train_iters + 1):
        with naming_lost_ranks(f"step {step} of training"):
            began = time.perf_counter()
            training.model.zero_grad_buffer()
            training.optimizer.zero_grad()
            batches.seconds = 0.0
            scheduled = time.perf_counter()
            sums = schedule(
                forward_step_func=forward_step,
                data_iterator=batches,
                model=[training.model],
                num_microbatches=options.global_batch_size // replicas,
                seq_length=options.seq_length,
                micro_batch_size=1,
                forward_only=False,
            )
            times = {"batch_seconds": batches.seconds}
            times["forward_backward_seconds"] = time.perf_counter() - scheduled - batches.seconds
            if step == start + 1:
                if run.first_gradients and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
                    tp_rank = parallel_state.get_tensor_model_parallel_rank()
                    run.first_gradients.mkdir(parents=True, exist_ok=True)
                    checkpoint.save_gradients(run.first_gradients / f"{FIRST_GRADIENTS}.{tp_rank}.pt", training)
                if world.rank == 0:
                    batches.save_picture(run.folder / PLAN_PICTURE)  # a run that is cut short has one too
            updating = time.perf_counter()
            _, grad_norm, _ = training.optimizer.step()
            times["optimizer_seconds"] = time.perf_counter() - updating
            lr = training.optimizer.param_groups[0]["lr"]
            training.scheduler.step(increment=options.global_batch_size)
            total = torch.stack([entry["lm loss"].double() for entry in sums]).sum(0)
            dist.all_reduce(total, group=everyone)
            loss = (total[0] / total[1].clamp(min=1)).item()  # waits for the device
            tokens = round(total[1].item()) // options.context_parallel_size  # every rank of a batch logs all of them
            counts, seconds = batches.take_counts(), time.perf_counter() - began
            more = {name: round(value, 4) for name, value in times.items()}
            is_last = step == options.train_iters
            if held_out is not None and (is_last or (options.eval_interval and step % options.eval_interval == 0)):
                set_timeout(long_wait)
                validation = more["validation_loss"] = _validated(training, options, held_out)
                set_timeout(wait)
            log.step(step, loss, float(grad_norm), lr, tokens, counts, seconds, more)
            if step == start + 1:  # ranks import and compile at different speeds in it
                set_timeout(wait)
            due = options.save_interval and step % options.save_interval == 0
            if run.save and (due or is_last):
                shape = options.shape(corpus.vocab_size)
                set_timeout(long_wait)  # one rank may write, hash or sync for long while others wait
                checkpoint.save_checkpoint(run.folder / CHECKPOINTS, training, shape, step, options.data(corpus))
                set_timeout(wait)
    log.close()
    if world.rank == 0:
        batches.save_picture(run.folder / PLAN_PICTURE)
    set_timeout(long_wait)
    samples = _samples(training, options, corpus if held_out is None else held_out) if run.save else []
    parallel_state.destroy_model_parallel()
    shown = {"layers": batches.layers() if world.rank == 0 else [], "samples": samples}
    return {**log.summary(), "validation_loss": validation, **shown, "threads": torch.get_num_threads()}


def _validated(training: Training, options: TrainingOptions, corpus: Corpus) -> float:
    """Returns the loss on the first packs of held-out documents, which are the same each time."""
    stream = PackedStream(corpus, options.seq_length, options.seed)
    packs = min(options.eval_iters * options.global_batch_size, stream.packs_per_epoch(0))
    return validation_loss(training, _Batches(stream, training, options, 0), packs)


def _samples(training: Training, options: TrainingOptions, corpus: Corpus) -> list[dict[str, str]]:
    """Returns texts that the model writes; none if nothing can turn its tokens into text."""
    if not options.sample_tokens or (options.tokenizer_model is None and is_indexed(options.data_path)):
        return []
    return write_samples(training, options, corpus, read_tokenizer(options.tokenizer_model))


class _Counts(NamedTuple):
    """Counts over the packs of some steps.

    Attributes:
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
        # The plans of the pack with the most documents so far, and those that the picture has.
        self._shown: BatchPlan | None = None
        self._drawn: BatchPlan | None = None
        self.seconds = 0.0  # that making packs and plans took, to be reset by who reads it

    def __iter__(self) -> Iterator[ShardedBatch]:
        return self

    def __next__(self) -> ShardedBatch:
        began = time.perf_counter()
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
        self.seconds += time.perf_counter() - began
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
        """Draws the plan of each kind of layer for the pack with the most documents so far, unless it is drawn."""
        if self._shown is not self._drawn and (plans := self._shown.plans if self._shown else []):
            with writing(path.parent, path.name):
                save_picture(plans, path)
            self._drawn = self._shown

    def layers(self) -> list[dict[str, Any]]:
        """Describes the plan of each kind of layer, for the run's page."""
        return [_layer(plan, 2 if self._options.bf16 else 4) for plan in (self._shown.plans if self._shown else [])]


def _layer(plan: Plan, item_size: int) -> dict[str, Any]:
    """Describes a layer's plan as a page shows it: a layout, each rank's share of the work, and bytes."""
    layout, work = plan.layout, np.array(plan.work_per_rank(), np.float64)
    sent = [size(max(plan.bytes_sent(item_size, forward=way))) for way in (True, False)]
    scheme = plan.scheme if plan.redistribution is None else REDISTRIBUTE.name
    return {
        "name": f"{plan.kind} by {scheme}",
        "text": [f"A layer sends at most {sent[0]} from a rank forward and {sent[1]} backward.", *plan.notes],
        "ownership": {
            "lengths": layout.packing.lengths, "starts": layout.starts, "ends": layout.ends,
            "ranks": np.repeat(np.arange(layout.cp_size), np.diff(layout.fragment_offsets)),
        },
        "work": {"unit": "% of the work", "values": 100 * work / max(work.sum(), 1)},
    }  # fmt: skip


class _Log:
    """Writes metrics to disk and shows a progress bar on rank 0; collects numbers for the summary on every rank."""

    def __init__(self, run: Run, rank: int, start: int) -> None:
        self._losses: list[float] = []
        self._tokens = self._pad_tokens = 0
        self._seconds: list[tuple[int, float]] = []
        self._folder, self._cp_size = run.folder, run.options.context_parallel_size
        self._trackers: Trackers | None = None
        self._file: TextIO | None = None
        self._bar: Any = None
        if rank == 0:
            run.folder.mkdir(parents=True, exist_ok=True)
            path = run.folder / METRICS
            kept = [line for line in _lines(path) if _step(line) <= start] if start else []
            with writing(run.folder, METRICS):
                write_whole(path, "".join(kept))
                self._file = path.open("a")
            self._trackers = Trackers(run)
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
        self, step: int, loss: float, grad_norm: float, lr: float, labelled: int, counts: _Counts, seconds: float,
        more: Mapping[str, float],
    ) -> None:  # fmt: skip
        tokens, pad_tokens, layouts, why = counts
        self._losses.append(loss)
        self._pad_tokens += pad_tokens
        self._seconds.append((tokens, seconds))
        if self._file is None:
            return
        entry = {
            "step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens": tokens, "loss_tokens": labelled,
            "pad_tokens": pad_tokens, "seconds": round(seconds, 4), "tokens_per_second": round(tokens / seconds, 1),
            **more, "context_parallel_size": self._cp_size, **({"layouts": layouts} if layouts else {}),
            **({"layout_choice": why} if why else {}),
        }  # fmt: skip
        with writing(self._folder, METRICS):
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        if self._trackers is not None:
            self._trackers.log(step, entry)
        if why:
            tqdm.write(why, file=sys.stderr)
        shown = f"loss {loss:.4f}, {tokens / seconds:,.0f} tokens/s, {self._pad_tokens} pad tokens"
        shown += f", validation {more['validation_loss']:.4f}" if "validation_loss" in more else ""
        shown += "".join(f", {packs} {name}" for name, packs in layouts.items())
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._bar.close()
        if self._trackers is not None:
            self._trackers.close()

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
