"""`megatron-cp bench packs`: what it reports, and what it refuses."""

import numpy as np
import pytest

from megatron_cp.cli.main import main
from megatron_cp.planner.predict.pack_cost import PackCost
from tests.commands import reported


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Makes some hundred text files with a heavy tail."""
    folder = tmp_path_factory.mktemp("corpus")
    for number, length in enumerate(np.random.default_rng(0).lognormal(5, 1.5, 300).astype(int) + 1):
        (folder / f"{number}.txt").write_text("a" * int(length))
    return folder


def test_reports_every_way_in_every_cell(corpus):
    pytest.importorskip("megatron.core", reason="pip install '.[megatron]'")
    options = ["--cp", "2", "--batches", "2", "--tokens-per-rank", "512", "--corpus", str(corpus)]
    printed, data = reported(["bench", "packs", *options])
    assert [(cell["replicas"], cell["cp"]) for cell in data["cells"]] == [(2, 2), (4, 2), (8, 2)] + [(8, 2)] * 3
    for cell in data["cells"]:
        excess = cell["excess"]
        assert set(excess) == {"best fit", "even", "megatron-core", "best fit, barrier", "even, barrier"}
        assert all(-1e-9 <= value["mean"] <= value["worst"] + 1e-9 for value in excess.values())
        for kind in ("", ", barrier"):
            assert excess[f"even{kind}"]["worst"] <= excess[f"best fit{kind}"]["worst"] + 1e-9
    assert 0 < data["even_over_megatron_mean"] < 1
    assert data["missing"] == {}
    assert printed.count("| DP 8 | 2 |") == 4


def test_a_step_of_megatron_core_is_its_groups_one_after_another():
    pytest.importorskip("megatron.core", reason="pip install '.[megatron]'")
    from megatron_cp.apps.bench.peers.hybrid_cp import hybrid_step

    tokens = PackCost(0, 1, 0)
    # Four samples of equal length, each on a rank of its own, side by side; then one that needs all four.
    assert hybrid_step([8, 8, 8, 8], 4, 8, tokens, 0.0, 1) == 8
    assert hybrid_step([8, 8, 8, 8], 4, 8, tokens, 0.5, 1) == 8.5
    assert hybrid_step([32], 4, 8, tokens, 0.0, 1) == 8
    assert hybrid_step([32], 4, 8, tokens, 0.0, 4) == 32  # what takes 32 on four ranks


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--cp", "3"], "--cp: got 3; allowed: powers of two"),
        (["--model", "tiny"], "--model: got 'tiny'; allowed: nothing with bench packs"),
        (["--lengths", "3,4"], "--lengths: got"),
        (["--corpus", "no/such"], "--corpus: got 'no/such'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_rejects_what_it_does_not_measure(options, says, capsys):
    assert main(["bench", "packs", *options]) == 2
    assert says in capsys.readouterr().err


def test_its_option_is_refused_elsewhere(capsys):
    assert main(["bench", "wire", "--batches", "3"]) == 2
    assert "--batches: got 3; allowed: only with bench packs" in capsys.readouterr().err
