"""`peak_bytes`: the most memory that an attention's tensors take at a time on one rank, from its plan alone.

No torch in here: a plan says it all, so that a batch can be judged before anything is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from megatron_cp.exchange.exchange import Exchange
from megatron_cp.exchange.sections import ROW_ALIGNMENT
from megatron_cp.executor.plan import Plan, ToHeads
from megatron_cp.executor.schedule import Attend, HeadChunk

LSE = 4  # bytes at least of a log-sum-exp, and of whatever is summed


def peak_bytes(plan: Plan, rank: int, item_size: int, *, forward: bool) -> int:
    """Bytes of all tensors that `attention` has alive at its worst moment, beyond its inputs q, k and v.

    Counted are outputs, what forward saves for backward, and in backward (beyond the output's gradient) all of that
    again and the gradients. Not counted are what a kernel or a transport allocates for itself, index tables, which are
    made once a batch, and a learned sink. With a batch axis all of it is as many times as much.

    In elements of `item_size` bytes, or of `wide = max(item_size, 4)` where marked `w`; `t` own rows of queries, `s` of
    keys, `h` query and `g` key/value heads, `d` and `v` their sizes, all of the lane where heads were exchanged:

        out = t h v     lse = h t (w)     dq = t h d     block(n) = n g (d + v)

        at home     forward     out + lse
                    backward    out + lse + dq + block(s)
        p2p         forward     out (w) + lse + the blocks of two stages, the one before still at hand while the third
                                is awaited, + the stage's part: out (w) + 3 lse of the rows that see a key, of which the
                                stage before keeps out + lse until its own is there; at the end out again if w is wider
                    backward    out + lse + dq + block(s) + dq (w) + those blocks + three gradients (w) of blocks (own,
                                on the way here, on the way on) + the part dq (w), two as above
        gathering   forward     out + lse + block(s) (w) + of each of two head chunks: what is sent, what is received
                                and, where it does not arrive in stream order, the same in order
                    backward    out + lse + dq + block(s) + block(s) (w) + those + of two chunks: gradients of what was
                                received, in both orders, and those that come back for own keys
        a2a         forward     twice the lane's q, k, v while they arrive in another order than the stream's, once
                                later; the above; and out twice on its way back
                    backward    likewise, with out's gradient on its way in, and all of dq and block(s) on their way back

    What is sent in an all-gather is as long as the longest share, what is received that times the number of nodes.
    """
    inner, lane, node = plan.attend, rank % plan.ulysses_degree, rank // plan.ulysses_degree
    assert inner is not None
    local = _Local(inner, node, lane, item_size)
    moves = list(_moves(plan, rank, item_size))
    return _forward(local, moves) if forward else _backward(local, moves)
