"""A plain PyTorch model over n ranks has one process's loss and gradients: `shard_batch`, `token_loss`, the sum."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from megatron_cp.planner.layouts import layout_by_name
from tests.limits import limit
from tests.refusals import rejects

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

VOCABULARY, HEADS, KV_HEADS, DIM = 11, 6, 2, 4
HIDDEN = HEADS * DIM
ATTENTION = cp.AttentionSpec(HEADS, KV_HEADS, DIM, DIM)
GDN = cp.LinearSpec("gdn", heads=HEADS, key_heads=KV_HEADS, head_dim=DIM, value_head_dim=DIM)
CHANNELS = (HEADS + 2 * KV_HEADS) * DIM
TOLERANCE = 1e-12


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, CHANNELS), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, attend):
        qkv = self.qkv(x).unflatten(1, (-1, DIM)).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        return x + self.out(attend(*qkv).flatten(1))


class DeltaNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(HIDDEN, CHANNELS + 2 * HEADS), nn.Linear(HIDDEN, HIDDEN)
        self.conv = nn.Parameter(torch.randn(CHANNELS, 4) / 4)
        self.A_log, self.dt_bias = (nn.Parameter(torch.randn(HEADS) / 4) for _ in range(2))

    def forward(self, x, plan, group):
        qkv, beta, alpha = self.into(x).split((CHANNELS, HEADS, HEADS), dim=1)
        weights = {"conv": self.conv, "A_log": self.A_log, "dt_bias": self.dt_bias}
        return x + self.out(cp.gated_delta_net(qkv, beta, alpha, plan, group, **weights).flatten(1))


class Model(nn.Module):
    """Embeddings of tokens and of positions, attention, a linear layer if asked for, and a head."""

    def __init__(self, linear):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(64, HIDDEN)
        self.attention, self.linear = Attention(), DeltaNet() if linear else None
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.unused = nn.Linear(2, 2)
        self.double()

    def forward(self, tokens, position_ids, attend, plan=None, group=None):
        x = self.attention(self.tokens(tokens) + self.positions(position_ids), attend)
        return self.head(x if self.linear is None else self.linear(x, plan, group))


def model_of(case):
    """Makes equal weights on every rank, drawn here and not by threads, which share torch's generator."""
    return copy.deepcopy(HYBRID if case.linear else ATTENTIVE)


ATTENTIVE, HYBRID = Model(linear=False), Model(linear=True)


