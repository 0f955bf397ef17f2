"""Pages are true: their commands are parsed, and their snippets run."""

import re
import shlex
from pathlib import Path

import pytest
import torch

import megatron_cp as cp
from megatron_cp.cli import main
from megatron_cp.executor import run_ranks
from megatron_cp.softmax import KERNELS
from tests.limits import limit

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:\$ )?(?:[A-Z_]+=\S* )*(?:megatron-cp|torchrun .*-m megatron_cp) ([a-z]+\b.*)")
_LEFT_OUT = ("...", "FLAGS", "MODEL", "FOLDER", "NAME", "SECONDS", "<", "|")  # a reader's own words


def block(page, holding, language="python"):
    """Returns the page's first block of a language that has a text."""
    found = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return next(text for text in found if holding in text)


def commands():
    """Returns the whole commands in the blocks of all pages, without prompts, comments and a reader's own words."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        blocks = re.findall(r"^ *```(?:bash)?\n(.*?)^ *```|^((?:    .*\n)+)", text, re.DOTALL | re.MULTILINE)
        for line in "\n".join(part for pair in blocks for part in pair).splitlines():
            match = COMMAND.fullmatch(line.partition(" # ")[0].strip())
            if match and not any(word in match[1] for word in _LEFT_OUT):
                found.append((page.name, match[1]))
    return sorted(set(found))


def test_commands_of_pages_are_parsed(monkeypatch, capsys):
    monkeypatch.setattr(main, "_run", lambda args: 0)
    refused = []
    for page, line in commands():
        if main.main(shlex.split(line)) != 0:
            refused.append((page, line, capsys.readouterr().err))
    assert refused == []


def test_page_on_nan_names_rank_and_layer():
    scope = {"torch": torch}
    exec(block("docs/troubleshooting.md", "def stop_at_nan"), scope)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    scope["stop_at_nan"](model, 5)
    model(torch.ones(4, 2))
    with torch.no_grad():
        model[1].bias[1] = float("nan")
    with pytest.raises(FloatingPointError, match="rank 5, layer 1: 4 elements"):
        model(torch.ones(4, 2))


def test_recipe_of_a_mask_equals_torchs_attention(capsys):
    page = (ROOT / "docs/your-own-mask.md").read_text()
    scope = {}
    for text in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(text, scope)
    assert scope["difference"] < 1e-14
    assert re.sub(r"[\d.e-]+$", "", capsys.readouterr().out.strip()) in page
    packing, function = cp.Packing([6, 1]), scope["summary_mask"]
    assert function(packing).seen.tolist() == [1, 2, 3, 4, 4, 6, 1]
    spec = cp.AttentionSpec(4, 2, 8, mask=function)
    batch = cp.shard_batch(torch.arange(7), cp.Layout.contiguous(packing, 1), slots=[spec])
    assert batch.plan(spec).work_per_rank() == [4 * function(packing).area]


def test_recipes_of_a_kernel_and_of_partial_results_are_attention(capsys):
    page, before = (ROOT / "docs/your-own-kernel.md").read_text(), list(KERNELS)
    scope = {}
    try:
        for text in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
            exec(text, scope)
    finally:
        KERNELS[:] = before
    shown = re.findall(r"^    (\w+, float64: .*)$", page, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == shown
    packing, random = cp.Packing([9, 1, 6]), torch.Generator().manual_seed(0)
    tensors = [torch.randn(rows, 2, 8, generator=random, dtype=torch.float64) for rows in (16, 16, 16, 3, 3, 16)]
    layout = cp.Layout.zigzag(packing, 2)
    plan = cp.plan_attention(packing, layout, heads=2, head_dim=8, scheme="p2p")

    def rank(group):
        *own, dout = (layout.shard(x, group.rank) if len(x) == 16 else x.clone() for x in tensors)
        leaves = [x.requires_grad_() for x in own]
        out = scope["attend_with_memory"](*leaves, plan, group)
        out.backward(dout)
        return [out.detach(), *(x.grad for x in leaves)]

    ranks = list(zip(*run_ranks(rank, 2, timeout=limit(60)), strict=True))
    found = [layout.unshard(list(each)) if n < 4 else sum(each) for n, each in enumerate(ranks)]
    held = [x[:4] for x in tensors[:3]]

    def with_text(group):
        local = [cp.Layout.balanced(cp.Packing([7, 9]), group.size).shard(x, group.rank) for x in tensors[:3]]
        return scope["attend_with_text"](local, held, [7, 9], [3, 1], group)

    assert [x.shape for x in run_ranks(with_text, 1, timeout=limit(60))[0]] == [(16, 2, 8), (4, 2, 8)]
    leaves = [x.clone().requires_grad_() for x in tensors[:5]]
    q, k, v, *memory = leaves
    expected = []
    for a, b in packing.spans():  # the memory is before each document's keys, and all of its queries see it
        keys, values = (torch.cat([x, y[a:b]]).transpose(0, 1) for x, y in zip(memory, (k, v), strict=True))
        seen = torch.ones(b - a, 3 + b - a, dtype=torch.bool).tril(3)
        out = torch.nn.functional.scaled_dot_product_attention(q[a:b].transpose(0, 1), keys, values, attn_mask=seen)
        expected.append(out.transpose(0, 1))
    expected = torch.cat(expected)
    expected.backward(tensors[5])
    for ours, right in zip(found, (expected, *(x.grad for x in leaves)), strict=True):
        assert torch.allclose(ours, right, rtol=0, atol=1e-12)
