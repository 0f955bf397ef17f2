"""TRL's DPOTrainer and KTOTrainer over two ranks beside one: losses, gradient norms, and every metric that they log."""

import importlib.util
from functools import partial

import pytest

# Nothing of transformers is imported here: a process does once, and all ranks are forks of it.
from megatron_cp.executor.launch import run_ranks
from tests.forked_ranks import as_launched
from tests.functional_tests.test_transformers_launch import (
    TRAINED,
    assert_near,
    logged,
    printed_by_the_page,
    trained_like_the_page,
)
from tests.limits import limit
from tests.shared import once

if not all(importlib.util.find_spec(name) for name in ("accelerate", "datasets", "peft", "transformers", "trl")):
    pytest.skip("the trainers are not installed", allow_module_level=True)

pytestmark = pytest.mark.timeout(600)

# The trainer, an adapter in place of a reference model, and other arguments. The page's script trains in bf16.
KINDS = {
    "DPO, accumulation": ("DPO", False, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    "DPO, adapter": ("DPO", True, {}), "KTO": ("KTO", False, {"scheme": "auto"}), "KTO, adapter": ("KTO", True, {}),
}  # fmt: skip


def preferences(name, count):
    """Makes pairs for DPO, answers that were liked or not for KTO, of different lengths."""
    import torch
    from datasets import Dataset

    random = torch.Generator().manual_seed(3)

    def words(length):
        return " ".join(f"t{word}" for word in torch.randint(3, 97, (length,), generator=random).tolist())

    rows = [
        {"prompt": words(5 + n % 4), "chosen": f" {words(3 + n)}", "rejected": f" {words(7 - n % 5)}"}
        for n in range(count)
    ]
    if name == "KTO":
        rows = [
            {"prompt": row["prompt"], "completion": row["chosen"], "label": n % 3 > 0} for n, row in enumerate(rows)
        ]
    return Dataset.from_list(rows)


def trainer_of(folder, name, adapter, cp, scheme="a2a", **changed):
    """Ours over `cp` ranks, or the stock trainer if it is None. One kind prices schemes."""
    import torch
    import trl
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState
    from peft import LoraConfig

    from megatron_cp.transformers import ContextParallelPreferenceMixin
    from tests.transformers_cases import build, tokenizer

    AcceleratorState._reset_state(True)
    kind, config, parallelism, own = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config"), None, {}
    if cp is not None:
        kind, own = type("Ours", (ContextParallelPreferenceMixin, kind), {}), {"scheme": scheme}
        parallelism = ParallelismConfig(cp_size=cp)
    args = config(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, log_level="error", seed=0, logging_steps=1,
        learning_rate=1e-2, parallelism_config=parallelism, save_strategy="no",
        **{"bf16": False, "max_steps": 2, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 3, **changed},
    )  # fmt: skip
    policy, reference = (build("Llama", dtype=torch.float32, num_hidden_layers=1) for _ in range(2))
    for seed, model in enumerate((policy, reference)):
        torch.nn.init.normal_(model.lm_head.weight, std=0.2, generator=torch.Generator().manual_seed(seed))
        model.set_attn_implementation("eager")
    own |= (
        {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])} if adapter else {"ref_model": reference}
    )
    data = preferences(name, 8)
    return kind(
        model=policy, args=args, train_dataset=data, eval_dataset=preferences(name, 5), processing_class=tokenizer(),
        **own,
    )  # fmt: skip


def all_numbers(world, folder):
    """Returns what each trainer logs: stock ones on one rank, ours on two."""
    as_launched(world, 29996)
    found = {}
    for kind, (name, adapter, changed) in KINDS.items():
        trainer = trainer_of(folder / str(world.size), name, adapter, None if world.size == 1 else 2, **changed)
        trainer.train()
        trainer.evaluate()
        found[kind] = logged(trainer, ("runtime", "per_second", "epoch", "step"))
    if world.size > 1:
        found["refused"] = refusals(folder)
        found["the page's script"] = printed_by_the_page(folder, TRAINED["DPO"])
    return found


def refusals(folder):
    from megatron_cp import ArgumentError

    found = []
    for make in (
        lambda: trainer_of(folder, "DPO", True, 2, precompute_ref_log_probs=True),
        lambda: score_with_router_logits(trainer_of(folder, "DPO", True, 2).model),
    ):
        try:
            make()
        except ArgumentError as error:
            found.append(str(error))
    return found


def score_with_router_logits(model):
    import torch

    ids = torch.tensor([[3, 4]])
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True, output_router_logits=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    numbers = partial(all_numbers, folder=tmp_path_factory.mktemp("preference"))

    def run():
        worlds = {n: run_ranks(numbers, n, kind="processes", timeout=limit(300)) for n in (1, 2)}
        return {size: ranks[0] for size, ranks in worlds.items()}

    return once(tmp_path_factory, "preference trainers", run)


@pytest.mark.parametrize("kind", KINDS)
def test_trains_and_evaluates_as_the_stock_trainer(kind, found):
    ours, stock, adapter = found[2][kind], found[1][kind], KINDS[kind][1]
    assert {"loss 0", "grad_norm 1", "rewards/margins 0", "eval_loss 3"} <= set(stock)
    if adapter:  # it changes nothing before the first step: rewards are 0, and their order is rounding
        assert abs(stock["rewards/margins 0"]) < 1e-5
        for each in (ours, stock):
            each.pop("rewards/accuracies 0", None)  # which KTO does not log
    assert_near(ours, stock, rel=1e-4, abs=1e-5)


def test_what_is_refused(found):
    precomputed, router = found[2]["refused"]
    assert "args.precompute_ref_log_probs: got True; allowed: False" in precomputed
    assert "router_aux_loss_coef=0.0" in router


def test_the_script_of_the_page_prints_its_loss(found):
    trained_like_the_page("DPO", found[2]["the page's script"])
