"""TRL's GRPOTrainer and RLOOTrainer over two ranks beside one: losses, gradient norms, and all metrics they log."""

import importlib.util
import os
from functools import partial

import pytest

# Nothing of transformers may be imported here: one process does, and all ranks are forks of it.
from tests.forked_ranks import run_worlds_after
from tests.functional_tests.test_transformers_launch import TRAINED, printed_by_the_page, rewarded_alike
from tests.limits import limit
from tests.shared import once

if not all(importlib.util.find_spec(name) for name in ("accelerate", "datasets", "peft", "transformers", "trl")):
    pytest.skip("the trainers are not installed", allow_module_level=True)

pytestmark = pytest.mark.timeout(600)

HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1]}
# The trainer, the model, an adapter (whose base is the reference), and other arguments.
KINDS = {
    "GRPO": ("GRPO", "Llama", False, {"gradient_accumulation_steps": 2}),
    "GRPO, hybrid": ("GRPO", "Qwen3Next", False, {}),
    "GRPO, reference": ("GRPO", "Llama", True, {"beta": 0.1, "num_iterations": 2, "loss_type": "grpo"}),
    "RLOO, reference": ("RLOO", "Llama", True, {"beta": 0.1}),
}


def prepare():
    import torch

    torch.set_num_threads(1)
    import datasets  # noqa: F401
    import trl
    from peft import LoraConfig  # noqa: F401

    import megatron_cp.transformers.generation  # noqa: F401
    from tests.transformers_cases import class_of

    class_of("Llama"), class_of("Qwen3Next")
    trl.GRPOTrainer, trl.RLOOTrainer  # noqa: B018


def reward(completion_ids, **others):
    """Prefers completions with small tokens; it is another one on every rank, and the first rank's counts."""
    import torch

    torch.rand(1 + int(os.environ["RANK"]))  # ranks have drawn other random numbers when completions are shuffled
    shift = 1000 * int(os.environ["RANK"])
    return [shift + sum(token < 40 for token in tokens) / len(tokens) for tokens in completion_ids]


def trainer_of(folder, name, model, adapter, cp, dropout=0.0, **changed):
    """Ours over `cp` ranks, or the stock trainer if it is None."""
    import torch
    import trl
    from accelerate.state import AcceleratorState
    from datasets import Dataset
    from peft import LoraConfig

    from megatron_cp.transformers import ContextParallelGRPOMixin, Parallelism
    from tests.transformers_cases import build, tokenizer

    AcceleratorState._reset_state(True)
    kind, config, parallelism = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config"), None
    if cp is not None:
        kind, parallelism = type("Ours", (ContextParallelGRPOMixin, kind), {}), Parallelism(cp_size=cp)
    args = config(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, log_level="error", seed=0, logging_steps=1,
        learning_rate=0.1, optim="sgd", parallelism_config=parallelism, save_strategy="no", bf16=False,
        per_device_train_batch_size=4, per_device_eval_batch_size=4, num_generations=2, max_completion_length=9,
        router_aux_loss_coef=0.0, **{"max_steps": 2} | changed,
    )  # fmt: skip
    model = build(model, dtype=torch.float32, **(HYBRID if model == "Qwen3Next" else {"num_hidden_layers": 1}))
    model.set_attn_implementation("eager")
    random = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 97, (2 + n % 5,), generator=random).tolist() for n in range(8)]
    data = Dataset.from_list([{"prompt": " ".join(f"t{token}" for token in tokens)} for tokens in prompts])
    own = {
        "peft_config": LoraConfig(
            r=4, lora_dropout=dropout, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
    }
    return kind(
        model=model, args=args, reward_funcs=reward, train_dataset=data, eval_dataset=data.select(range(4)),
        processing_class=tokenizer(), **(own if adapter else {}),
    )  # fmt: skip


def all_numbers(world, folder):
    """Returns what each trainer logs: stock ones on one rank, ours on two."""
    # accelerate finds its ranks in the environment.
    os.environ |= {"RANK": str(world.rank), "LOCAL_RANK": str(world.rank), "WORLD_SIZE": str(world.size),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29994"}  # fmt: skip
    found = {}
    for kind, (name, model, adapter, changed) in KINDS.items():
        trainer = trainer_of(folder / str(world.size), name, model, adapter, None if world.size == 1 else 2, **changed)
        trainer.train()
        trainer.evaluate()
        # Standard deviations of rewards count a completion once for every rank.
        unlike = ("runtime", "per_second", "epoch", "time", "reward_std", "reward/std")
        found[kind] = {
            f"{key} {number}": value
            for number, entry in enumerate(trainer.state.log_history)
            for key, value in entry.items()
            if not any(word in key for word in unlike)
        }
    if world.size == 2:  # dropout draws other numbers on each rank, and completions are shuffled after it
        more = KINDS["GRPO, reference"][3]
        trainer = trainer_of(folder / "dropout", "GRPO", "Llama", True, 2, dropout=0.5, **more | {"max_steps": 4})
        trainer.train()
        found["dropout"] = [entry.get("loss") for entry in trainer.state.log_history]
        found["the page's script"] = printed_by_the_page(folder, TRAINED["GRPO"])
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    numbers = partial(all_numbers, folder=tmp_path_factory.mktemp("generation"))

    def run():
        worlds = run_worlds_after(prepare, numbers, [1, 2], timeout=limit(300))
        assert worlds[2][0]["dropout"] == worlds[2][1]["dropout"]
        rewarded_alike("".join(rank["the page's script"] for rank in worlds[2]))
        return {size: ranks[0] for size, ranks in worlds.items()}

    return once(tmp_path_factory, "generating trainers", run)


@pytest.mark.parametrize("kind", KINDS)
def test_trains_and_evaluates_as_the_stock_trainer(kind, found):
    ours, stock = found[2][kind], found[1][kind]
    assert set(ours) == set(stock)
    assert {"loss 0", "grad_norm 1", "num_tokens 0", "reward 0", "eval_loss 3"} <= set(stock)
    assert stock["grad_norm 0"] > 1e-3
    near = {key: pytest.approx(value, rel=1e-4, abs=1e-5) for key, value in stock.items()}
    assert {key: (ours[key], stock[key]) for key in stock if ours[key] != near[key]} == {}
