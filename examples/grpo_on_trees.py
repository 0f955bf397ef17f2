"""GRPO on 4 prompts of 8 answers over two ranks: each prompt is computed once, with the losses of 32 documents alone.

python examples/grpo_on_trees.py                          # 2 local processes over gloo
torchrun --standalone --nproc-per-node 2 examples/grpo_on_trees.py     # the ranks of a job: NCCL or gloo

The model is a tiny random Qwen3-Next (Gated DeltaNet and gated attention). Answers and rewards are random numbers in
place of a sampler and a judge. The same updates are then made by the stock class on one rank, a document at a time.
"""

import sys

import torch
from torch import Tensor

import megatron_cp as cp
from megatron_cp.executor import RankGroup, in_torchrun, run_ranks, start_torchrun_rank
from megatron_cp.transformers import enable_context_parallel, token_log_probs

PROMPTS, ANSWERS, UPDATES, CLIP = 4, 8, 3, 0.2
Step = tuple[float, float]  # loss, norm of the gradient


def build() -> torch.nn.Module:
    """Builds the same model on every rank."""
    if not torch.cuda.is_available():
        sys.modules.setdefault("fla", None)  # the stock class would take its kernels, which need GPUs
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=211, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=1, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=32, mlp_only_layers=[0, 1, 2, 3], pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config).train()


def sample() -> tuple[list[Tensor], list[int], Tensor]:
    """Returns sequences of a prompt and an answer, the length of each one's prompt, and the answers' advantages."""
    random = torch.Generator().manual_seed(1)
    sequences, prompt_lengths = [], []
    for _ in range(PROMPTS):
        prompt = torch.randint(1, 211, (int(torch.randint(40, 90, (), generator=random)),), generator=random)
        for _ in range(ANSWERS):
            answer = torch.randint(1, 211, (int(torch.randint(1, 40, (), generator=random)),), generator=random)
            sequences.append(torch.cat([prompt, answer]))
            prompt_lengths.append(len(prompt))
    rewards = torch.rand(PROMPTS, ANSWERS, generator=random)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return sequences, prompt_lengths, advantages.flatten()


def loss_of(log_probs: list[Tensor], old: list[Tensor], prompt_lengths: list[int], advantages: Tensor) -> Tensor:
    """Returns GRPO's clipped loss from the log-probability of each token of each sequence."""
    losses = []
    for now, before, length, advantage in zip(log_probs, old, prompt_lengths, advantages, strict=True):
        ratio = (now[length:] - before[length:]).exp()
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean())
    return torch.stack(losses).mean()


def train_on_trees(group: RankGroup) -> list[Step]:
    """Makes the updates over the ranks of a group."""
    sequences, prompt_lengths, advantages = sample()
    model = build()
    parallel = enable_context_parallel(model, group)
    packing = cp.Packing.from_sequences(sequences)
    batch = parallel.shard(packing)
    optimizer, old, steps = torch.optim.SGD(model.parameters(), 0.1), None, []
    for _ in range(UPDATES):
        own = token_log_probs(model(**batch).logits, batch)
        log_probs = packing.split(parallel.gather(own, batch, same_loss=True, are_labels=True)[0])
        old = [part.detach() for part in log_probs] if old is None else old
        loss = loss_of(log_probs, old, prompt_lengths, advantages)
        optimizer.zero_grad()
        loss.backward()
        cp.reduce_gradients(model.parameters(), group)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    if group.rank == 0:
        print(packing)
    return steps


def train_alone() -> list[Step]:
    """Makes the updates on one rank, each sequence as a document of its own through the stock class."""
    sequences, prompt_lengths, advantages = sample()
    model = build()
    optimizer, old, steps = torch.optim.SGD(model.parameters(), 0.1), None, []
    for _ in range(UPDATES):
        log_probs = []
        for ids in sequences:
            rows = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            log_probs.append(torch.nn.functional.pad(rows.gather(-1, ids[1:, None])[:, 0], (1, 0)))
        old = [part.detach() for part in log_probs] if old is None else old
        loss = loss_of(log_probs, old, prompt_lengths, advantages)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    return steps


def main() -> None:
    """Trains both ways and compares them."""
    if in_torchrun():
        group = start_torchrun_rank()
        found, is_first = train_on_trees(group), group.rank == 0
    else:
        found, is_first = run_ranks(train_on_trees, 2, kind="processes")[0], True
    if not is_first:
        return
    alone = train_alone()
    for number, (tree, documents) in enumerate(zip(found, alone, strict=True)):
        print(
            f"update {number}: loss {tree[0]:+.6f} and {documents[0]:+.6f} alone, "
            f"norm of the gradient {tree[1]:.6f} and {documents[1]:.6f}"
        )
    worst = max(abs(a - b) for pair in zip(found, alone, strict=True) for a, b in zip(*pair, strict=True))
    print(f"trees and {PROMPTS * ANSWERS} documents alone differ by at most {worst:.1e}")
    assert worst < 1e-4


if __name__ == "__main__":
    main()
