"""TRL's GRPOTrainer and RLOOTrainer over two ranks beside one: losses, gradient norms, and all metrics they log."""

import importlib.util
import os
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
    rewarded_alike,
)
from tests.limits import limit
from tests.shared import once
from tests.transformers_cases import HYBRID

if not all(importlib.util.find_spec(name) for name in ("accelerate", "datasets", "peft", "transformers", "trl")):
    pytest.skip("the trainers are not installed", allow_module_level=True)

pytestmark = pytest.mark.timeout(600)

# The trainer, the model, an adapter (whose base is the reference), and other arguments.
KINDS = {
    "GRPO": ("GRPO", "Llama", False, {"gradient_accumulation_steps": 2, "scheme": "auto"}),
    "GRPO, hybrid": ("GRPO", "Qwen3Next", False, {}),
    "GRPO, reference": ("GRPO", "Llama", True, {"beta": 0.1, "num_iterations": 2, "loss_type": "grpo"}),
    "RLOO, reference": ("RLOO", "Llama", True, {"beta": 0.1}),
    "GRPO, tools": ("GRPO", "Llama", False, {"max_completion_length": 20, "generation_kwargs": {"max_new_tokens": 5}}),
}
REPLICAS = ("GRPO", "Llama", True, {"beta": 0.1, "gradient_accumulation_steps": 2})
# A conversation's words, in which TRL looks for calls of tools and for their answers.
TEMPLATE = (
    "{% for m in messages %}{{ m.content }} {% for c in m.tool_calls or [] %}{{ c.function.name }} "
    "{{ c.function.arguments }} {% endfor %}{% if m.role == 'tool' %}{{ m.name }} {% endif %}{% endfor %}"
)
NEAR = {"rel": 1e-4, "abs": 1e-5}
# Standard deviations of rewards count a completion once for every rank.
UNLIKE = ("runtime", "per_second", "epoch", "time", "reward_std", "reward/std")


def reward(completion_ids, **others):
    """Prefers completions with small tokens; it is another one on every rank, and a group's first rank's counts."""
    import torch

    group, rank = divmod(int(os.environ["RANK"]), int(os.environ["GROUP_SIZE"]))
    torch.rand(1 + group + 7 * rank)  # ranks have drawn other random numbers when completions are shuffled
    shift = 1000 * group + 500 * rank
    return [shift + sum(token < 40 for token in tokens) / len(tokens) for tokens in completion_ids]


def look_up(token: int) -> str:
    """Looks up three tokens that belong to a token. It fails for every fifth one, and on every rank but the first.

    Args:
        token: the token.
    """
    import torch

    torch.rand(3)
    assert int(os.environ["RANK"]) == 0, "this answer would be another one"
    if token % 5 == 0:
        raise KeyError(f"t{token}")
    return f"t{token} t{(token + 1) % 97} t{(token + 2) % 97}"


def parsed(tokenizer, ids, prefix=None, tools=None):
    """A completion in words that calls the tool of the trainer if its last token is large."""
    function = {"name": tools[0].__name__, "arguments": {"token": ids[-1]}}
    calls = {"tool_calls": [{"type": "function", "function": function}]} if ids[-1] > 50 else {}
    return {"role": "assistant", "content": tokenizer.decode(ids), **calls}


