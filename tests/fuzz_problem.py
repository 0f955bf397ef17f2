"""The tensors of a call over its whole stream, from its seed: ranks hold parts of them, the oracle takes all."""

import dataclasses
import math

import torch

from tests.fuzz_cases import ATTENTIONS, KINDS

PROJECTED = 6  # features of what is projected
INDEX_HEADS, INDEX_DIM = 2, 3


@dataclasses.dataclass(frozen=True)
class Problem:
    """Leaves by name, and gradients of the output.

    Attributes:
        leaves: in the order of the operation's arguments; those that are one tensor have one name, as "+qkv".
        whole: names of leaves that every rank has whole.
        of_keys: names of leaves that lie as the keys do.
        gradients: one for each result that is used. Of gather with losses of the ranks' own `[ranks, ...]`.
    """

    leaves: dict
    whole: frozenset
    of_keys: frozenset
    gradients: list


def names_of(call):
    """The leaves of a call."""
    one = dataclasses.replace(call, lengths=(1,), parents=(), kv_lengths=(1,) if call.kv_lengths else ())
    return tuple(_leaves(one)[0])


def problem_of(call, cp_size):
    leaves, whole = _leaves(call)
    of_keys = {"k", "v", "y", "latent", "shared_key", "index_k"} if call.operation in ATTENTIONS else set()
    of_keys = frozenset(of_keys)
    if call.operation == "attention" and call.shared in ("=kv", "+kv"):
        of_keys = frozenset({call.shared})
    elif call.shared:
        of_keys = frozenset()
    draw = _Numbers(call, call.seed + 1)
    shape = _output_shape(call)
    if call.operation == "gather" and call.scheme == "own_loss":
        shape = (cp_size, *shape)
    count = 2 if call.twice in ("input", "output") else 1
    gradients = [draw.one(shape) if call.ones else draw.gradient(*shape) for _ in range(count)]
    return Problem(leaves, frozenset(whole), of_keys, gradients)


def arguments(call, leaves):
    """The operation's tensors by name, from leaves of which some are shared."""
    if not call.shared:
        return dict(leaves)
    names, leaf = call.shared[1:], leaves[call.shared]
    rest = {name: x for name, x in leaves.items() if name != call.shared}
    if call.shared[0] == "=":
        return dict.fromkeys(names, leaf) | rest
    counts = [call.heads if name == "q" and call.operation == "attention" else call.groups for name in names]
    return dict(zip(names, leaf.split(counts, -2), strict=True)) | rest


class _Numbers:
    """Numbers from a seed, in the call's type."""

    def __init__(self, call, seed):
        self.random, self.whole = torch.Generator().manual_seed(seed), call.whole
        self.dtype = getattr(torch, call.dtype)

    def normal(self, *shape, by=1.0):
        if self.whole:
            return torch.randint(-4, 5, shape, generator=self.random).to(self.dtype)
        return (torch.randn(*shape, generator=self.random, dtype=torch.float64) * by).to(self.dtype)

    def unit(self, *shape):
        return torch.nn.functional.normalize(self.normal(*shape).double(), dim=-1).to(self.dtype)

    def share(self, *shape):
        return torch.rand(*shape, generator=self.random, dtype=torch.float64).to(self.dtype)

    def gradient(self, *shape):
        if self.whole:  # so large that bfloat16 cannot add them up
            return torch.randint(-250, 251, shape, generator=self.random).to(self.dtype)
        return self.normal(*shape)

    def one(self, shape):
        return torch.ones((), dtype=self.dtype).expand(shape)


def _leaves(call):
    """The leaves, and the names of those that are whole on every rank."""
    draw, operation = _Numbers(call, call.seed), call.operation
    if operation in KINDS:
        found, whole = _linear(call, draw)
    elif operation == "projected_attention":
        found, whole = _projected(call, draw)
    elif operation == "attention":
        found, whole = _attention(call, draw)
    elif operation == "sparse_attention":
        found, whole = _sparse(call, draw)
    elif operation == "latent_attention":
        found, whole = _latent(call, draw)
    else:
        found, whole = {"x": draw.normal(call.packing.total, *(call.heads, call.head_dim)[: call.batch])}, ()
    if not call.shared:
        return found, whole
    names = call.shared[1:]
    parts = [found.pop(name) for name in names]
    return {call.shared: parts[0] if call.shared[0] == "=" else torch.cat(parts, -2)} | found, whole


