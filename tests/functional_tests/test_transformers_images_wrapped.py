"""Vision-language models that are recomputed, adapted, partly frozen, sharded or under autocast, over several ranks.

Each equals the stock class on each document alone: in float64, and under autocast as near to fp32 as the stock class.
"""

import functools

import pytest

pytest.importorskip("transformers")
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import enable_context_parallel
from tests.functional_tests.test_transformers_autocast import assert_as_near, errors
from tests.functional_tests.test_transformers_images import CLOSE, PACKS
from tests.image_cases import build, document, over_ranks, packed, sampled_wide, stock
from tests.limits import limit
from tests.transformers_cases import assert_same_step, wide

WITHOUT_IMAGES = ((6, [], []), (11, [], []))
FRAMES = "visual", "vision_tower"  # names of towers
PROJECTORS = "merger", "multi_modal_projector"


def is_of(name, words):
    return any(word in name for word in words)


def recomputed(model, use_reentrant):
    """The model, of which text layers and the tower's blocks are computed again in backward."""
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    return model


def with_adapters(model):
    """The model with adapters in the text and in the tower, at values of their own."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    modules = ["q_proj", "v_proj", "down_proj", "qkv", "fc1", "o_proj"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=modules, init_lora_weights=False)).double()


def frozen(model, *, tower=False, projector=False, text=False):
    """The model, of which some parts are not trained."""
    for name, parameter in model.named_parameters():
        is_tower = is_of(name, FRAMES + PROJECTORS)
        of_projector = is_of(name, PROJECTORS)
        parameter.requires_grad_(not (projector if of_projector else tower if is_tower else text))
    return model


CHANGES = {
    "recomputed": functools.partial(recomputed, use_reentrant=False),
    "recomputed, reentrant": functools.partial(recomputed, use_reentrant=True),
    "adapters": with_adapters,
    "frozen tower": functools.partial(frozen, tower=True),
    "frozen tower and projector": functools.partial(frozen, tower=True, projector=True),
    "frozen text": functools.partial(frozen, text=True),
    "frozen but for the projector": functools.partial(frozen, tower=True, text=True),
}
NAMES = ("Qwen2_5_VL", "Qwen3VL", "Gemma3")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("name", "pack", "size"), [
    ("Qwen2_5_VL", "mixed", 2), ("Qwen3VL", "one image", 3), ("Gemma3", "mixed", 3), ("Qwen3VL", "both", 2),
])  # fmt: skip
@pytest.mark.few
def test_equals_the_stock_class_with_what_was_changed(change, name, pack, size):
    if change == "adapters":
        pytest.importorskip("peft")
    model, changed = build(name), CHANGES[change]
    documents = [document(model, *each, seed=number) for number, each in enumerate(PACKS[pack])]
    with wide(), sampled_wide():
        found = over_ranks(model, packed(documents), size, changed=changed, layout="zigzag", scheme="exact")
        assert_same_step(found, stock(model, documents, changed=changed), CLOSE)


@functools.cache
def in_fp32(name, pack):
    """A model in fp32, documents, and what the stock class makes of them."""
    model = build(name, dtype=torch.float32)
    documents = [document(model, *each, seed=number) for number, each in enumerate(PACKS[pack])]
    return model, [{key: narrow(value) for key, value in each.items()} for each in documents]


def narrow(value):
    return value.float() if value.is_floating_point() else value


@pytest.mark.parametrize("name", [*NAMES[:2], pytest.param("Gemma3", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_bf16_is_as_near_fp32_as_the_stock_class(name, size):
    model, documents = in_fp32(name, "mixed")
    exact, theirs = stock(model, documents), stock(model, documents, torch.bfloat16)
    ours = over_ranks(model, packed(documents), size, torch.bfloat16, layout="zigzag")
    assert_as_near(name, errors(ours, exact), errors(theirs, exact))


def sharded(model, mesh):
    """Shards the tower's blocks, the text's layers and all else over a mesh."""
    towers = (each for each in model.modules() if hasattr(each, "blocks") or type(each).__name__.endswith("Encoder"))
    blocks = [block for tower in towers for block in getattr(tower, "blocks", None) or tower.layers]
    for each in (*blocks, *model.model.language_model.layers, model):
        fully_shard(each, mesh=mesh)
    assert len(blocks) == 2
    return model


def steps_with_fsdp(world, names):
    """Loss, logits and gradients of batches with images, with fewer than ranks, without, and with images again."""
    mesh, found = init_device_mesh("cpu", (world.size,)), {}
    for name in names:
        own = build(name)
        parallel = enable_context_parallel(own, mesh, layout="balanced", scheme="exact")
        own = sharded(own, mesh)
        for number, pack in enumerate(STEPS):
            documents = [document(own, *each, seed=seed) for seed, each in enumerate(pack)]
            with wide(), sampled_wide():
                batch = parallel.shard(packed(documents))
                out = own(**batch, num_items_in_batch=batch.num_items)
                (out.loss * world.size).backward()
            dist.all_reduce(total := out.loss.detach().clone())
            whole = {each: value.grad.full_tensor() for each, value in own.named_parameters() if value.grad is not None}
            logits = parallel.gather(out.logits.detach(), batch)[0]
            own.zero_grad()
            if world.rank == 0:
                found[name, number] = total.item(), logits, whole
    return found


STEPS = (PACKS["mixed"], PACKS["one image"], WITHOUT_IMAGES, PACKS["mixed"])


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_fsdp_equals_the_stock_class(size):
    names = NAMES if size == 3 else NAMES[1:]
    found = run_ranks(functools.partial(steps_with_fsdp, names=names), size, kind="processes", timeout=limit(100))[0]
    for (name, number), ours in found.items():
        model = build(name)
        documents = [document(model, *each, seed=seed) for seed, each in enumerate(STEPS[number])]
        with wide(), sampled_wide():
            assert_same_step(ours, stock(model, documents), CLOSE)
