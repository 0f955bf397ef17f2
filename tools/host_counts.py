"""Counts the host's work for one layer on CUDA: Python calls, operators of torch and launches of kernels.

    python -m tools.host_counts              every layer and scheme, as JSON
    python -m tools.host_counts --only a2a   those whose name has it

One forward and one backward on one rank: bfloat16, 64 tokens in 3 documents, 4 heads of 16, zigzag, 2 ranks (a2a+p2p:
4). No GPU is needed: the layer runs on the runtime and the driver of the emulated device, without its values. torch's
code for CUDA, Triton's launchers and autograd are the real ones; kernels are launched and compute nothing, and messages
go nowhere. Unlike times, counts are the same under any load, so a test holds them. Attention's kernel and the linear
layers' are left out: they are other packages' own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.nullgpu.device import HERE, UnavailableError, environment

ROOT = Path(__file__).resolve().parent.parent
CASES: dict[str, dict[str, Any]] = {
    **{f"attention {scheme}": {"layer": "attention", "cp": 2, "scheme": scheme}
       for scheme in ("a2a", "p2p", "all_gather", "exact")},
    "attention a2a, 2 chunks": {"layer": "attention", "cp": 2, "scheme": "a2a", "head_chunks": 2},
    "attention a2a, contiguous": {"layer": "attention", "cp": 2, "scheme": "a2a", "layout": "contiguous"},
    "attention a2a+p2p": {"layer": "attention", "cp": 4, "scheme": "a2a+p2p"},
    **{f"{layer} {mode}": {"layer": layer, "cp": 2, "scheme": mode}
       for layer in ("gdn", "kda", "mamba", "conv1d") for mode in ("headwise", "chunkwise")},
}  # fmt: skip


def counts(only: str = "") -> dict[str, dict[str, dict[str, int]]]:
    """Returns, by layer and direction, the calls of one rank, counted in a separate process.

    Raises:
        UnavailableError: there is no emulated device here.
    """
    device = environment()
    paths = [path for path in device["PYTHONPATH"].split(os.pathsep) if path != str(HERE / "site")]  # which emulates
    own = {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tools.host_counts", "--child", "--only", only]
    done = subprocess.run(command, cwd=ROOT, env=device | own, stdout=subprocess.PIPE, timeout=300, check=True)
    found: dict[str, dict[str, dict[str, int]]] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- in a process of its own -----------------------------------------------------------------------------------------


def _measured(only: str) -> dict[str, dict[str, dict[str, int]]]:
    import torch

    torch.autograd.set_multithreading_enabled(False)
    torch.bmm = lambda a, b: a.new_empty(len(a), a.shape[1], b.shape[2])  # the emulated device has no cuBLAS
    return {name: _of_case(case) for name, case in CASES.items() if only in name}


def _of_case(options: dict[str, Any]) -> dict[str, dict[str, int]]:
    import torch

    from megatron_cp.executor.run import prepare
    from megatron_cp.softmax.attention import attention
    from megatron_cp.softmax.on_rank import prepare_attention
    from megatron_cp.testing.layers import LAYERS
    from megatron_cp.testing.parity import Case, draw
    from tools.gpu_check.one_rank import StillGroup
    from tools.null_kernels import NullAttention, NullLinear

    sizes = {"lengths": (20, 1, 43), "heads": 4, "groups": 4, "head_dim": 16, "value_head_dim": 16}
    case = Case(**sizes | {"dtype": torch.bfloat16} | options)
    cuda, plan, problem = torch.device("cuda", 0), case.plan(), draw(case)
    group = StillGroup(0, case.cp)
    prepare(plan, 0, cuda)
    inputs = [plan.layout.shard(x, 0).to(cuda).requires_grad_() for x in problem.inputs.values()]
    parameters = {name: x.to(cuda).requires_grad_() for name, x in problem.parameters.items()}
    leaves = [*inputs, *parameters.values()]
    if case.layer == "attention":
        prepare_attention(plan, 0, cuda)

    def forward() -> torch.Tensor:
        if case.layer == "attention":
            return attention(*inputs, plan, group, kernel=NullAttention())
        return LAYERS[case.layer].run(*inputs, plan, group, **parameters, kernel=NullLinear())

    gradient = torch.ones_like(forward())

    def backward(out: torch.Tensor) -> None:
        torch.autograd.grad(out, leaves, gradient, allow_unused=True)

    for _ in range(3):
        backward(forward())
    outs = [forward() for _ in range(3)]
    return {"forward": _counted(forward), "backward": _counted(lambda: backward(outs.pop()))}


def _counted(call: Any) -> dict[str, int]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Operators.seen += 1
            return function(*args, **(kwargs or {}))

    seen = {"call": 0, "c_call": 0}

    def hook(_: Any, event: str, __: Any) -> None:
        if event in seen:
            seen[event] += 1

    kernels = _launches()
    call()
    kernels = _launches() - kernels
    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
    with Operators():
        call()
    return {"calls": seen["call"], "calls of C": seen["c_call"], "operators": Operators.seen, "launches": kernels}


def _launches() -> int:
    """Kernels so far: torch's and Triton's."""
    return int(ctypes.CDLL(None).nullgpu_launches())


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a part of names")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(_measured(options.only)))
        return 0
    try:
        found = counts(options.only)
    except UnavailableError as reason:
        print(f"host_counts: {reason}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
