"""Megatron's own loop, data sets and blend: the losses of a stock job are ours, on one rank and on several."""

import pytest

pytest.importorskip("megatron.training")
from tests.functional_tests import stock_job


@pytest.mark.timeout(900)
@pytest.mark.thorough
def test_losses_of_a_stock_job_are_the_same_over_ranks():
    """The job runs without --calculate-per-token-loss, as Megatron's own launches do."""
    runs = stock_job.compared({"stock": (stock_job.STOCK, 1), "ours": (stock_job.OURS, 3)}, 2, [])
    steps, evaluations = runs["stock"]
    assert len(steps) == 2
    assert len(evaluations) == 1
    assert runs["ours"][0] == pytest.approx(steps, abs=1e-5)
    assert runs["ours"][1] == pytest.approx(evaluations, abs=1e-5)


@pytest.mark.timeout(900)
@pytest.mark.thorough
def test_step_of_the_page_trains_packed_documents_the_same_over_ranks():
    """The page's diff of Megatron's pretrain_gpt.py: its data set says where documents of a sample begin."""
    packed = ["--calculate-per-token-loss"]
    runs = stock_job.compared({"one": (stock_job.PAGE, 1), "two": (stock_job.PAGE, 2)}, 2, packed)
    assert [len(losses) for losses in runs["one"]] == [2, 1]
    for ours, one in zip(runs["two"], runs["one"], strict=True):
        assert ours == pytest.approx(one, abs=1e-5)