def _attention(call, draw):
    batch = (call.batch,) if call.batch else ()
    queries, keys = call.packing.total, call.kv_packing.total
    found = {
        "q": draw.normal(queries, *batch, call.heads, call.head_dim),
        "k": draw.normal(keys, *batch, call.groups, call.head_dim),
        "v": draw.normal(keys, *batch, call.groups, call.value_head_dim),
    }
    if call.whole:
        # Every query has one key that outdoes the others by so much that the rest have no weight at all.
        codes = torch.randperm(max(keys, 1), generator=draw.random)[:keys] + 1.0
        found["q"].zero_()
        found["q"][..., 0] = torch.randint(0, 2, found["q"].shape[:-1], generator=draw.random).to(draw.dtype) * 2 - 1
        found["k"][..., 0] = codes.to(draw.dtype).view(-1, *[1] * (found["k"].ndim - 2))
    if call.sink:
        found["sink"] = draw.normal(call.heads)
        if call.seed % 3 == 0:
            found["sink"][0] = -torch.inf  # a head without one
    return found, {"sink"}


def _sparse(call, draw):
    """Keys, values and an indexer of small whole numbers, whose scores are often equal, and exactly so.

    Without an indexer, queries and keys themselves are such numbers where means of blocks of keys are exact.
    """
    found, whole = _attention(call, draw)

    def integers(*shape):
        return torch.randint(-1, 2, shape, generator=draw.random).to(draw.dtype)

    if call.block:
        if call.block & (call.block - 1) == 0:  # whose means, and scores, are exact
            found |= {name: integers(*found[name].shape) for name in "qk"}
        return found, whole
    found["index_q"] = integers(call.packing.total, INDEX_HEADS, INDEX_DIM)
    found["index_k"] = integers(call.kv_packing.total, INDEX_DIM)
    found["index_weights"] = integers(call.packing.total, INDEX_HEADS)
    return found, whole


def _latent(call, draw):
    batch, (shared, rank) = (call.batch,) if call.batch else (), call.latent
    keys = call.kv_packing.total
    found = {
        "q": draw.normal(call.packing.total, *batch, call.heads, call.head_dim),
        "latent": draw.normal(keys, *batch, rank),
        "shared_key": draw.normal(keys, *batch, shared),
        "up": draw.normal(call.heads, call.head_dim - shared + call.value_head_dim, rank, by=rank**-0.5),
    }
    if call.sink:
        found["sink"] = draw.normal(call.heads)
    return found, {"up", "sink"}


def _projected(call, draw):
    batch = (call.batch,) if call.batch else ()
    by = PROJECTED**-0.5
    found = {"x": draw.normal(call.packing.total, *batch, PROJECTED)}
    if call.kv_lengths:
        found["y"] = draw.normal(call.kv_packing.total, *batch, PROJECTED)
    weights = {
        "wq": draw.normal(call.heads, PROJECTED, call.head_dim, by=by),
        "wk": draw.normal(call.groups, PROJECTED, call.head_dim, by=by),
        "wv": draw.normal(call.groups, PROJECTED, call.value_head_dim, by=by),
    }
    if call.sink:
        weights["sink"] = draw.normal(call.heads)
    return found | weights, set(weights)