def roll_out(prompts, trainer):
    """Draws the first five tokens of completions, which are more on every rank but the first."""
    import torch

    completions = torch.randint(3, 97, (len(prompts), 5 + int(os.environ["RANK"]))).tolist()
    ids = trainer.processing_class.apply_chat_template(prompts, tokenize=True)["input_ids"]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def trainer_of(folder, name, model, adapter, sizes, dropout=0.0, given=None, scheme="a2a", **changed):
    """Makes our trainer over ranks of these sizes, or the stock trainer if they are None. One kind prices schemes."""
    import torch
    import trl
    from accelerate.state import AcceleratorState
    from datasets import Dataset
    from peft import LoraConfig

    from megatron_cp.transformers import ContextParallelGRPOMixin, Parallelism
    from tests.transformers_cases import build, tokenizer

    AcceleratorState._reset_state(True)
    kind, config, parallelism, more = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config"), None, {}
    if sizes is not None:
        kind, parallelism = type("Ours", (ContextParallelGRPOMixin, kind), {}), Parallelism(**sizes)
        more = {"scheme": scheme}
    args = config(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, log_level="error", seed=0, logging_steps=1,
        learning_rate=0.1, optim="sgd", parallelism_config=parallelism, save_strategy="no", bf16=False,
        per_device_train_batch_size=4, per_device_eval_batch_size=4, num_generations=2,
        router_aux_loss_coef=0.0, **{"max_steps": 2, "max_completion_length": 6} | changed,
    )  # fmt: skip
    model = build(model, dtype=torch.float32, **(HYBRID if model == "Qwen3Next" else {"num_hidden_layers": 1}))
    model.set_attn_implementation("eager")
    random = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 97, (2 + n % 5,), generator=random).tolist() for n in range(8)]
    words, text = [" ".join(f"t{token}" for token in tokens) for tokens in prompts], tokenizer()
    if given == "tools":
        words = [[{"role": "user", "content": each}] for each in words]
        text.chat_template, text.response_template = TEMPLATE, "for `parsed`"
        trl.trainer.grpo_trainer.parse_response = parsed
        more |= {"tools": [look_up], "rollout_func": roll_out}
    data = Dataset.from_list([{"prompt": each} for each in words])
    own = {
        "peft_config": LoraConfig(
            r=4, lora_dropout=dropout, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
    }
    return kind(
        model=model, args=args, reward_funcs=reward, train_dataset=data, eval_dataset=data.select(range(4)),
        processing_class=text, **(own if adapter else {}), **more,
    )  # fmt: skip


def set_ranks(world, sizes):
    """accelerate finds its ranks in the environment, and the reward the size of a group."""
    as_launched(world, 29994, GROUP_SIZE=str((sizes or {}).get("cp_size", 1)))


def trained(trainer):
    """Trains and evaluates, and returns all numbers that are logged."""
    trainer.train()
    trainer.evaluate()
    return logged(trainer, UNLIKE)


def all_numbers(world, folder):
    """Returns what each trainer logs: stock ones on one rank, ours on two."""
    found, sizes = {}, None if world.size == 1 else {"cp_size": 2}
    set_ranks(world, sizes)
    for kind, (name, model, adapter, changed) in KINDS.items():
        given = kind.partition(", ")[2]
        found[kind] = trained(trainer_of(folder / str(world.size), name, model, adapter, sizes, given=given, **changed))
    if world.size == 2:  # dropout draws other numbers on each rank, and completions are shuffled after it
        more = KINDS["GRPO, reference"][3]
        trainer = trainer_of(folder / "dropout", "GRPO", "Llama", True, sizes, dropout=0.5, **more | {"max_steps": 4})
        trainer.train()
        found["dropout"] = [entry.get("loss") for entry in trainer.state.log_history]
        found["the page's script"] = printed_by_the_page(folder, TRAINED["GRPO"])
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    numbers = partial(all_numbers, folder=tmp_path_factory.mktemp("generation"))

    def run():
        worlds = {n: run_ranks(numbers, n, kind="processes", timeout=limit(300)) for n in (1, 2)}
        assert worlds[2][0]["dropout"] == worlds[2][1]["dropout"]
        rewarded_alike("".join(rank["the page's script"] for rank in worlds[2]))
        return {size: ranks[0] for size, ranks in worlds.items()}

    return once(tmp_path_factory, "generating trainers", run)


@pytest.mark.parametrize("kind", KINDS)
def test_trains_and_evaluates_as_the_stock_trainer(kind, found):
    ours, stock = found[2][kind], found[1][kind]
    assert {"loss 0", "grad_norm 1", "num_tokens 0", "reward 0", "eval_loss 3"} <= set(stock)
    assert stock["grad_norm 0"] > 1e-3
    assert_near(ours, stock, **NEAR)
    if kind == "GRPO, tools":
        assert 0 < stock["tools/call_frequency 0"] < 2
        assert 0 < stock["tools/failure_frequency 0"] + stock["tools/failure_frequency 1"] < 2


def replicas(world, folder):
    """Returns what the stock trainer logs on two ranks, and ours on two groups of two."""
    sizes = None if world.size == 2 else {"dp_shard_size": 2, "cp_size": 2}
    set_ranks(world, sizes)
    name, model, adapter, changed = REPLICAS
    return trained(trainer_of(folder / str(world.size), name, model, adapter, sizes, **changed))


@pytest.mark.thorough
def test_two_groups_train_as_the_stock_trainer_on_two_ranks(tmp_path):
    ours, stock = (run_ranks(replicas, ranks, tmp_path, kind="processes", timeout=limit(300))[0] for ranks in (4, 2))
    assert stock["grad_norm 0"] > 1e-3
    assert_near(ours, stock, **NEAR)
