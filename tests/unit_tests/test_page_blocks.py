"""Python on pages runs: each block as it is printed, but with small sizes and on the CPU, on ranks that are threads.

The blocks of a page are one program, from top to bottom. A page's function below gives the names that its text takes
for granted, such as `model` and `group`, to each block anew. A block that runs elsewhere or not at all is listed with
the reason; a block of a new page is run with the names that all pages share.
"""

import ast
import copy
import re
import runpy
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from tests.limits import limit

ROOT = Path(__file__).parents[2]
LENGTHS = (7, 1, 30, 12)
# What is replaced in every block before it runs.
SMALLER = {
    '"cuda"': '"cpu"',
    "[700, 1, 3000, 395]": str(list(LENGTHS)),
    "[700, 1, 300]": str(list(LENGTHS)),
    "heads=32, kv_heads=8, head_dim=128": "heads=4, kv_heads=2, head_dim=8",
    "hidden_size=2048, heads=32, key_heads=16, head_dim=128": "hidden_size=12, heads=4, key_heads=2, head_dim=8",
    "heads=32, key_heads=16, head_dim=128, hidden_size=2048": "heads=4, key_heads=2, head_dim=8, hidden_size=12",
    "heads=128, groups=8, head_dim=64, state=128": "heads=4, groups=2, head_dim=8, state=4",
    "cp.Packing([8192])": "cp.Packing([512])",
    "[3000, 1, 1095]": "[300, 1, 109]",
    "128  # documents may begin": "32  # documents may begin",
    "(2, 4), mesh_dim_names": "(1, 4), mesh_dim_names",
    "from torch.distributed.device_mesh import init_device_mesh\n": "",  # which makes meshes of processes
}
# Page, a text of the block, and the test that runs it.
ELSEWHERE = [
    ("README.md", "import megatron_cp as cp", "functional_tests/test_pages.py"),
    ("docs/your-own-mask.md", "", "unit_tests/test_pages.py"),
    ("docs/your-own-kernel.md", "", "unit_tests/test_pages.py"),
    ("docs/troubleshooting.md", "def stop_at_nan", "unit_tests/test_pages.py"),
    ("docs/trainers.md", "ContextParallelTrainer", "functional_tests/test_transformers_launch.py"),
    ("docs/trainers.md", "LongSFTTrainer", "functional_tests/test_transformers_launch.py"),
    ("docs/trainers.md", "LongDPOTrainer", "functional_tests/test_transformers_launch.py"),
    ("docs/trainers.md", "LongGRPOTrainer", "functional_tests/test_transformers_launch.py"),
    ("docs/images.md", "cp.relayout", "functional_tests/test_transformers_images.py"),
    ("docs/images.md", "def collate", "unit_tests/transformers/test_images.py"),
    ("docs/cache.md", "", "unit_tests/test_cache.py"),
    ("docs/trees.md", "are_labels=True", "functional_tests/test_examples.py"),
    ("docs/transformers-upstream.md", "CP_BACKENDS", "functional_tests/test_transformers_upstream.py"),
    ("docs/megatron-bridge.md", "def ", "functional_tests/test_megatron_bridge.py"),
]
# Page, a text of the block, and the reason.
NOT_RUN = [
    (
        "docs/cuda-graphs.md",
        "torch.cuda.graph",
        "needs CUDA; tests/functional_tests/test_cuda_graphs.py captures such steps",
    ),
    (
        "docs/images.md",
        "enable_context_parallel",
        "three lines around collate, as test_transformers_images.py calls them",
    ),
    ("docs/hosts.md", "integrations.verl", "needs verl"),
    ("docs/hosts.md", "torchtitan.models", "needs torchtitan"),
    ("docs/hosts.md", "integrations.swift", "needs ms-swift"),
    ("docs/megatron-bridge.md", "provider.", "needs Megatron-Bridge"),
    (
        "docs/moving-a-megatron-job.md",
        "parse_and_validate_args",
        "a part of Megatron's main; examples/pretrain_hybrid.py has it",
    ),
    (
        "docs/moving-a-megatron-job.md",
        "def packed_step",
        "a part of the patch, which test_pretrain_example.py trains with",
    ),
    ("docs/packs.md", "group_batches", "needs Megatron's groups; test_megatron_batch.py has such groups"),
    ("docs/packs.md", "grouped_packs", "needs Megatron's groups; test_megatron_matrix.py reads such packs"),
    (
        "docs/training-in-plain-pytorch.md",
        "fully_shard",
        "FSDP2 needs processes; examples/fsdp2_hybrid.py has these lines",
    ),
]


class Block(NamedTuple):
    """A Python block of a page, by the number of its first line."""

    page: str
    line: int
    text: str

    def listed(self, rows):
        """Returns the last entry of the row that lists the block, if one does."""
        return next((row[2] for row in rows if row[0] == self.page and row[1] in self.text), "")


