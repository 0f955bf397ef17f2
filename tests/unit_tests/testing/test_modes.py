"""Ranks that are threads enter a mode at once: before that, one of them has met every operator."""

import threading

import torch

from megatron_cp.testing import modes

aten = torch.ops.aten


def test_one_thread_meets_every_operator_once(monkeypatch):
    met = []

    def note(self, func, types, args=(), kwargs=None):
        met.append(func)
        raise modes._RegisteredError

    monkeypatch.setattr(modes._Register, "__torch_dispatch__", note)
    modes._register_operators.cache_clear()
    threads = [threading.Thread(target=modes.register_operators) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    called = {
        aten.resize_.default, aten.empty.memory_format, aten.index_select.default, aten.add_.Tensor, aten.mm.out,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten.promote_types.default, aten.flatten.using_ints,  # composite: no tensor, or one that autograd does not know
    }  # fmt: skip
    assert called <= set(met)
    assert 1.1 * len(set(met)) > len(met) > 2000
