"""Ratios predicted for published set-ups: `python -m tools.predicted_ratios [h100 h800]`.

Gated DeltaNet of 64 heads of 128, one document, contiguous: headwise over chunkwise. Attention of 32/8 heads of 128,
one causal document, zigzag: p2p over a2a. Forward, and forward and backward, of a layer's operation alone.
"""

from __future__ import annotations

import sys
import warnings

import megatron_cp as cp
from megatron_cp.planner.predict import Machine, machine
from megatron_cp.planner.predict.price import priced
from megatron_cp.planner.predict.simulate import simulate
from megatron_cp.planner.predict.walk import program_of

_BESIDE = ("conv", "gates")  # what publications of the rule alone leave out


def rule_alone(plan: cp.Plan, on: Machine, *, forward: bool) -> float:
    """Milliseconds without the convolution and the gates."""
    program = program_of(plan, on.hardware, 2, forward=forward, hosts=on.topology(plan.cp_size).hosts)
    program.operations = [each for each in program.operations if getattr(each, "name", "") not in _BESIDE]
    return simulate(program, on.topology(plan.cp_size)).seconds * 1e3


def main() -> None:
    """Prints a table for each machine."""
    warnings.simplefilter("ignore", UserWarning)
    for name in sys.argv[1:] or ("h100", "h800"):
        on = machine(name)
        print(f"\n### {on.describe()}\n")
        print("| tokens | cp | headwise ms | chunkwise ms | ratio forward | ratio | a2a ms | p2p ms | p2p / a2a |")
        print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
        for tokens in (32768, 65536):
            for size in (2, 4, 8, 16, 32, 64):
                packing = cp.Packing([tokens])
                layout, zigzag = cp.Layout.contiguous(packing, size), cp.Layout.zigzag(packing, size)
                gdn = {
                    mode: cp.plan_linear(packing, layout, "gdn", heads=64, head_dim=128, mode=mode)
                    for mode in ("headwise", "chunkwise")
                }
                head, chunk = ([rule_alone(plan, on, forward=way) for way in (True, False)] for plan in gdn.values())
                attention = {
                    scheme: priced(
                        cp.plan_attention(packing, zigzag, heads=32, kv_heads=8, head_dim=128, scheme=scheme), on
                    ).total
                    for scheme in ("a2a", "p2p")
                }
                print(
                    f"| {tokens} | {size} | {sum(head):.2f} | {sum(chunk):.2f} | {head[0] / chunk[0]:.2f} | "
                    f"{sum(head) / sum(chunk):.2f} | {attention['a2a']:.2f} | {attention['p2p']:.2f} | "
                    f"{attention['p2p'] / attention['a2a']:.2f} |"
                )


if __name__ == "__main__":
    main()
