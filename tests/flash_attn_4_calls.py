"""Prints shapes of the results of kernel `flash_attn_4`, whose calls the package compiles without a GPU.

    python -m tests.flash_attn_4_calls DEVICE

It is a process of its own, because the package reads the device to compile for as it is imported.
"""

import json
import os
import sys

import torch

# Sizes of key and value heads, the soft cap, and the limits of the window, by the device.
CALLS = {
    "sm_90": [
        (64, 64, 0.0, (-1, 0)), (72, 72, 0.0, (-1, -1)), (128, 128, 30.0, (5, 0)), (192, 192, 0.0, (-1, 0)),
        (256, 256, 30.0, (-1, 3)),
    ],
    "sm_100": [
        (64, 64, 0.0, (-1, 0)), (72, 72, 0.0, (-1, -1)), (128, 128, 30.0, (5, 0)), (192, 128, 0.0, (5, 3)),
    ],
}  # fmt: skip


def compile_calls(device):
    os.environ |= {"FLASH_ATTENTION_ARCH": device, "CUTE_DSL_ARCH": f"{device}a", "FLASH_ATTENTION_NUM_SMS": "132"}
    import cutlass.utils
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

    from megatron_cp.softmax.kernels import AttentionCall
    from megatron_cp.softmax.kernels.common.varlen_calls import DeviceAxis, DeviceSegments
    from megatron_cp.softmax.kernels.flash_attn_4 import FlashAttention4

    class Device:  # which Blackwell's scheduler asks
        get_device_multiprocessor_count = staticmethod(lambda: 132)

    cutlass.utils.HardwareInfo = Device
    from flash_attn.cute import utils

    by_memory = utils.convert_from_dlpack_leading_static

    def by_other_memory(x, **keywords):  # a deterministic backward's semaphores are described by their memory
        with unset_fake_temporarily():
            return by_memory(torch.zeros(x.shape, dtype=x.dtype), **keywords)

    utils.convert_from_dlpack_leading_static = by_other_memory
    torch.cuda.get_device_capability = lambda which: (int(device[3:-1]), 0)
    kernel, shapes = FlashAttention4(), []
    with FakeTensorMode():
        for number, (key, value, softcap, window) in enumerate(CALLS[device]):
            torch.use_deterministic_algorithms(number % 2 == 1)
            on = {"dtype": torch.bfloat16, "device": "cuda"}
            q, k, v = (torch.empty(size, **on) for size in ((100, 4, key), (90, 2, key), (90, 2, value)))
            offsets = torch.empty(4, dtype=torch.int32, device="cuda")
            segments = DeviceSegments(window, *(DeviceAxis(slice(0, len(x)), offsets, len(x), []) for x in (q, k)))
            call = AttentionCall(0.1, key, value, torch.bfloat16, torch.device("cuda"), softcap=softcap)
            assert kernel.head_sizes(call) == (key, value)
            out, lse = kernel.attend(q, k, v, segments, call)
            gradients = kernel.attend_backward(torch.empty_like(out), q, k, v, out, lse, segments, call)
            shapes.append([tuple(x.shape) for x in (out, lse, *gradients)])
    return shapes


if __name__ == "__main__":
    print(json.dumps(compile_calls(sys.argv[1])))
