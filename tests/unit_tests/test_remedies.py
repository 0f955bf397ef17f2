"""The remedies that refusals name, run as a user would paste them."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

import megatron_cp as cp
from megatron_cp.cli.main import main
from megatron_cp.cli.megatron_job import judged
from megatron_cp.errors import ArgumentError
from megatron_cp.executor.launch import run_ranks
from tests.limits import limit


class Row(NamedTuple):
    """A refusal and its remedy.

    Attributes:
        says: the message's end: the remedy as it is shown.
        code: the part of it that is pasted.
        wrong: code that is refused, on each of two ranks.
        right: code with `code` in it that is not.
        setup: code that comes before both.
    """

    says: str
    code: str
    wrong: str
    right: str
    setup: str = ""


ATTENTION = "plan = cp.plan_attention(packing, layout, heads=6, kv_heads=3, head_dim=4)"
KEYS = "k = v = torch.randn(rows, 1, 4); q = torch.randn(rows, 2, 4)"
INDEX = (
    "index = dict(index_q=torch.randn(rows, 2, 4), index_k=torch.randn(rows, 4), index_weights=torch.randn(rows, 2))"
)
ROWS = [
    Row(
        "These are the tokens of all ranks: pass this rank's, layout.shard(q, rank).", "layout.shard(q, rank)",
        "cp.attention(q, k, v, plan, group)", "cp.attention(layout.shard(q, rank), k, v, plan, group)",
        f"{ATTENTION}; q = torch.randn(23, 6, 4); k = v = torch.randn(rows, 3, 4)",
    ),
    Row(
        "layout.shard(hidden[0], rank).", "layout.shard(hidden[0], rank)", "layer(hidden, plans, group)",
        "layer(layout.shard(hidden[0], rank), plans, group)",
        "import megatron_cp.nn as nn; layer = nn.Attention(8, heads=2); hidden = torch.randn(1, 23, 8);"
        " plans = cp.BatchPlan(layout, [layer.slot])",
    ),
    Row(
        "layout.shard(local, rank).", "layout.shard(local, rank)", "cp.gather(local, layout, group)",
        "assert torch.equal(cp.gather(layout.shard(local, rank), layout, group), local)",
        "local = torch.arange(46.0).view(23, 2)",
    ),
    Row(
        "Heads are an axis: q.unflatten(-1, (6, 4)).", "q.unflatten(-1, (6, 4))", "cp.attention(q, k, v, plan, group)",
        "cp.attention(q.unflatten(-1, (6, 4)), k, v, plan, group)",
        f"{ATTENTION}; q = torch.randn(rows, 24); k = v = torch.randn(rows, 3, 4)",
    ),
    *(
        Row(
            f"Rows come first, {wanted}: use {code} of {given}.", code,
            "cp.attention(q, k, v, plan, group)",
            f"q, k, v = (x.{code} for x in (q, k, v)); cp.attention(q, k, v, plan, group)",
            f"{ATTENTION}; q, k, v = (torch.randn(*{shape}) for h in (6, 3, 3))",
        )
        for wanted, code, given, shape in (
            ("[t, h, d]", "transpose(0, 1)", "[h, t, d]", "(h, rows, 4)"),
            ("[t, b, h, d]", "transpose(0, 1)", "[b, t, h, d]", "(2, rows, h, 4)"),
            ("[t, b, h, d]", "permute(2, 0, 1, 3)", "[b, h, t, d]", "(2, h, rows, 4)"),
        )
    ),
    Row(
        'Plan each step with mask="causal", kv_packing=keys.packing, kv_layout=keys, where keys = '
        "cache.extend(layout).", 'mask="causal", kv_packing=keys.packing, kv_layout=keys',
        "cache.extend(layout); call(cp.plan_attention(packing, layout, **sizes))",
        "keys = cache.extend(layout); second = call(cp.plan_attention(packing, layout, **sizes,"
        ' mask="causal", kv_packing=keys.packing, kv_layout=keys))\n'
        "torch.testing.assert_close(cp.gather(second, layout, group)[0], alone)",
        "sizes = dict(heads=2, head_dim=4); cache = cp.Cache(packing.num_documents, 2)\n"
        "q, k, v = (layout.shard(torch.arange(23 * 8.0).view(23, 2, 4) % part, rank) for part in (5, 3, 7))\n"
        "def call(plan): return cp.attention(q, k, v, plan, group, cache=cache.layer(0), kernel='reference')\n"
        "keys = cache.extend(layout); call(cp.plan_attention(packing, layout, **sizes, kv_packing=keys.packing,"
        " kv_layout=keys, mask='causal'))\n"
        "whole = [torch.arange(23 * 8.0).view(23, 2, 4) % part for part in (5, 3, 7)]\n"
        "alone = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (whole[0][:1],"
        " *(torch.cat([x[:7], x[:1]]) for x in whole[1:])))).transpose(0, 1)[0]",
    ),
    Row(
        "Call it under torch.no_grad().", "torch.no_grad()",
        "cp.attention(q, k, v, plan, group, cache=cache.layer(0))",
        "with torch.no_grad(): cp.attention(q, k, v, plan, group, cache=cache.layer(0))",
        "q = k = v = torch.randn(rows, 2, 4, requires_grad=True); cache = cp.Cache(packing.num_documents, 2);"
        " keys = cache.extend(layout); plan = cp.plan_attention(packing, layout, heads=2, head_dim=4,"
        " kv_packing=keys.packing, kv_layout=keys, mask=cp.Mask.causal(packing))",
    ),
    Row(
        "These lengths look like cu_seqlens: Packing.from_cu_seqlens([0, 7, 8]) has 8 tokens.",
        "Packing.from_cu_seqlens([0, 7, 8])", "cp.Layout.zigzag(cp.Packing([0, 7, 8]), 2).shard(np.arange(8), 0)",
        "cp.Layout.zigzag(cp.Packing.from_cu_seqlens([0, 7, 8]), 2).shard(np.arange(8), 0)",
    ),
    Row(
        "packing.documents_of(layout.tokens(rank)) gives the tree of each token.",
        "packing.documents_of(layout.tokens(rank))", "layout.document_ids(rank)",
        "packing.documents_of(layout.tokens(rank))",
        "packing = cp.Packing.tree([4, 2, 3], [-1, 0, 0]); layout = cp.Layout.contiguous(packing, 2)",
    ),
    Row(
        "In a tree a token may have several next tokens: shard_batch has a label for each.", "shard_batch",
        "layout.labels(tokens, rank)", "assert len(cp.shard_batch(tokens, layout, group).targets.labels) >= 3",
        "packing = cp.Packing.tree([4, 2, 3], [-1, 0, 0]); layout = cp.Layout.contiguous(packing, 2);"
        " tokens = np.arange(9)",
    ),
    Row(
        "Say which queries see which keys with Mask.from_slices.", "Mask.from_slices",
        "cp.Mask.named(packing, 'chunk:2', keys)",
        "cp.Mask.from_slices(packing, [(0, 7, 0, 3, 'full')], kv_packing=keys)", "keys = cp.Packing([3, 2, 2, 1])",
    ),
    Row(
        "Say which tokens of the stream see which with Mask.from_slices.", "Mask.from_slices",
        "cp.Mask.prefix(packing, 2)", "cp.Mask.from_slices(packing, [(0, 4, 0, 4, 'causal')])",
        "packing = cp.Packing.tree([4, 2, 3], [-1, 0, 0])",
    ),
    Row(
        "A set has another order in each process, and ranks compare plans in order: use dict.fromkeys.",
        "dict.fromkeys", "cp.BatchPlan(layout, {slot})", "cp.BatchPlan(layout, dict.fromkeys([slot, slot]))",
        "slot = cp.AttentionSpec(2, 2, 4)",
    ),
    *(
        Row(
            'Use Transport.even_hosts("hierarchical", cp_size, hosts), or Transport("hierarchical", hosts_of(group)), '
            "which asks the ranks.", code, "cp.plan_attention(packing, layout, heads=2, head_dim=4,"
            " transport='hierarchical')",
            "from megatron_cp import Transport, hosts_of;"
            f" cp.plan_attention(packing, layout, heads=2, head_dim=4, transport={code})", "cp_size, hosts = 2, 2",
        )
        for code in (
            'Transport.even_hosts("hierarchical", cp_size, hosts)', 'Transport("hierarchical", hosts_of(group))',
        )
    ),
    Row(
        "Call sparse_attention.", "sparse_attention", "cp.attention(q, k, v, plan, group)",
        "cp.sparse_attention(q, k, v, plan, group, chosen=torch.zeros(rows, 3, dtype=torch.int64))",
        f"{KEYS}; plan = cp.plan_attention(packing, layout, heads=2, kv_heads=1, head_dim=4, scheme='exact', topk=3)",
    ),
    Row(
        "Call latent_attention.", "latent_attention", "cp.attention(q, k, k, plan, group)",
        "cp.latent_attention(q, torch.randn(rows, 3), torch.randn(rows, 2), torch.randn(2, 4, 3), plan, group)",
        "q = k = torch.randn(rows, 2, 4); plan = cp.plan_attention(packing, layout, heads=2, head_dim=4,"
        " value_head_dim=2, latent=(2, 3))",
    ),
    Row(
        "Plan with latent=(shared, rank).", "latent=(shared, rank)",
        "call(cp.plan_attention(packing, layout, **sizes))",
        "shared, rank = 2, 3; call(cp.plan_attention(packing, layout, **sizes, latent=(shared, rank)))",
        "sizes = dict(heads=2, head_dim=4, value_head_dim=2)\n"
        "def call(plan): cp.latent_attention(torch.randn(rows, 2, 4), torch.randn(rows, 3), torch.randn(rows, 2),"
        " torch.randn(2, 4, 3), plan, group)",
    ),
    Row(
        "Plan with topk=, and with indexer=.", "indexer=", "call(cp.plan_attention(packing, layout, heads=2,"
        " kv_heads=1, head_dim=4))",
        "call(cp.plan_attention(packing, layout, heads=2, kv_heads=1, head_dim=4, topk=3, indexer=(2, 4)))",
        f"{KEYS}; {INDEX}\ndef call(plan): cp.sparse_attention(q, k, v, plan, group, **index)",
    ),
    Row(
        "The plan's indexer chooses: plan without indexer=.", "without indexer=",
        "call(cp.plan_attention(packing, layout, heads=2, kv_heads=1, head_dim=4, topk=3, indexer=(2, 4)), **index)",
        "call(cp.plan_attention(packing, layout, heads=2, kv_heads=1, head_dim=4, topk=3))  # without indexer=",
        f"{KEYS}; {INDEX}\ndef call(plan, **more): cp.sparse_attention(q, k, v, plan, group,"
        " chosen=torch.zeros(rows, 3, dtype=torch.int64), **more)",
    ),
    Row(
        "Combine the numbers of step and layer, as in seed=step * num_layers + layer: with one seed every call would "
        "drop the same weights.", "seed=step * num_layers + layer",
        "cp.attention(q, k, v, plan, group, dropout=0.5)",
        "step, num_layers, layer = 3, 2, 1; cp.attention(q, k, v, plan, group, dropout=0.5,"
        " seed=step * num_layers + layer)",
        f"{ATTENTION}; q = torch.randn(rows, 6, 4); k = v = torch.randn(rows, 3, 4)",
    ),
    Row(
        "Do not reduce them: cross_entropy(..., reduction='none').", "reduction='none'",
        "cp.token_loss(cross_entropy(logits, batch.labels), batch, group)",
        "cp.token_loss(cross_entropy(logits, batch.labels, reduction='none'), batch, group)",
        "from torch.nn.functional import cross_entropy; batch = cp.shard_batch(np.arange(23), layout, group);"
        " logits = torch.randn(rows, 30)",
    ),
    Row(
        "Use weights.detach().", "weights.detach()", "cp.token_loss(losses, weights, group)",
        "cp.token_loss(losses, weights.detach(), group)",
        "losses = torch.randn(rows); weights = torch.ones(rows, requires_grad=True)",
    ),
    *(
        Row(
            "Move hidden states before the layer with relayout(hidden, plan.hidden_layout, plan.layout, group), and "
            "back after it; or plan without hidden_size, so that nothing is redistributed.", code,
            "mix(layout.shard(hidden, rank), planned(layout, **moved))",
            f"{right}\ntorch.testing.assert_close(cp.gather(out, layout, group), alone)",
            "from functools import partial; from megatron_cp import relayout\n"
            "def mix(x, plan, group=group):\n"
            "    heads, gates = x[:, None].expand(-1, 2, 8), x.expand(-1, 2)\n"
            "    return cp.gated_delta_rule(heads, heads, heads, -gates, gates, plan, group, kernel='reference')\n"
            "planned = partial(cp.plan_linear, packing, heads=2, head_dim=8); moved = dict(hidden_size=1, layers=20)\n"
            "hidden = torch.arange(1, 24.0)[:, None] / 24\n"
            "alone = mix(hidden, planned(cp.Layout.contiguous(packing, 1)), None)",
        )
        for code, right in (
            (
                "relayout(hidden, plan.hidden_layout, plan.layout, group)",
                "hidden, plan = layout.shard(hidden, rank), planned(layout, **moved)\n"
                "inside = relayout(hidden, plan.hidden_layout, plan.layout, group)\n"
                "out = relayout(mix(inside, plan.inside), plan.layout, plan.hidden_layout, group)",
            ),
            (
                "plan without hidden_size",
                "out = mix(layout.shard(hidden, rank), planned(layout))  # or plan without hidden_size",
            ),
        )
    ),
    Row(
        "Use Embedding(sparse=False).", "sparse=False",
        "reduce(Embedding(sparse=True))", "reduce(Embedding(sparse=False))",
        "from functools import partial\n"
        "def reduce(module): module(torch.tensor([1])).sum().backward(); cp.reduce_gradients(module, group)\n"
        "weight = torch.arange(6.0).view(3, 2); Embedding = partial(torch.nn.Embedding, 3, 2, _weight=weight)",
    ),
    Row(
        "Make the layout by layout(lengths) of these GraphTables.", "layout(lengths)",
        "cp.shard_batch(np.arange(23), layout, group, slots=slots, into=tables)",
        "lengths = packing.lengths; cp.shard_batch(np.arange(23), tables.layout(lengths), group, slots=slots,"
        " into=tables)",
        "tables = cp.GraphTables(40, 6, 2);"
        " slots = [cp.AttentionSpec(2, 2, 4, scheme='a2a')]",
    ),
    Row(
        "Shard the batch with into=slots right before its step. Batches that exist at the same time need separate "
        "slots.",
        "into=slots", "plans = shard(slots).plans; shard(slots); slots.check_loaded(plans)",
        "plans = cp.shard_batch(np.arange(23), slots.layout(packing.lengths), group, slots=kinds, into=slots).plans;"
        " slots.check_loaded(plans)",
        "slots = cp.GraphTables(40, 6, 2); kinds = [cp.AttentionSpec(2, 2, 4,"
        " scheme='a2a')]\n"
        "def shard(slots): return cp.shard_batch(np.arange(23), slots.layout(packing.lengths), group, slots=kinds,"
        " into=slots)",
    ),
    Row(
        "GlobalBatch(ranks, microbatches, cost)", "GlobalBatch(ranks, microbatches, cost)",
        "PackedStream(corpus, 8, even=2)",
        "ranks, microbatches, cost = 2, 1, PackCost(*[1.0] * len(fields(PackCost))); PackedStream(corpus, 8,"
        " even=GlobalBatch(ranks, microbatches, cost))",
        "from megatron_cp.data import GlobalBatch, PackedStream, TokenCorpus; from megatron_cp.planner import PackCost;"
        " from dataclasses import fields;"
        " corpus = TokenCorpus('x', 9, np.arange(9), np.array([0, 4, 9]))",
    ),
    Row(
        "Plan with latent=.", "latent=",
        "call(cp.plan_attention(packing, layout, **sizes), torch.randn(rows, 2, 4), torch.randn(rows, 2, 2))",
        "call(cp.plan_attention(packing, layout, **sizes, latent=(2, 3)), torch.randn(rows, 2), torch.randn(rows, 3))",
        "sizes = dict(heads=2, head_dim=4, value_head_dim=2, scheme='exact', topk=3); q = torch.randn(rows, 2, 4)\n"
        "def call(plan, k, v): cp.sparse_attention(q, k, v, plan, group, up=torch.randn(2, 4, 3),"
        " chosen=torch.zeros(rows, 3, dtype=torch.int64))",
    ),
]  # fmt: skip
OF_MEGATRON = [
    Row(
        "--spec chooses the other model.", "--spec",
        "config(num_layers=2)",
        "config(num_layers=2,"
        " spec=('megatron_cp.megatron.specs', 'gpt_layer_spec'))  # --spec",
        "from megatron_cp.apps.train.options import TrainingOptions\n"
        "from megatron_cp.apps.train.setup import transformer_config\n"
        "def config(**more): transformer_config(TrainingOptions(**more), torch.device('cpu'))",
    ),
    Row(
        "We have not run torch's FSDP2 in Megatron over context-parallel ranks. Use --use-megatron-fsdp.",
        "use_megatron_fsdp", "given(use_torch_fsdp2=True)", "given(use_megatron_fsdp=True)",
        "from types import SimpleNamespace; from megatron_cp.megatron.config import TransformerConfig, with_options\n"
        "def given(**more): with_options(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2,"
        " context_parallel_size=2), SimpleNamespace(**more))",
    ),
]  # fmt: skip
JOB = [
    "--context-parallel-size", "2", "--calculate-per-token-loss", "--spec", "megatron_cp.megatron.specs",
    "gpt_layer_spec",
]  # fmt: skip
# The end of the remark on a refused flag, its part that is typed, flags that are refused, and flags that are not.
FLAGS = [
    (
        "latent attention has its own positions; use --no-rope-fusion.", "--no-rope-fusion",
        ["--multi-latent-attention", "--position-embedding-type", "rope"],
        ["--multi-latent-attention", "--position-embedding-type", "rope", "--no-rope-fusion"],
    ),
    (
        "balance by --moe-router-enable-expert-bias (with --moe-router-score-function sigmoid and "
        "--moe-router-load-balancing-type none), or use one rank.",
        "--moe-router-score-function sigmoid", ["--num-experts", "4", "--moe-router-load-balancing-type", "sinkhorn"],
        ["--num-experts", "4", "--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid",
         "--moe-router-load-balancing-type", "none"],
    ),
    (
        "attention does not read masks that are tensors; use --dataloader-inter-document-masking, or shard_batch.",
        "--dataloader-inter-document-masking", ["--reset-attention-mask"],
        ["--dataloader-inter-document-masking"],
    ),
    (
        "Without --q-lora-rank the norm of queries is inside a linear layer of Transformer Engine.", "--q-lora-rank",
        ["--multi-latent-attention", "--no-rope-fusion", "--qk-layernorm", "--transformer-impl", "local"],
        ["--multi-latent-attention", "--no-rope-fusion", "--qk-layernorm", "--transformer-impl", "local",
         "--q-lora-rank", "8"],
    ),
]  # fmt: skip
COMMANDS = [
    (
        "What its heads share is --key-heads.", "--key-heads", ["plan", "--layer", "gdn", "--groups", "2"],
        ["plan", "--layer", "gdn", "--key-heads", "2"],
    ),
    (
        "Every host must have as many ranks of --cp 4: take one of these, or another --cp.", "--cp",
        ["plan", "--hosts", "3", "--cp", "4"], ["plan", "--hosts", "3", "--cp", "6"],
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.code[:40])
def test_the_remedy_of_a_refusal_works(row, tmp_path):
    assert row.code in row.says
    assert row.code in row.right

    def rank_main(group):
        packing = cp.Packing([7, 1, 13, 2])
        layout = cp.Layout.zigzag(packing, 2)
        names = {
            "cp": cp, "np": np, "torch": torch, "group": group, "rank": group.rank, "packing": packing,
            "layout": layout, "rows": int(layout.row_counts[group.rank]), "folder": tmp_path / str(group.rank),
        }  # fmt: skip
        names["folder"].mkdir()
        exec(row.setup, names)
        with pytest.raises(ArgumentError) as refused:
            exec(row.wrong, names)
        assert str(refused.value).endswith(row.says), str(refused.value)
        exec(row.setup, names)
        exec(row.right, names)

    run_ranks(rank_main, 2, timeout=limit(20))


@pytest.mark.parametrize("row", OF_MEGATRON, ids=lambda row: row.code[:40])
def test_the_remedy_of_a_job_works(row):
    pytest.importorskip("megatron.core")
    names = {"torch": torch}
    exec(row.setup, names)
    with pytest.raises(ArgumentError) as refused:
        exec(row.wrong, names)
    assert str(refused.value).endswith(row.says)
    assert row.code.replace("_", "-") in row.says
    assert row.code in row.right
    exec(row.right, names)


@pytest.mark.parametrize(
    ("says", "code", "wrong", "right"), FLAGS, ids=lambda value: value if type(value) is str else ""
)
def test_the_flags_that_a_refusal_names_are_not_refused(says, code, wrong, right):
    pytest.importorskip("megatron.core")
    assert code in says
    assert code in " ".join(right)
    (row,) = [row for row in judged([*JOB, *wrong]).data["flags"] if row["verdict"] == "refused"]
    assert row["remark"].endswith(says)
    assert [row for row in judged([*JOB, *right]).data["flags"] if row["verdict"] == "refused"] == []


@pytest.mark.parametrize(
    ("says", "code", "wrong", "right"), COMMANDS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_flags_that_a_command_names_are_taken(says, code, wrong, right, capsys):
    assert main([*wrong, "--lengths", "40,7"]) == 2
    assert capsys.readouterr().err.endswith(f"{says}\n")
    assert code in says
    assert code in right
    assert main([*right, "--lengths", "40,7"]) == 0
