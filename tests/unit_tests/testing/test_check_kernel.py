"""`check_kernel` names what is wrong with a kernel, and finds nothing wrong with one that is right."""

import pytest
import torch

from megatron_cp.softmax.kernels.cpu import CpuFlashAttention
from megatron_cp.softmax.kernels.reference import ReferenceAttention
from megatron_cp.testing import check_kernel
from tests.unit_tests.softmax.test_kernels import EmulatedFlash


class OnlyUsual(ReferenceAttention):
    """A right kernel that takes few calls, so that the test of those that are wrong is short."""

    name = "mine"

    def refusal(self, call):
        usual = (torch.float64, 16, 16, 0.0, 0.0)
        found = call.dtype, call.head_dim, call.value_head_dim, call.softcap, call.dropout
        return None if found == usual else "takes the usual calls alone"


class InSingle(EmulatedFlash):
    def refusal(self, call):
        return None if call.dtype == torch.float32 and not call.dropout else "has float32 without dropout alone"


@pytest.mark.parametrize("kernel", [CpuFlashAttention(), OnlyUsual(), InSingle()], ids=lambda kernel: kernel.name)
def test_nothing_is_wrong_with_a_right_kernel_and_its_refusals_are_returned(kernel):
    refused = check_kernel(kernel, "cpu")
    if kernel.name == "cpu":
        assert list(refused) == ["softcap, float64", "dropout, float64", "scale -0.5, float64"]
        assert "has no soft cap" in refused["softcap, float64"]
    if kernel.name == "mine":
        assert set(refused.values()) == {"takes the usual calls alone"}
        assert "values of 17 features (a gradient of the log-sum-exp), float64" in refused


class WrongOutput(OnlyUsual):
    def forward(self, out, *args):
        super().forward(out, *args)
        out.mul_(1 + 1e-9)


class InBase2(OnlyUsual):
    def forward(self, out, lse, *args):
        super().forward(out, lse, *args)
        lse.div_(0.6931471805599453)


class WithoutScale(OnlyUsual):
    def backward(self, dq, *args):
        super().backward(dq, *args)
        dq.div_(args[-2].scale)


class SeesTheFuture(OnlyUsual):
    def forward(self, out, lse, q, k, v, tiles, *args):
        wide = tiles.bands.copy()
        wide[:, 5] += 1
        super().forward(out, lse, q, k, v, type(tiles)(wide, tiles.q_tokens, tiles.k_tokens), *args)


class OfItsOwnKeys(OnlyUsual):
    """Takes the row sums of the part that it computes, as public functions of other packages do."""

    def backward(self, dq, dk, dv, dout, q, k, v, out, lse, *args):
        own, own_lse = torch.empty_like(out), torch.empty_like(lse)
        self.forward(own, own_lse, q, k, v, *args)
        super().backward(dq, dk, dv, dout, q, k, v, own, own_lse, *args)


class WritesSeenRows(OnlyUsual):
    def forward(self, out, lse, q, *args):
        rows = args[2].query_rows
        super().forward(own := torch.empty_like(out), own_lse := torch.empty_like(lse), q, *args)
        out[rows], lse[:, rows] = own[rows], own_lse[:, rows]


class AddsToNothing(OnlyUsual):
    def backward(self, dq, *args):
        total = torch.empty_like(dq)
        super().backward(dq, *args)
        dq.copy_(total.add_(dq))


class ChangesKeys(OnlyUsual):
    def forward(self, out, lse, q, k, *args):
        super().forward(out, lse, q, k, *args)
        k.mul_(2)


class WritesBefore(OnlyUsual):
    def backward(self, dq, dk, *args):
        super().backward(dq, dk, *args)
        dk.as_strided(dk.shape, dk.stride(), dk.storage_offset() - dk.stride(0))[0] = 0


class Raises(OnlyUsual):
    def backward(self, *args):
        raise RuntimeError("no such kernel image")


class RefusesAll(OnlyUsual):
    def refusal(self, call):
        return "needs a Cray"


WRONG = {
    WrongOutput: r"full, float64: out differs by \S+, allowed are ",
    InBase2: "causal, float64: lse differs by",
    WithoutScale: "several bands, float64: dq differs by",
    SeesTheFuture: "causal, float64: out differs by",
    OfItsOwnKeys: "full, float64: dq, of two parts of the keys differs by",
    WritesSeenRows: r"queries that see nothing, float64: out is not written in \d+ of \d+ elements",
    AddsToNothing: r"dq is NaN in \d+ of \d+ elements: of memory that nothing has written\?",
    ChangesKeys: "forward changes its input k",
    WritesBefore: "backward writes outside of dk",
    Raises: "backward raised RuntimeError: no such kernel image",
    RefusesAll: "every call is refused: needs a Cray",
}
# What these have right, so that nothing is said of it; most have the gradient of values.
RIGHT = {WrongOutput: "dk ", OfItsOwnKeys: ": dq differs", SeesTheFuture: "is NaN"}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda kernel: kernel.__name__)
def test_a_wrong_kernel_is_told_what_is_wrong(wrong):
    with pytest.raises(AssertionError, match=WRONG[wrong]) as error:
        check_kernel(wrong())
    assert str(error.value).startswith("kernel 'mine'\n")
    assert RIGHT.get(wrong, "dv ") not in str(error.value)
