"""Models of transformers on sequences with common beginnings: equal to the stock class on each sequence alone.

In float64: log-probabilities of every token, the loss, and the gradient of every parameter.
"""

import copy

import pytest

pytest.importorskip("transformers")
import torch

from megatron_cp import Packing
from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import enable_context_parallel, token_log_probs
from tests.refusals import rejects
from tests.transformers_cases import MODELS, build, gradients_of, stock, summed, wide, worst_gradient

QUICK = ("Qwen3Next", "Gemma2", "NemotronH")  # windows, and each kind of linear layer with a state
CLOSE = 2e-12


def sequences():
    random = torch.Generator().manual_seed(2)

    def drawn(count):
        return torch.randint(3, 97, (count,), generator=random)

    prompt, call = drawn(23), drawn(9)
    return [torch.cat([prompt, drawn(5)]), drawn(7), *(torch.cat([prompt, call, drawn(n)]) for n in (1, 11)), prompt]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in MODELS]
)
def test_each_sequence_as_if_it_were_alone(name):
    model, given = build(name), sequences()
    alone, packing = Packing([len(each) for each in given]), Packing.from_sequences(given, min_shared=2)
    assert (packing.total, alone.total) == (56, 134)
    labels = sum(len(each) - 1 for each in given)

    def main(group):
        own = copy.deepcopy(model)
        cp = enable_context_parallel(own, group)
        batch = cp.shard(packing)
        assert batch.num_items == labels
        assert "labels" not in batch
        log_probs = cp.gather(token_log_probs(own(**batch).logits, batch), batch, same_loss=True, are_labels=True)[0]
        loss = -torch.cat(packing.split(log_probs)).sum() / labels
        loss.backward()
        return loss.item(), gradients_of(own)

    with wide():
        found = run_ranks(main, 3)
        loss, _, gradients = stock(model, alone, torch.cat(given))
    assert found[0][0] == found[1][0]
    assert abs(found[0][0] - loss) < CLOSE
    error, parameter = worst_gradient(summed([each for _, each in found]), gradients)
    assert error < CLOSE, parameter


def test_rejects_what_has_no_meaning_in_trees():
    packing = Packing.from_sequences(sequences())
    cp = enable_context_parallel(build("Llama", dtype=torch.float32), None)
    ids = torch.from_numpy(packing.tokens.copy())[None]
    rejects("shift_labels", cp.shard, {"input_ids": ids, "shift_labels": ids, "lengths": packing})
    positions = torch.arange(packing.total)[None]
    rejects("position_ids", cp.shard, {"input_ids": ids, "lengths": packing, "position_ids": positions})
    rejects("are_labels", cp.gather, ids, cp.shard({"input_ids": ids, "labels": ids}), are_labels=True)
    batch = cp.shard({"input_ids": ids, "lengths": packing})
    rejects("are_labels", cp.gather, ids, batch)
    rejects("labels", token_log_probs, torch.zeros(1, packing.total, 97), batch)
