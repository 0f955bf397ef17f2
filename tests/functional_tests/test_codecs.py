"""Codecs of heads, keys and values under every layer: an error that is stated, and codes made once."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from megatron_cp.exchange.codec import CODECS
from megatron_cp.exchange.coding import decode_together, encode_together
from megatron_cp.executor import transfers
from megatron_cp.executor.launch import run_ranks
from megatron_cp.plan.attention_program import ComputeOwn, ComputeRemote
from megatron_cp.testing.parity import TOLERANCES, Case, compare, draw, judge, run_layer
from megatron_cp.testing.tolerances import CODEC_TOLERANCES
from tests.functional_tests.test_wire_options import DOUBLE, LENGTHS, assert_same
from tests.random_tiles import assign_at_random


@pytest.mark.parametrize("codec", CODEC_TOLERANCES)
@pytest.mark.parametrize("layer", ["attention", "gdn", "kda", "mamba"])
@pytest.mark.few
def test_errors_of_codecs_are_stated_and_no_smaller_than_they_must_be(layer, codec):
    case = Case(
        layer, 3, (7, 1, 130, 64, 2, 200), scheme="a2a" if layer == "attention" else "headwise", heads=6, groups=6,
        head_dim=128, value_head_dim=128, codec=codec, head_chunks=2, transport="pairwise",
    )  # fmt: skip
    result = compare(case)
    assert result.passed, result.errors
    assert max(result.errors.values()) > 1e-3  # it was coded


@pytest.mark.parametrize("codec", ["fp8", "int8"])
@pytest.mark.parametrize("scheme", ["p2p", "all_gather", "exact", "exact_by_host", "tiled"])
@pytest.mark.few
def test_every_rank_computes_with_keys_that_their_owner_coded_once(scheme, codec):
    """The bits are those of the uncoded layer with decoded keys; only tiles are assigned by what rows cost."""
    target = CODECS[codec].forward
    for size, layout, dtype in ((2, "zigzag", torch.bfloat16), (5, "random", torch.float32), (3, "balanced", DOUBLE)):
        case = Case("attention", size, LENGTHS, layout, scheme=scheme, dtype=dtype, num_hosts=2, head_dim=12,
                    value_head_dim=7)  # fmt: skip
        problem = draw(case)
        q, k, v = problem.inputs.values()
        (k,), (v,) = (decode_together(encode_together([x], target, 16), x.shape[-1:], target, dtype) for x in (k, v))
        decoded = replace(problem, inputs={"q": q, "k": k, "v": v})
        coded = run_ranks(run_layer, size, replace(case, codec=codec), problem)
        if scheme != "tiled":
            assert_same(coded, run_ranks(run_layer, size, case, decoded))
        elif dtype == DOUBLE:
            for mine, theirs in zip(coded, run_ranks(run_layer, size, case, decoded), strict=True):
                assert all((mine[name] - x).abs().max() < 1e-12 for name, x in theirs.items() if x.numel())
        assert not torch.equal(coded[0]["out"], run_ranks(run_layer, size, case, problem)[0]["out"])


def test_keys_of_a_message_are_decoded_once_for_own_and_remote_queries(monkeypatch):
    case = Case("attention", 3, LENGTHS, "zigzag", scheme="tiled", head_dim=32, codec="fp8", dtype=torch.bfloat16)
    assign_at_random(monkeypatch)
    step, decoded = case.plan().attend, []
    computed = [
        Counter(do.keys for do in step.program(forward=forward) if isinstance(do, ComputeOwn | ComputeRemote))
        for forward in (True, False)
    ]
    assert max(max(each.values()) for each in computed) == 2
    decode = transfers.decoded_keys
    monkeypatch.setattr(transfers, "decoded_keys", lambda *args: decoded.append(args) or decode(*args))
    run_ranks(run_layer, 3, case)
    assert len(decoded) == 3 * sum(key is not None for each in computed for key in each)


def test_gradients_of_fp8_e5m2_are_coarser_than_its_activations():
    case = Case("attention", 2, (200, 57), scheme="a2a", heads=4, groups=4, head_dim=64, value_head_dim=64)
    e4m3, e5m2 = (compare(replace(case, codec=codec)).errors for codec in ("fp8", "fp8_e5m2"))
    assert e4m3["out"] == e5m2["out"]
    assert e5m2["d_v"] > 1.2 * e4m3["d_v"]


@pytest.mark.parametrize(("layer", "plain"), [("gdn", {"beta", "alpha"}), ("mamba", {"dt"}), ("kda", {"g", "beta"})])
def test_what_a_recurrence_multiplies_up_travels_as_it_is(layer, plain):
    (inbound, _), _ = (
        Case(layer, 2, LENGTHS, scheme="headwise", codec="fp8", head_dim=64).plan().exchanges(forward=True)
    )
    names = [block.name for block in inbound.sections.blocks]
    assert {name for name, coded in zip(names, inbound.coded([2] * len(names)), strict=True) if not coded} == plain


@pytest.mark.parametrize("size", [16, 4])
def test_where_nothing_is_coded_no_error_is_allowed_for_it(size):
    """Heads of 4 features are no shorter coded."""
    sizes = {"heads": 4, "groups": 4, "head_dim": size, "value_head_dim": size, "dtype": torch.bfloat16}
    case = Case("gdn", 2, (9, 20), scheme="headwise", codec="int8", **sizes)
    same = {name: torch.ones(3) for name in ("out", "d_q", "d_k", "d_v")}
    assert case.codes == ("nothing is coded" not in str(case)) == (size == 16)
    assert judge(case, same, same).tolerance == (CODEC_TOLERANCES["int8"] if size == 16 else TOLERANCES[case.dtype])
