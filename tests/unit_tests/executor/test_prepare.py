"""`prepare` copies to the device all tables that a layer needs there, but for its kernels', so that no layer has to."""

import sys

import pytest
import torch

from megatron_cp.exchange import device
from megatron_cp.executor.launch import run_ranks
from megatron_cp.executor.run import prepare
from megatron_cp.plan.kinds import KINDS
from megatron_cp.plan.schemes import MODES, SCHEMES
from megatron_cp.testing.parity import Case, run_layer
from tests.covering import covering

WAYS = [("attention", scheme) for scheme in SCHEMES] + [(kind, mode) for kind in KINDS for mode in MODES]
CASES = [(4, *case) for case in covering(WAYS, ("zigzag", "contiguous", "random"), (1, 4))]
CASES += [(1, ("attention", "a2a"), "random", 1), (1, ("gdn", "headwise"), "random", 1)]


@pytest.mark.parametrize(("cp_size", "way", "layout", "align"), CASES, ids=str)
@pytest.mark.few(of=lambda cp_size, way, layout, align: (cp_size, way, layout, align))
def test_no_layer_copies_a_table_after_it(cp_size, way, layout, align, monkeypatch):
    layer, scheme = way
    case = Case(layer, cp_size, (7, 1, 40, 0, 13), layout, scheme=scheme, align=align, hidden_size=32)
    copied = []

    def noting(table, *args):
        copied.append(sys._getframe(1).f_code.co_name)
        return device_copy(table, *args)

    device_copy = device.on_device
    for name, module in list(sys.modules.items()):
        is_kernel = name.startswith(("megatron_cp.linear.kernels", "megatron_cp.softmax.kernels"))
        if not is_kernel and name.startswith("megatron_cp.") and vars(module).get("on_device") is device_copy:
            monkeypatch.setattr(module, "on_device", noting)
    plan = case.plan()
    monkeypatch.setattr(Case, "plan", lambda _: plan)
    for rank in range(cp_size):
        prepare(plan, rank, torch.device("cpu"))
    before = len(copied)
    run_ranks(run_layer, cp_size, case)
    assert copied[before:] == []
    assert before or scheme == "p2p" or layout == "contiguous"  # a ring passes on rows as they stand
