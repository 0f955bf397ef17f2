"""Models of transformers over several ranks: equal to the stock class in eager mode on each document alone.

In float64 throughout, so that what transformers rounds to fp32 hides nothing; loss, logits, and the gradient of every
parameter. The suite runs each class in every layout, scheme and number of ranks;
`python -m tests.functional_tests.test_transformers_parity` runs the whole product, and prints the table of
docs/transformers.md.
"""

import contextlib
import copy
import functools
import itertools
import sys
import warnings

import pytest

pytest.importorskip("transformers")
import torch
from torch.nn import functional

from megatron_cp import Packing
from megatron_cp.executor.launch import run_ranks
from megatron_cp.transformers import enable_context_parallel, token_log_probs
from tests.covering import covering
from tests.transformers_cases import MODELS, build, stock, wide, worst_gradient

SIZES, LAYOUTS, SCHEMES = (2, 3, 5), ("contiguous", "zigzag", "balanced"), ("a2a", "exact", "p2p", "all_gather")
MODES = ("headwise", "chunkwise")
PACKS = {"four documents": (37, 1, 130, 22), "fewer tokens than ranks": (1, 2)}
CLOSE = 2e-12


@functools.cache
def case(name, lengths):
    """A model, a pack, and what the stock class makes of it: loss, logits, gradients."""
    model, packing = build(name), Packing(lengths)
    tokens = torch.randint(3, 97, (packing.total,), generator=torch.Generator().manual_seed(1))
    with wide():
        return model, packing, tokens, stock(model, packing, tokens)


def over_ranks(name, lengths, size, layout, scheme, mode):
    """Loss, logits, gradients and log-probabilities over `size` ranks."""
    model, _, tokens, _ = case(name, lengths)

    def main(group):
        own = copy.deepcopy(model)
        cp = enable_context_parallel(own, group, layout=layout, scheme=scheme, linear_mode=mode)
        batch = cp.shard({"input_ids": tokens[None], "labels": tokens[None], "lengths": list(lengths)})
        planned = len(batch.plans.kinds)
        out = own(**batch, num_items_in_batch=max(batch.num_items, 1))
        out.loss.backward()
        assert len(batch.plans.kinds) == planned  # every layer is of a kind that was planned
        log_probs = cp.gather(token_log_probs(out.logits.detach(), batch), batch)[0]
        logits = cp.gather(out.logits.detach(), batch)[0]
        return out.loss.item(), logits, {name: each.grad for name, each in own.named_parameters()}, log_probs

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*compute nothing here.*")
        found = run_ranks(main, size)
    names = {name for _, _, gradients, _ in found for name, each in gradients.items() if each is not None}
    gradients = {name: sum(each[2][name] for each in found if each[2][name] is not None) for name in names}
    return sum(each[0] for each in found), found[0][1], gradients, found[0][3]


def errors(name, lengths, *how):
    """Of the loss, of logits, and the worst of a gradient with its parameter's name."""
    _, packing, tokens, (loss, logits, gradients) = case(name, lengths)
    with wide():
        found = over_ranks(name, lengths, *how)
    expected = torch.cat([log_probs_of(logits[a:b], tokens[a:b]) for a, b in packing.spans()])
    assert (found[3] - expected).abs().max() < CLOSE
    worst = worst_gradient(found[2], gradients) if gradients else (0.0, "")
    return abs(found[0] - loss), (found[1] - logits).abs().max().item(), worst


def log_probs_of(logits, tokens):
    """Of each next token of one document, and 0 for its last."""
    chosen = functional.log_softmax(logits[:-1], dim=-1).gather(-1, tokens[1:, None])[:, 0]
    return torch.cat([chosen, chosen.new_zeros(min(len(tokens), 1))])


def modes_of(name):
    """Of models without linear layers it is not asked."""
    return MODES if name in WITH_LINEAR else MODES[:1]


WITH_LINEAR = (
    "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "KimiLinear", "Mamba2", "Bamba", "FalconH1", "GraniteMoeHybrid", "NemotronH",
    "Lfm2", "Zamba2",
)  # fmt: skip
CASES = covering(list(MODELS), SIZES, LAYOUTS, SCHEMES, MODES, allowed=lambda *case: case[-1] in modes_of(case[0]))


@pytest.mark.parametrize(("name", "size", "layout", "scheme", "mode"), CASES)
@pytest.mark.few(of=lambda name, size, layout, scheme, mode: (name, size, layout, scheme, mode))
def test_equals_the_stock_class_on_each_document_alone(name, size, layout, scheme, mode):
    loss, logits, (gradient, parameter) = errors(name, PACKS["four documents"], size, layout, scheme, mode)
    assert loss < CLOSE
    assert logits < CLOSE
    assert gradient < CLOSE, parameter


FAMILIES = ["Llama", "DeepseekV3", "Qwen3_5", "KimiLinear", "Bamba", "Lfm2"]  # a class of each kind of layer


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAMILIES else pytest.mark.thorough) for name in MODELS]
)
def test_fewer_tokens_than_ranks(name):
    loss, logits, (gradient, parameter) = errors(
        name, PACKS["fewer tokens than ranks"], 5, "contiguous", "exact", "headwise"
    )
    assert loss < CLOSE
    assert logits < CLOSE
    assert gradient < CLOSE, parameter


@pytest.mark.parametrize("name", ["Gemma2", "Qwen3Next", "Bamba"])
def test_a_change_in_one_document_moves_no_bit_of_another(name):
    model, packing, tokens, _ = case(name, PACKS["four documents"])
    changed = tokens.clone()
    changed[40] = (changed[40] + 1) % 97  # of the third document

    def main(group):
        cp = enable_context_parallel(own := copy.deepcopy(model), group, layout="balanced", scheme="exact")
        found = []
        for stream in (tokens, changed):
            batch = cp.shard({"input_ids": stream[None], "lengths": packing.lengths.tolist()})
            with torch.no_grad():
                found.append(cp.gather(own(**batch).logits, batch)[0])
        return found

    before, after = run_ranks(main, 3)[0]
    begin, end = list(packing.spans())[2]
    assert torch.equal(before[:begin], after[:begin])
    assert torch.equal(before[end:], after[end:])
    assert not torch.equal(before[begin:end], after[begin:end])


def _table():
    """All cases, worst by class; and what fp32 in transformers' own code costs it."""
    print("| class | layers | loss | logits | worst gradient | | as it is: gradient | transformers' own fp32 |")
    print("|---|---|--:|--:|--:|---|--:|--:|")
    lengths = PACKS["four documents"]
    for name in sys.argv[1:] or MODELS:
        hows = itertools.product(SIZES, LAYOUTS, SCHEMES, modes_of(name))
        found = [errors(name, lengths, *how) for how in hows]
        loss, logits = max(each[0] for each in found), max(each[1] for each in found)
        gradient, parameter = max(each[2] for each in found)
        model, packing, tokens, exact = case(name, lengths)
        in_fp32 = stock(model, packing, tokens)[2]
        ours = over_ranks(name, lengths, 3, "zigzag", "exact", MODES[0])[2]
        kinds = {type(module).__name__ for module in model.modules()}
        mixers = sorted(
            kind for kind in kinds if kind.endswith(("Attention", "Mixer", "DeltaNet", "MambaLayer", "ShortConv"))
        )
        print(
            f"| {name} | {', '.join(mixers)} | {loss:.0e} | {logits:.0e} | {gradient:.0e} | {parameter} | "
            f"{worst_gradient(ours, in_fp32)[0]:.0e} | {worst_gradient(in_fp32, exact[2])[0]:.0e} |",
            flush=True,
        )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _table()
