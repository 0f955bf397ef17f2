"""The host's time for one layer, forward and backward, in this checkout and in another: side by side.

    python tools/host_time.py --against ../before              every layer, scheme and mode
    python tools/host_time.py --against ../before --only p2p   those whose name has it
    python tools/host_time.py --against ../before --calls      calls of functions by one rank, which no load changes

64 tokens over 4 ranks that are threads of one process, the plan made and prepared: what is left is Python and torch's
calls. Both checkouts are run in turn, each in a process of its own; of all rounds the least counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
STEPS, WARM = 30, 5
CASES = {
    **{scheme: ("attention", scheme) for scheme in ("a2a", "p2p", "all_gather", "exact", "a2a+p2p", "a2a+all_gather")},
    **{f"{layer} {mode}": (layer, mode) for layer in ("gdn", "kda", "mamba", "conv1d")
       for mode in ("headwise", "chunkwise", "redistribute")},  # by name: the other checkout may have no records
}  # fmt: skip


def measure(names: list[str], *, calls: bool) -> dict[str, float]:
    """Milliseconds of a step of all ranks together: the median of some steps. Or what one rank calls in a step."""
    import torch

    from megatron_cp.executor.launch import run_ranks
    from megatron_cp.executor.run import prepare
    from megatron_cp.testing import parity

    def steps(group, case, plan, problem):  # type: ignore[no-untyped-def]
        hidden = plan.hidden_layout or plan.layout
        inputs = {name: hidden.shard(x, group.rank).requires_grad_() for name, x in problem.inputs.items()}
        parameters = {name: x.clone().requires_grad_() for name, x in problem.parameters.items()}
        gradient, times = hidden.shard(problem.output_gradient, group.rank), []
        prepare(plan, group.rank, torch.device("cpu"))
        for _ in range(WARM + STEPS):
            group.barrier()
            start, seen = time.perf_counter(), [0]
            if calls:
                sys.setprofile(partial(_count, seen))
            if case.layer == "attention":
                out = parity.attention(*inputs.values(), plan, group)
            else:
                out = parity.run_linear(group, case, plan, inputs, parameters)
            out.backward(gradient)
            sys.setprofile(None)
            group.barrier()
            times.append(seen[0] if calls else time.perf_counter() - start)
        return times[WARM:]

    torch.set_num_threads(1)
    found = {}
    for name in names:
        layer, scheme = CASES[name]
        case = parity.Case(layer, 4, (40, 24), heads=8, groups=4, scheme=scheme, hidden_size=64, dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ranks = run_ranks(steps, 4, case, case.plan(), parity.draw(case), timeout=300)
        found[name] = statistics.median(ranks[0]) * (1 if calls else 1e3)
    return found


def _count(seen: list[int], _: object, event: str, __: object) -> None:
    seen[0] += event in ("call", "c_call")


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--only", default="", help="a part of names")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", action="store_true", help="counts calls of functions, which load does not change")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = [name for name in CASES if options.only in name]
    if options.child:
        print(json.dumps(measure(names, calls=options.calls)))
        return 0
    trees = [HERE, *([options.against.resolve()] if options.against else [])]
    found: dict[Path, dict[str, list[float]]] = {tree: {name: [] for name in names} for tree in trees}
    for _ in range(options.rounds):
        for tree in trees:
            command = [sys.executable, __file__, "--child", "--only", options.only, *["--calls"] * options.calls]
            environment = os.environ | {"PYTHONPATH": str(tree)}
            done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True)
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                found[tree][name].append(value)
    for name in names:
        # The least of the rounds: who else uses the machine can only add to it.
        here, *other = (min(found[tree][name]) for tree in trees)
        unit, digits = ("calls", 0) if options.calls else ("ms", 2)
        ratio = f"   {here / other[0]:.2f} of {other[0]:.{digits}f} {unit}" if other else ""
        print(f"{name:<22} {here:7.{digits}f} {unit}{ratio}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
