"""Tests of stacks of Megatron's layers with our options, on threads: each equals one rank, or a flag is refused."""

import pytest

pytest.importorskip("megatron.core")

from tests.entries_megatron import Case, outcomes
from tests.shared import once

CASES = (
    # Experts inside redistributed runs, whose pads are other rows than the batch's.
    Case("gpt_gdn", lengths=(5, 67, 17), experts=True, linear_mode="redistribute", align=8),
    Case("GEM*", 3, linear_mode="redistribute", layout="balanced", align=8, comm_type="exact"),
    Case("gpt", 4, comm_type="auto", sizes=(2, 2), transport="hierarchical"),
    Case("mla", 3, comm_type="all_gather", latent_mode="absorb", layout="random", transport="pairwise"),
    Case("D-", comm_type="exact", transport="shared_memory"),
    Case("GM*", comm_type="a2a", linear_mode="headwise", head_chunks=1, layout="contiguous"),
)
REFUSED = {
    "--cp-head-chunks": Case("gpt", comm_type="p2p", head_chunks=2),
    "--hierarchical-context-parallel-sizes": Case("gpt", 4, comm_type="exact", sizes=(2, 2)),
    "--cp-latent-mode": Case("D-", comm_type="exact", latent_mode="expand"),
    "--cp-comm-type": Case("D-", comm_type="a2a"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    cases = [*CASES, *REFUSED.values()]
    return once(tmp_path_factory, "megatron_entries", lambda: dict(zip(cases, outcomes(cases), strict=True)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_rank_with_the_options_that_were_asked_for(case, found):
    outcome = found[case]
    assert outcome.refusal is None
    assert outcome.worst <= 1e-6
    for plan in outcome.plans:
        assert plan["transport"] == case.transport
        if plan["kind"] != "attention":
            assert plan["is_redistributed"] == (case.linear_mode == "redistribute")
        elif case.comm_type != "auto":
            assert plan["scheme"] == case.comm_type
        elif case.sizes:
            assert plan["scheme"].startswith("a2a+")


@pytest.mark.parametrize("flag", REFUSED)
def test_rejects_by_the_flags_name(flag, found):
    assert found[REFUSED[flag]].refusal.argument == flag