def losses_of(model, batch, group):
    """`[t]` of this rank's rows: all that a user writes."""

    def attend(q, k, v):
        return cp.attention(q, k, v, batch.plan(ATTENTION), group)

    gdn = batch.plan(GDN) if getattr(model, "module", model).linear else None
    logits = model(batch.tokens, batch.position_ids, attend, gdn, group)
    return F.cross_entropy(logits, batch.labels, reduction="none")


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch, or the microbatches of one step."""

    lengths: tuple[tuple[int, ...], ...]
    layout: str = "zigzag"
    align: int = 1
    labels: bool = False
    mask: bool = False
    linear: bool = False

    def batches(self):
        """Returns batches as a data loader would: lengths, tokens, labels, and a mask with fractions."""
        draw = torch.Generator().manual_seed(5)
        for lengths in self.lengths:
            total = sum(lengths)
            tokens, labels = torch.randint(0, VOCABULARY, (2, total), generator=draw)
            labels[::5] = -100
            mask = torch.randint(0, 4, (total,), generator=draw) / 3
            yield cp.Packing(lengths), tokens, labels if self.labels else None, mask if self.mask else None


def step(group, case):
    """The loss and the gradients of one step on one rank."""
    model = model_of(case)
    size = 1 if group is None else group.size
    batches = [
        cp.shard_batch(
            tokens, layout_by_name(case.layout, packing, size, align=case.align), group,
            slots=[ATTENTION, GDN] if case.linear else [ATTENTION], labels=labels, loss_mask=mask,
        )
        for packing, tokens, labels, mask in case.batches()
    ]  # fmt: skip
    num_tokens = sum(batch.num_tokens for batch in batches) if len(batches) > 1 else None
    loss = 0.0
    for batch in batches:
        share = cp.token_loss(losses_of(model, batch, group), batch, group, num_tokens=num_tokens)
        share.backward()
        loss += share.item()
    cp.reduce_gradients(model, group)
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def by_torch_alone(case):
    """Trains one process by torch alone: each document by itself, and one mean over all weighted tokens."""
    model, total, count = copy.deepcopy(ATTENTIVE), 0.0, 0
    for packing, tokens, labels, mask in case.batches():
        for start, end in packing.spans():
            own = tokens[start:end]
            targets = torch.cat([own[1:], torch.tensor([-100])]) if labels is None else labels[start:end]
            weights = (targets >= 0) * (1.0 if mask is None else mask[start:end].double())

            def attend(q, k, v):
                q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

            logits = model(own, torch.arange(end - start), attend)
            total = total + (F.cross_entropy(logits, targets, reduction="none") * weights).sum()
            count += int(weights.count_nonzero())
    loss = total / max(count, 1)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_equal(found, expected):
    assert abs(found[0] - expected[0]) < TOLERANCE
    for name, gradient in expected[1].items():
        if gradient is None:
            assert found[1][name] is None, name
        else:
            assert (found[1][name] - gradient).abs().max() < TOLERANCE, name


RAGGED = (7, 1, 23, 0, 2, 13)
CASES = {
    "labels of its own": Case((RAGGED,)), "given labels": Case((RAGGED,), layout="contiguous", labels=True),
    "a mask": Case((RAGGED,), layout="balanced", mask=True),
    "given labels and a mask": Case((RAGGED,), layout="random", labels=True, mask=True),
    "pad rows": Case((RAGGED,), align=4, mask=True), "microbatches": Case((RAGGED, (3,), (1, 1, 30)), mask=True),
    "documents of one token": Case(((1, 1, 2, 1),)), "nothing to learn": Case(((1, 1, 1),)),
}  # fmt: skip


@pytest.mark.parametrize("cp_size", [1, 2, 3, 5])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.few
def test_ranks_have_the_loss_and_gradients_of_torch_alone(case, cp_size):
    expected = by_torch_alone(CASES[case])
    everyones = run_ranks(step, cp_size, CASES[case])
    assert len({loss for loss, _ in everyones}) == 1
    for found in everyones:
        assert_equal(found, expected)


@pytest.mark.parametrize("cp_size", [2, 3, 5])
@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.few
def test_a_hybrid_model_has_the_loss_and_gradients_of_one_rank(align, cp_size):
    case = Case((RAGGED, (2, 1)), align=align, mask=True, linear=True)
    expected = step(None, dataclasses.replace(case, align=1))
    for found in run_ranks(step, cp_size, case):
        assert_equal(found, expected)


def by_ddp(group, case):
    wrapped = DistributedDataParallel(model_of(case), process_group=group.group, find_unused_parameters=True)
    return averaged(wrapped, wrapped.module, group, case)


def by_fsdp(group, case):
    """Has parameters sharded by FSDP2 too."""
    model = fully_shard(model_of(case), mesh=init_device_mesh("cpu", (group.size,)))
    loss, gradients = averaged(model, model, group, case)
    rejects("a DTensor", cp.reduce_gradients, model, group.group)
    return loss, {name: grad if grad is None else grad.full_tensor() for name, grad in gradients.items()}


def averaged(model, inner, group, case):
    """Runs a step of a model that averages the gradients of its `inner` one itself."""
    ((packing, tokens, labels, mask),) = case.batches()
    batch = cp.shard_batch(tokens, cp.Layout.zigzag(packing, group.size), group.group, labels=labels, loss_mask=mask)
    loss = cp.token_loss(losses_of(model, batch, group.group), batch, group.group, averaged_gradients=True)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in inner.named_parameters()}


def two_replicas(group, case):
    """Runs a step of two replicas of two context-parallel ranks each: each replica has one of two microbatches."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model, own = model_of(case), pairs[group.rank // 2]
    packing, tokens, labels, mask = list(case.batches())[group.rank // 2]
    batch = cp.shard_batch(tokens, cp.Layout.zigzag(packing, 2), own, labels=labels, loss_mask=mask)
    loss = cp.token_loss(losses_of(model, batch, own), batch, group.group)
    loss.backward()
    cp.reduce_gradients(model, group.group)
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("train", [by_ddp, by_fsdp])
def test_gradients_that_are_averaged_are_the_same(train):
    case = Case((RAGGED,), mask=True)
    expected = by_torch_alone(case)
    for found in run_ranks(train, 2, case, kind="processes", timeout=limit(120)):
        assert_equal(found, expected)


def test_replicas_with_batches_of_other_lengths_have_one_mean():
    case = Case((RAGGED, (3, 1)), mask=True)
    expected = by_torch_alone(case)
    for found in run_ranks(two_replicas, 4, case, kind="processes", timeout=limit(120)):
        assert_equal(found, expected)
