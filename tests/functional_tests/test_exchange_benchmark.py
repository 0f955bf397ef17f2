"""The exchange benchmark runs, and its counts are what the project claims."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="pip install 'megatron_cp[megatron]'")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "exchange.py"
MEGATRON = "megatron-core"
PASSES = {"zigzag": 2, "contiguous": 1}
EPSILON = 0.01  # rows are padded to 16 bytes


def run(*options):
    return subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=200)


def test_counts_are_what_is_claimed():
    done = run("--tokens", "64", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["stages"]
    passes = {(row["stage"], row["contender"], row["gradients"]): row["copy_passes"] for row in rows}

    for layout, claimed in PASSES.items():
        for gate in ("with the gate", "without the gate"):
            ours = f"{layout}, {gate}"
            assert claimed - EPSILON < passes["inbound forward", ours, ""] <= claimed + EPSILON
            assert claimed - EPSILON < passes["inbound backward", ours, "in place"] <= claimed + EPSILON
            assert passes["inbound backward", ours, "separate"] <= 2 + EPSILON
        assert passes["outbound forward", layout, ""] <= claimed + EPSILON
        assert passes["outbound backward", layout, ""] <= claimed + EPSILON
    assert passes["inbound forward", MEGATRON, ""] >= 3
    assert passes["inbound backward", MEGATRON, "in place"] >= 5

    for row in rows:
        assert row["collectives"] == 1
        assert row["contender"] == MEGATRON or row["host_syncs"] == 0


def test_rejects_what_megatron_cannot_run():
    done = run("--cp", "3")
    assert done.returncode == 2
    assert "divisors of 16" in done.stderr