def blocks_of(path):
    """Returns the Python blocks of a page, in order."""
    text = path.read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    page = str(path.relative_to(ROOT))
    return [Block(page, text.count("\n", 0, each.start()) + 2, each[1]) for each in found]


PAGES = {
    str(path.relative_to(ROOT)): blocks
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if (blocks := blocks_of(path))
}
BLOCKS = [block for blocks in PAGES.values() for block in blocks]


def is_run_here(block):
    return not block.listed(ELSEWHERE) and not block.listed(NOT_RUN)


class Attending(nn.Module):
    """A model as the page on plain PyTorch has it: rows in, logits out, its layer by the batch's plan."""

    def __init__(self, group, vocabulary=16, heads=4, kv_heads=2, head_dim=8):
        super().__init__()
        self.group, self.sizes = group, (heads, kv_heads, head_dim)
        self.embedding = nn.Embedding(vocabulary, 12)
        self.qkv = nn.Linear(12, (heads + 2 * kv_heads) * head_dim)
        self.out = nn.Linear(heads * head_dim, vocabulary)

    def forward(self, tokens, positions, batch):
        heads, kv_heads, head_dim = self.sizes
        rows = self.qkv(self.embedding(tokens)).unflatten(-1, (-1, head_dim))
        q, k, v = rows.split((heads, kv_heads, kv_heads), dim=1)
        return self.out(cp.attention(q, k, v, batch.plan(batch.plans.kinds[0]), self.group).flatten(1))


def shared(group):
    """Returns the names that every page may take for granted, on a rank."""
    random = torch.Generator().manual_seed(1)
    packing = cp.Packing(LENGTHS)
    layout = cp.Layout.balanced(packing, group.size)
    rows = int(layout.token_counts[group.rank])

    def normal(*shape):
        return torch.randn(shape, generator=random)

    return {
        "torch": torch, "cp": cp, "group": group, "rank": group.rank, "cp_size": group.size, "packing": packing,
        "layout": layout, "lengths": list(LENGTHS), "tokens": torch.arange(packing.total) % 16, "rows": rows,
        "q": normal(rows, 4, 8), "k": normal(rows, 2, 8), "v": normal(rows, 2, 8), "normal": normal,
        "hidden": normal(rows, 12), "hidden_size": 12, "A_log": normal(4), "D": normal(4), "dt_bias": normal(4),
    }  # fmt: skip


def plain_pytorch(group):
    names = shared(group)
    rows, normal = names["rows"], names["normal"]
    model = Attending(group)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))

    def losses_of(model, batch):
        logits = model(batch.tokens, batch.position_ids, batch)
        return nn.functional.cross_entropy(logits, batch.labels, reduction="none")

    return names | {
        "model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "losses_of": losses_of,
        "linear_layer": cp.LinearSpec("gdn", heads=4, key_heads=2, head_dim=8, value_head_dim=8, conv_width=4),
        "qkv": normal(rows, 64), "beta": normal(rows, 4), "alpha": normal(rows, 4), "conv": normal(64, 4),
        "layer": cp.AttentionSpec(heads=4, kv_heads=2, head_dim=8), "norm": nn.LayerNorm(12),
        "microbatches": [(names["tokens"], names["layout"])] * 2,
        "tokens_of_this_replica": names["tokens"], "slots": [cp.AttentionSpec(heads=4, kv_heads=2, head_dim=8)],
        "init_device_mesh": Mesh(group), "dist": SimpleNamespace(group=SimpleNamespace(WORLD=group)),
    }  # fmt: skip


class Mesh(dict):
    """A mesh of ranks that are threads, and the function that makes it."""

    def __init__(self, group):
        super().__init__(cp=group)

    def __call__(self, *_, **__):
        return self

    def size(self):
        return self["cp"].size


def linear_layers(group):
    names = shared(group)
    rows, normal = names["rows"], names["normal"]
    return names | {"xBC": normal(rows, 48), "dt": normal(rows, 4), "weight": normal(48, 4), "bias": normal(48)}


def more_layers(group):
    names = shared(group)
    conv = SimpleNamespace(weight=names["normal"](12, 3), bias=names["normal"](12))
    return names | {"in_proj": nn.Linear(12, 36), "out_proj": nn.Linear(12, 12), "conv": conv}


def cross_attention(group):
    names = shared(group)
    rows, normal, images = names["rows"], names["normal"], cp.Packing([3, 2, 9, 4])
    keys = int(cp.Layout.contiguous(images, group.size).token_counts[group.rank])
    return names | {
        "images": images, "q": normal(rows, 8, 64), "k": normal(keys, 8, 64), "v": normal(keys, 8, 64)
    }  # fmt: skip