def _linear(call, draw):
    total, heads, groups, dk, dv = call.packing.total, call.heads, call.groups, call.head_dim, call.value_head_dim
    steps = call.steps
    channels = steps * heads * dv + (0 if call.operation == "causal_conv1d" else (steps + 1) * groups * dk)
    by = (0.1, 1.0, 6.0)[call.seed % 3]  # how fast states fade
    parameters = {}
    if call.operation == "causal_conv1d" or call.operation.endswith(("_mixer", "_net")):
        middle = (1,) if call.has("three") else ()
        names = ("weight", "bias") if call.operation == "causal_conv1d" else ("conv", "conv_bias")
        parameters[names[0]] = draw.normal(channels, *middle, call.width, by=call.width**-0.5)
        if call.has("bias"):
            parameters[names[1]] = draw.normal(channels)
    keys = [draw.unit(total, groups, dk) for _ in range(2)]
    match call.operation:
        case "causal_conv1d":
            found = {"x": draw.normal(total, channels)}
        case "gated_delta_rule" | "kda":
            shape = (total, heads, dk) if call.operation == "kda" else (total, heads)
            found = {"q": keys[0], "k": keys[1], "v": draw.normal(total, heads, dv)}
            found |= {"g": -draw.share(*shape) * by, "beta": draw.share(total, heads)}
        case "gdn2":
            found = {"q": keys[0], "k": keys[1], "v": draw.normal(total, heads, dv)}
            found |= {"g": -draw.share(total, groups, dk) * by, "b": draw.share(total, groups, dk)}
            found["w"] = draw.share(total, heads, dv)
        case "gated_delta_product":
            found = {"q": keys[0], "k": draw.unit(total, steps, groups, dk), "v": draw.normal(total, steps, heads, dv)}
            found |= {"g": -draw.share(total, heads) * by, "beta": draw.share(total, steps, heads)}
        case "gdn2_mixer":
            widths = {"qkv": channels, "g": groups * dk, "b": groups * dk, "w": heads * dv}
            found = {name: draw.normal(total, width) for name, width in widths.items()}
            parameters |= {"A_log": draw.normal(groups, by=0.3) + math.log(by), "dt_bias": draw.normal(groups * dk) - 1}
        case "gated_delta_product_mixer":
            widths = {"vkq": channels, "beta": steps * heads, "alpha": heads}
            found = {name: draw.normal(total, width) for name, width in widths.items()}
            parameters |= {"A_log": draw.normal(heads, by=0.3) + math.log(by), "dt_bias": draw.normal(heads) - 1}
        case "gated_delta_net" | "kda_mixer":
            wide = call.operation == "kda_mixer"
            decay, decay_width = ("g", heads * dk) if wide else ("alpha", heads)
            gates = {decay: draw.normal(total, decay_width), "beta": draw.normal(total, heads)}
            found = {"qkv": draw.normal(total, channels), **gates}
            parameters |= {"A_log": draw.normal(heads, by=0.3) + math.log(by), "dt_bias": draw.normal(decay_width) - 1}
        case _:
            found, more = _mamba(call, draw, keys, by)
            parameters |= more
    return found | parameters, set(parameters)


def _mamba(call, draw, keys, by):
    total, heads, dv = call.packing.total, call.heads, call.value_head_dim
    skips = {"D": draw.normal(heads, dv) if call.has("skips") else draw.normal(heads)}
    skips = skips if call.has("skip") or call.has("skips") else {}
    if call.operation == "mamba2_mixer":
        found = {
            "xBC": draw.normal(total, heads * dv + 2 * call.groups * call.head_dim),
            "dt": draw.normal(total, heads),
        }
        return found, {"A_log": draw.normal(heads, by=0.3) + math.log(by), "dt_bias": draw.normal(heads) - 1, **skips}
    found = {"x": draw.normal(total, heads, dv), "dt": draw.share(total, heads) + 0.05}
    found |= {"B": keys[0], "C": keys[1]}
    parameters = {"A": -draw.normal(heads, by=0.3).exp() * by, **skips}
    if call.has("bias"):
        parameters["dt_bias"] = draw.share(heads)
    return found, parameters


def _output_shape(call):
    total = call.packing.total
    batch = (call.batch,) if call.batch else ()
    match call.operation:
        case "attention" | "projected_attention" | "latent_attention":
            return (total, *batch, call.heads, call.value_head_dim)
        case "sparse_attention":  # with the indexer's loss behind the heads
            return (total, call.heads * call.value_head_dim + (not call.block))
        case "causal_conv1d":
            return (total, call.heads * call.value_head_dim)
        case "gather" | "relayout":
            return (total, *(call.heads, call.head_dim)[: call.batch])
    return (total, call.heads, call.value_head_dim)
