"""The adapter for torchtitan, with stand-ins of its classes, which have the originals' signatures.

The adapter runs in torchtitan's own trainer in `tests/functional_tests/test_torchtitan.py`.
"""

import dataclasses
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional

from megatron_cp.executor.launch import run_ranks
from megatron_cp.integrations.torchtitan import context_parallel
from tests.refusals import rejects
from tests.softmax_oracle import attend
from tests.stand_ins import stand_in

LENGTHS, SIZE, VOCABULARY = [(5, 1, 6), (9, 3)], 16, 32


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def traverse(self, config_cls, *, recurse=False, _prefix=""):
            for entry in dataclasses.fields(self):
                value, name = getattr(self, entry.name), f"{_prefix}.{entry.name}"
                if isinstance(value, config_cls):
                    yield name, value, self, entry.name
                elif isinstance(value, Configurable.Config):
                    yield from value.traverse(config_cls, _prefix=name)

        def build(self, **kwargs):
            return self._owner(config=self, **kwargs)

    def __init_subclass__(cls):
        if "Config" in vars(cls):
            cls.Config._owner = cls


class Module(nn.Module, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        sharding_config: object = None

    def parallelize(self, parallel_dims):
        raise NotImplementedError


class VarlenAttention(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window_size: tuple[int, int] = (-1, 0)

    def __init__(self, config):
        super().__init__()

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, out_transform=None, **kwargs):  # noqa: N803
        raise NotImplementedError


class Layer(Module):
    """A layer of attention with 4 heads, 2 of keys, and sinks if it is GPT-OSS's."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        inner_attention: Any = field(default_factory=VarlenAttention.Config)
        has_sinks: bool = False

    def __init__(self, config):
        super().__init__()
        self.inner_attention = config.inner_attention.build()
        self.qkv, self.sinks = nn.Linear(SIZE, 2 * SIZE), nn.Parameter(torch.ones(4)) if config.has_sinks else None

    def forward(self, x, attention_masks, positions):
        q, k, v = self.qkv(x + positions[..., None] / 10).unflatten(-1, (8, 4)).split([4, 2, 2], 2)
        transform = self._apply_sinks if self.sinks is not None else None
        others = {"attention_masks": attention_masks, "out_transform": transform, "enable_gqa": True}
        return x + self.inner_attention(q, k, v, scale=0.3, **others).flatten(2)

    def _apply_sinks(self, out, lse):
        return out * torch.sigmoid(lse - self.sinks)[..., None]


class Model(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layers: list = field(default_factory=lambda: [Layer.Config(), Layer.Config()])

    def __init__(self, config):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, SIZE), nn.Linear(SIZE, VOCABULARY)
        self.layers = nn.ModuleList(layer.build() for layer in config.layers)

    def forward(self, tokens, positions=None, attention_masks=None):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, attention_masks, positions)
        return self.head(hidden)


def drawn(model):
    """Gives a model the same weights on every rank; threads share torch's random numbers."""
    random = torch.Generator().manual_seed(0)
    for weight in model.double().parameters():
        weight.data = torch.randn(weight.shape, generator=random, dtype=torch.float64) / 2
    return model


@dataclass
class ModelSpec:
    name: str
    model: Any


class Trainer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        model_spec: Any = field(default_factory=lambda: ModelSpec("llama3", Model.Config()))
        loss: Any = field(default_factory=lambda: SimpleNamespace(num_chunks=5))
        parallelism: Any = field(default_factory=lambda: SimpleNamespace(
            tensor_parallel_degree=1, pipeline_parallel_degree=1, expert_parallel_degree=1, spmd_backend="spmd_types",
        ))  # fmt: skip
        compile: Any = field(default_factory=lambda: SimpleNamespace(enable=False, components=["model", "loss"]))
        debug: Any = field(default_factory=lambda: SimpleNamespace(spmd_typechecking=False))
        training: Any = field(default_factory=lambda: SimpleNamespace(disable_cuda_graphs=True))
        validator: Any = field(default_factory=lambda: SimpleNamespace(enable=True))

    def __init__(self, config):
        self.config, self.ntokens_seen, self.validator = config, 0, SimpleNamespace()
        self.model_parts = [drawn(config.model_spec.model.build())]

    def post_dataloading_process(self, input_dict, labels):
        raise NotImplementedError


@pytest.fixture(autouse=True)
def torchtitan(monkeypatch):
    stand_in(monkeypatch, {
        "torchtitan.models.common.attention": {"VarlenAttention": VarlenAttention},
        "torchtitan.protocols.module": {"Module": Module},
        "torchtitan.distributed.spmd_types": {
            "annotate_input_spmd_types": lambda parallel_dims, inputs, labels, extra_kwargs:
                (inputs, labels, extra_kwargs),
        },
    })  # fmt: skip


def batch():
    tokens = torch.arange(24).view(2, 12) * 7 % VOCABULARY
    positions = torch.cat([torch.arange(length) for row in LENGTHS for length in row]).view(2, 12)
    positions[1, :9] += 4  # a row may begin within a document, of which it sees nothing then
    labels = tokens.roll(-1, 1).masked_fill(positions.roll(-1, 1) == 0, -100)
    return {"input": tokens, "positions": positions}, labels


def losses_of(trainer, rows):
    inputs, labels, others = rows
    return functional.cross_entropy(
        trainer.model_parts[0](inputs, **others)[0], labels[0], reduction="sum", ignore_index=-100
    )


def gradients_on(group, config, options):
    trainer = context_parallel(config, **options).build()
    trainer.parallel_dims = SimpleNamespace(cp_enabled=group.size > 1, get_mesh={"cp": group}.__getitem__)
    loss = losses_of(trainer, trainer.post_dataloading_process(*batch()))
    loss.backward()
    seen, rows = trainer.ntokens_seen, trainer.validator.post_dataloading_process(*batch(), [])
    assert len(rows[1][0]) % 5 == 0  # chunks of the loss
    assert torch.equal(losses_of(trainer, rows), loss)
    assert trainer.ntokens_seen == seen  # validation counts no tokens
    return loss.detach(), [weight.grad for weight in trainer.model_parts[0].parameters()], seen


def alone(config):
    """Returns the loss and gradients of each document alone, by torch's attention."""
    model = config.model_spec.model

    class Plain(Module):
        def __init__(self, window):
            super().__init__()
            self.window = window

        def forward(self, q, k, v, *, attention_masks, scale, out_transform, enable_gqa):
            places = torch.arange(k.shape[1])
            behind = places[:, None] - places
            seen = (behind >= 0) & (behind <= (self.window if self.window >= 0 else len(places)))
            out, lse = attend(q[0], k[0], v[0], seen, scale=scale)
            return out[None] if out_transform is None else out_transform(out[None], lse.T[None])

    whole = drawn(model.build())
    for layer, settings in zip(whole.layers, model.layers, strict=True):
        layer.inner_attention = Plain(settings.inner_attention.window_size[0])
    inputs, labels = batch()
    lengths, total = [length for row in LENGTHS for length in row], 0.0
    rows = (x.flatten().split(lengths) for x in (inputs["input"], inputs["positions"], labels))
    for tokens, positions, targets in zip(*rows, strict=True):
        logits = whole(tokens[None], positions[None])[0]
        loss = functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
        loss.backward()
        total += loss.detach()
    return total, [weight.grad for weight in whole.parameters()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shares_of_ranks_add_up_to_documents_alone(ranks):
    layers = [Layer.Config(has_sinks=True), Layer.Config(inner_attention=VarlenAttention.Config(window_size=(2, 0)))]
    config = Trainer.Config(model_spec=ModelSpec("gpt_oss", Model.Config(layers=layers)))
    expected, gradients = alone(config)
    shares = run_ranks(gradients_on, ranks, config, {"item_size": 8})
    assert abs(sum(loss for loss, _, _ in shares) - expected) < 1e-11
    assert sum(seen for _, _, seen in shares) == sum(map(sum, LENGTHS))  # without rows of filling
    for wanted, *found in zip(gradients, *(own for _, own, _ in shares), strict=True):
        assert (sum(found) - wanted).abs().max() < 1e-11
    assert all(isinstance(layer.inner_attention, VarlenAttention.Config) for layer in layers)  # of the given one


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        ("parallelism", "tensor_parallel_degree", 2), ("parallelism", "pipeline_parallel_degree", 2),
        ("parallelism", "expert_parallel_degree", 2), ("parallelism", "spmd_backend", "full_dtensor"),
        ("debug", "spmd_typechecking", True), ("compile", "enable", True), ("training", "disable_cuda_graphs", False),
    ],
)  # fmt: skip
def test_rejects_settings_when_the_trainer_is_made(place, name, value):
    config = Trainer.Config()
    setattr(getattr(config, place), name, value)
    rejects(rf"{place}\.{name}: got '?{value}'?; allowed", context_parallel(config).build)


def test_rejects_layers_inputs_and_masks_that_are_not_packed_text():
    layers = [Layer.Config(), Layer.Config(inner_attention=Module.Config())]
    config = Trainer.Config(model_spec=ModelSpec("qwen3_5", Model.Config(layers=layers)))
    rejects(r"model_spec.model.layers\[1\]: got 'qwen3_5'.*Gated DeltaNet", context_parallel, config)
    config = context_parallel(Trainer.Config())
    inputs, labels = batch()
    inputs["pixel_values"] = inputs["input"]
    rejects("input_dict", config.build().post_dataloading_process, inputs, labels)
    layer = config.model_spec.model.layers[0].inner_attention.build()
    rows = [torch.zeros(1, 3, heads, 4) for heads in (4, 2, 2)]
    rejects("attention_masks", layer, *rows, attention_masks=None)