def one_trace(group):
    names = shared(group)
    plan = cp.plan_attention(names["packing"], names["layout"], heads=4, kv_heads=2, head_dim=8)
    return names | {"plan": plan, "batch": None, "train_step": lambda _: names["q"].sum()}


def pack_of_megatron(group):
    from megatron_cp.megatron.pack import Pack

    tokens = torch.arange(sum(LENGTHS))
    return shared(group) | {"Pack": Pack, "tokens": tokens, "labels": tokens, "loss_mask": torch.ones(len(tokens))}


def hugging_face(group):
    from transformers import LlamaForSequenceClassification

    from tests.transformers_cases import build

    model, names = build("Llama"), shared(group)
    classifier = LlamaForSequenceClassification(copy.deepcopy(model.config)).double()
    batch = {"input_ids": names["tokens"][None] + 3, "labels": names["tokens"][None] + 3, "lengths": list(LENGTHS)}
    places = names["packing"].cu_seqlens[1:] - 1
    return names | {
        "model": model, "mesh": Mesh(group), "loader": [batch], "num_items": 46, "classifier": classifier,
        "last_places": torch.from_numpy(places), "classes": torch.arange(len(places)) % 2,
    }  # fmt: skip


def video(group):
    made = runpy.run_path(str(ROOT / "examples/denoise_video.py"))
    pipe = made["pipeline"]("cpu")

    class Prompted(type(pipe)):
        """The example's pipeline, which has no text encoder, called with a prompt."""

        def __call__(self, prompt, generator):
            return super().__call__(
                prompt_embeds=prompt, negative_prompt_embeds=prompt, generator=generator, num_frames=9, height=48,
                width=80, num_inference_steps=2, output_type="latent",
            )  # fmt: skip

    pipe.__class__ = Prompted
    prompt = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return shared(group) | {"init_device_mesh": Mesh(group), "pipe": pipe, "prompt": prompt}


IMPORTING = threading.Lock()  # packages that import when a name is first used do it in one thread
IMPORTS = (ast.Import, ast.ImportFrom)


class Surroundings(NamedTuple):
    """The names of a page, the ranks that run it, and the names whose values are the same on all of them."""

    names: Callable[[Any], dict] = shared
    ranks: int = 4
    equal: tuple[str, ...] = ()


SURROUNDINGS = {
    "docs/training-in-plain-pytorch.md": Surroundings(plain_pytorch, equal=("loss", "num_tokens", "everything")),
    "docs/nn.md": Surroundings(plain_pytorch),
    "docs/linear-layers.md": Surroundings(linear_layers),
    "docs/more-layers.md": Surroundings(more_layers),
    "docs/schemes.md": Surroundings(cross_attention),
    "docs/profiling.md": Surroundings(one_trace, ranks=1),
    "docs/moving-a-megatron-job.md": Surroundings(pack_of_megatron, ranks=1),
    "docs/tiles.md": Surroundings(ranks=1),
    "docs/transformers.md": Surroundings(hugging_face, ranks=2, equal=("log_probs", "scores", "loss")),
    "docs/diffusers.md": Surroundings(video, ranks=2, equal=("video",)),
}


def run(group, page, surroundings):
    """Runs a page's blocks on a rank. Returns those names that are the same on every rank."""
    names = {}
    with IMPORTING:
        given = surroundings.names(group)
    for block in filter(is_run_here, PAGES[page]):
        text = block.text
        for printed, used in SMALLER.items():
            text = text.replace(printed, used)
        names |= given
        if "model.score" in text:
            names["model"] = names["classifier"]
        with IMPORTING:
            exec("\n".join(ast.unparse(node) for node in ast.parse(text).body if isinstance(node, IMPORTS)), names)
        exec(compile("\n" * (block.line - 1) + text, block.page, "exec"), names)  # errors name the page's lines
    return {name: torch.as_tensor(names[name]).detach() for name in surroundings.equal}


def test_blocks_that_do_not_run_here_are_listed_once():
    for page, text, where in ELSEWHERE:
        assert page in (ROOT / "tests" / where).read_text(), where
        assert any(block.page == page and text in block.text for block in BLOCKS), (page, text)
    for page, text, _ in NOT_RUN:
        assert sum(block.page == page and text in block.text for block in BLOCKS) == 1, (page, text)
    assert not any(block.listed(ELSEWHERE) and block.listed(NOT_RUN) for block in BLOCKS)
    assert sum(map(is_run_here, BLOCKS)) > len(NOT_RUN)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.thorough] if page == "docs/diffusers.md" else [])
        for page, blocks in PAGES.items()
        if any(map(is_run_here, blocks))
    ],
)
def test_blocks_of_a_page_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    surroundings = SURROUNDINGS.get(page, Surroundings())
    first, *others = run_ranks(run, surroundings.ranks, page, surroundings, timeout=limit(120))
    for other in others:
        for name, value in first.items():
            torch.testing.assert_close(other[name], value, msg=name)
