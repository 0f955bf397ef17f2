"""Every operation over a whole stream in plain torch, differentiated by autograd: what ranks must agree with.

Nothing of the library computes here. Attention is one softmax over all keys of the stream (`softmax_oracle`), linear
layers go token by token (`linear_oracle`), a convolution is torch's own of each document. A codec is written a second
time, and applied to the heads that the plan says each rank has, since each rank's share of a shared head's gradient is
coded apart. Documents that branch are computed one by one, each by itself, whenever tokens meet (`_along_paths`).
"""

from functools import lru_cache, partial

import numpy as np
import torch

from megatron_cp.linear.kernels.base import Delta, StateSpace
from tests import linear_oracle, softmax_oracle
from tests.fuzz_cases import ATTENTIONS, KINDS
from tests.fuzz_problem import arguments

NEXT_ENTRY = 2**31 - 1  # between the dropout seeds of a batch's entries


def evaluate(call, plan, leaves):
    """The output over the whole stream, differentiable."""
    tensors = arguments(call, leaves)
    if call.operation == "sparse_attention":
        return _along_paths(call, partial(_of_blocks if call.block else _chosen, tensors))
    if call.operation in ATTENTIONS:
        return _attention(call, plan, tensors)
    if call.operation == "causal_conv1d":
        return _convolved(call, tensors["x"], tensors["weight"], tensors.get("bias"), silu=call.has("silu"))
    if call.operation in KINDS:
        return _recurrence(call, plan, tensors)
    return tensors["x"] * 1


def _along_paths(call, compute):
    """Returns `compute(call, tokens)` of the stream; of documents that branch, of each by itself.

    A token that documents share has the first one's output, on which all must agree: its gradient counts once, and the
    gradients of inputs are sums over documents.
    """
    if not call.parents:
        return compute(call, slice(None))
    paths = call.paths() or [[]]
    held = [token for tokens in paths for token in tokens]
    row = {token: place for place, token in reversed([*enumerate(held)])}
    results = torch.cat([compute(call.alone(tokens), tokens) for tokens in paths])
    out = results[[row[token] for token in range(call.packing.total)]]
    assert not held or results.dtype != torch.float64 or float((out[held] - results).detach().abs().max()) < 1e-9
    return out


class _Coded(torch.autograd.Function):
    """`[..., d]` coded and decoded, with a scale for each row; its gradient likewise, in another format."""

    @staticmethod
    def forward(ctx, x, way, back):
        ctx.back = back
        return _rounded(x, way)

    @staticmethod
    def backward(ctx, gradient):
        return _rounded(gradient, ctx.back), None, None


FORMATS = {"fp8": ("e4m3", "e4m3"), "fp8_e5m2": ("e4m3", "e5m2"), "int8": ("int8", "int8")}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}
TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _rounded(x, kind):
    if not x.numel():
        return x.clone()
    single = x.float()
    scale = (single.abs().amax(-1, keepdim=True) / LARGEST[kind]).clamp(min=torch.finfo(torch.float32).tiny)
    codes = single / scale
    codes = codes.round() if kind == "int8" else codes.to(TYPES[kind]).float()
    return (codes * scale).to(x.dtype)


def _shares(call, plan):
    """Returns for each rank and chunk its heads and key heads; all at once if nothing is coded."""
    if not _is_coded(call, plan):
        return [((0, call.heads), (0, call.groups))]
    partitions = [plan.chunk_partition(chunk) for chunk in range(plan.head_chunks)]
    shares = [share for partition in partitions for share in zip(partition.heads, partition.groups, strict=True)]
    return sorted((heads, groups) for heads, groups in shares if heads[1] > heads[0])


def _is_coded(call, plan):
    return call.codec != "none" and any(exchange.codec for exchange, _ in plan.exchanges(forward=True))


def _sent(call, plan, x):
    """Returns `[..., heads, d]` after coding and decoding for the wire."""
    return _Coded.apply(x, *FORMATS[call.codec]) if _is_coded(call, plan) else x


def _moved(call, plan, x):
    """Returns `[..., heads, d]` keys or values after coding and decoding on their way; their gradient is not coded."""
    if not plan.attend.coded_bytes(x.element_size()):
        return x
    return x + (_rounded(x, FORMATS[call.codec][0]) - x).detach()


def _attention(call, plan, tensors):
    if call.operation == "projected_attention":
        x, y = tensors["x"], tensors.get("y", tensors["x"])
        q, k, v = (
            torch.einsum("t...m,hmd->t...hd", rows, tensors[weight])
            for rows, weight in ((x, "wq"), (y, "wk"), (y, "wv"))
        )
    elif call.operation == "latent_attention":
        q, k, v = (tensors[name] for name in ("q", "shared_key", "latent"))
        k, v = (x.unsqueeze(-2) for x in (k, v))
        if call.latent_mode == "heads":
            k, v = _expanded(call, k, v, tensors["up"])
    else:
        q, k, v = (tensors[name] for name in "qkv")
    if not call.batch:
        q, k, v = (x[:, None] for x in (q, k, v))
    ratio, outputs = call.heads // k.shape[2], []
    for (first, last), (first_group, last_group) in _shares(call, plan):
        own = _sent(call, plan, q[:, :, first:last])
        keys, values = (_moved(call, plan, _sent(call, plan, x[:, :, first_group:last_group])) for x in (k, v))
        groups = torch.tensor([head // ratio - first_group for head in range(first, last)])
        if call.latent and call.latent_mode != "heads":
            keys, values = _expanded(call, keys, values, tensors["up"][first:last])
            groups = torch.arange(last - first)
        sink = tensors["sink"][first:last] if call.sink else None
        of_heads = own, keys[:, :, groups], values[:, :, groups]
        out = _along_paths(call, partial(_attended, of_heads, sink, first))
        outputs.append(_sent(call, plan, out))
    out = torch.cat(outputs, 2)
    return out if call.batch else out[:, 0]


def _chosen(tensors, call, tokens):
    """`[t, h * v + 1]`: attention to the keys of the largest index scores, the first of equal ones, and the loss."""
    of_keys = tokens if not call.kv_lengths else slice(None)
    q, index_q, weights = (tensors[name][tokens] for name in ("q", "index_q", "index_weights"))
    k, v = (tensors[name][of_keys].repeat_interleave(call.heads // call.groups, 1) for name in "kv")
    visible = torch.from_numpy(_pairs(call))
    index = softmax_oracle.index_scores(index_q, tensors["index_k"][of_keys], weights, call.has("relu"))
    chosen = softmax_oracle.largest(index.masked_fill(~visible, -torch.inf), call.width) & visible
    scale = call.head_dim**-0.5 if call.scale is None else call.scale
    out, _ = softmax_oracle.attend(q, k, v, chosen, scale=scale)
    scores = softmax_oracle.scores_of(q, k, scale)
    terms = softmax_oracle.divergence(scores, index, visible if call.has("dense") else chosen)
    return torch.cat([out.flatten(1), terms[:, None]], 1)


def _of_blocks(tensors, call, tokens):
    """`[t, h * v]`: attention to the own block and the best earlier ones of each document, the first of equal ones."""
    q = tensors["q"][tokens]
    k, v = (tensors[name][tokens].repeat_interleave(call.heads // call.groups, 1) for name in "kv")
    outputs = [q.new_zeros(0, call.heads, call.value_head_dim)]
    for length in filter(None, call.lengths):
        queries, keys, values = (x[:length] for x in (q, k, v))
        q, k, v = (x[length:] for x in (q, k, v))
        chosen = softmax_oracle.chosen_blocks(queries, keys, call.block, call.width)
        seen = softmax_oracle.causal_in_blocks(chosen, call.block, length)
        scale = call.head_dim**-0.5 if call.scale is None else call.scale
        outputs.append(softmax_oracle.attend(queries, keys, values, seen, scale=scale)[0])
    return torch.cat(outputs).flatten(1)


def _expanded(call, shared, latent, up):
    """Keys and values of each head, from shared keys and latents `[..., 1, d]`."""
    own = up.shape[1] - call.value_head_dim
    made = torch.einsum("...xr,hnr->...hn", latent, up)
    return torch.cat([made[..., :own], shared.expand(*made.shape[:-1], -1)], -1), made[..., own:]


def _attended(of_heads, sink, first_head, call, tokens):
    places = np.arange(len(of_heads[0]))[tokens]
    return _softmax(call, *(x[tokens] for x in of_heads), torch.from_numpy(_pairs(call)), sink, first_head, places)


@lru_cache(maxsize=64)
def _pairs(call):
    return np.asarray(call.mask_and_pairs()[1])


def _softmax(call, q, k, v, pairs, sink, first_head, places):
    """`[t, b, h, v]`; query head i reads key head i. `places` are those of the queries in the stream."""
    scale = 256.0 if call.whole else call.head_dim**-0.5 if call.scale is None else call.scale
    kept = None
    if call.dropout:
        keys = places if len(places) == len(k) else np.arange(len(k))  # cross-attention's are all
        of_entries = [
            [
                softmax_oracle.kept_by_dropout(
                    places, keys, first_head + head, call.seed + entry * NEXT_ENTRY, call.dropout
                )
                for head in range(q.shape[2])
            ]
            for entry in range(q.shape[1])
        ]
        kept = torch.from_numpy(np.array(of_entries))
    options = {"softcap": call.softcap, "sink": sink, "kept": kept, "dropout": call.dropout}
    return softmax_oracle.attend(q, k, v, pairs, scale=scale, **options)[0]


def _recurrence(call, plan, tensors):
    """Bare rules and mixers, section by section of what their heads are."""
    sections, decay = _sections(call, tensors), _decay(call, tensors)
    ratio, outputs = call.heads // call.groups, []
    for (first, last), (first_group, last_group) in _shares(call, plan):
        own = []
        for x, weight, bias, wide in sections:
            heads = slice(first, last) if wide else slice(first_group, last_group)
            x = _sent(call, plan, x[:, heads])
            if weight is not None:
                size = x.shape[1:]
                flat = weight[heads].flatten(0, 1), None if bias is None else bias[heads].flatten()
                x = _convolved(call, x.flatten(1), *flat, silu=True).unflatten(1, size)
            own.append(x)
        groups = [head // ratio - first_group for head in range(first, last)]
        of_heads = {name: x[..., first:last] if name == "dt" else x[:, first:last] for name, x in decay.items()}
        heads = slice(first, last)

        def ruled(call, tokens, own=own, of_heads=of_heads, groups=groups, heads=heads):
            of_tokens = {name: x[tokens] for name, x in of_heads.items()}
            return _ruled(call, [x[tokens] for x in own], of_tokens, tensors, groups, heads)

        out = _along_paths(call, ruled)
        outputs.append(_sent(call, plan, out))
    return torch.cat(outputs, 1)


def _sections(call, tensors):
    """Returns q, k and v, or x, B and C, or v and k of each step and q: `[t, n, d]`, taps `[n, d, w]`, bias or None,
    and True if n counts heads.
    """
    kind, steps = KINDS[call.operation], call.steps
    names = {"mamba": "xBC", "gdp": "v" * steps + "k" * steps + "q"}.get(kind, "qkv")
    wide = [name in "vx" for name in names]
    sizes = [
        (call.heads, call.value_head_dim) if is_acc_dtype else (call.groups, call.head_dim) for is_acc_dtype in wide
    ]
    widths = [heads * dim for heads, dim in sizes]
    mixed = tensors.get({"mamba": "xBC", "gdp": "vkq"}.get(kind, "qkv"))
    if mixed is None and kind == "gdp":
        of_steps = [*tensors["v"].unbind(1), *tensors["k"].unbind(1), tensors["q"]]
        return [(x, None, None, is_acc_dtype) for x, is_acc_dtype in zip(of_steps, wide, strict=True)]
    if mixed is None:
        return [(tensors[name], None, None, w) for name, w in zip(names, wide, strict=True)]
    taps = tensors["conv"].flatten(1).split(widths)
    biases = tensors["conv_bias"].split(widths) if call.has("bias") else [None] * len(widths)
    return [
        (x.unflatten(1, size), tap.unflatten(0, size), None if bias is None else bias.unflatten(0, size), is_acc_dtype)
        for x, size, tap, bias, is_acc_dtype in zip(mixed.split(widths, 1), sizes, taps, biases, wide, strict=True)
    ]


def _decay(call, tensors):
    """Returns the decay and the write strength of each head of each token, as recurrences take them."""
    softplus = torch.nn.functional.softplus
    match call.operation:
        case "gated_delta_rule" | "kda":
            return {"g": tensors["g"], "beta": tensors["beta"]}
        case "gdn2" | "gdn2_mixer":
            return _channel_gates(call, tensors)
        case "gated_delta_product":
            return {"g": tensors["g"], "beta": tensors["beta"].transpose(1, 2)}
        case "gated_delta_product_mixer":
            g = -tensors["A_log"].exp() * softplus(tensors["alpha"] + tensors["dt_bias"])
            return {"g": g, "beta": tensors["beta"].sigmoid().unflatten(1, (call.steps, -1)).transpose(1, 2)}
        case "gated_delta_net":
            g = -tensors["A_log"].exp() * softplus(tensors["alpha"] + tensors["dt_bias"])
            return {"g": g, "beta": tensors["beta"].sigmoid() * (2 if call.has("negative") else 1)}
        case "kda_mixer":
            shifted = (tensors["g"] + tensors["dt_bias"]).unflatten(1, (call.heads, call.head_dim))
            rate = tensors["A_log"].exp()[:, None]
            g = -5.0 * (rate * shifted).sigmoid() if call.has("bound") else -rate * softplus(shifted)
            return {"g": g, "beta": tensors["beta"].sigmoid()}
    step = tensors["dt"] + tensors["dt_bias"] if "dt_bias" in tensors else tensors["dt"]
    if call.operation == "mamba2_mixer" or call.has("softplus"):
        step = softplus(step)
    return {"dt": step.clamp(0.1, 1.5) if call.has("limit") else step}


def _channel_gates(call, tensors):
    """Returns the gates of Gated DeltaNet-2, of each head: those of its key head, and its own of values."""
    g, b, w = (tensors[name] for name in "gbw")
    if call.operation == "gdn2_mixer":
        of_keys, of_values = (call.groups, call.head_dim), (call.heads, call.value_head_dim)
        shifted = torch.nn.functional.softplus(g + tensors["dt_bias"]).unflatten(1, of_keys)
        g, b = -tensors["A_log"].exp()[:, None] * shifted, b.sigmoid().unflatten(1, of_keys)
        w = w.sigmoid().unflatten(1, of_values)
    ratio = call.heads // call.groups
    return {"g": g.repeat_interleave(ratio, 1), "beta": b.repeat_interleave(ratio, 1), "w": w}


def _ruled(call, sections, decay, tensors, groups, heads):
    lengths = [length for length in call.lengths if length]
    if not lengths:
        return sum(x.sum() for x in (*sections, *decay.values())) + sections[-1].new_zeros(
            0, len(groups), call.value_head_dim
        )
    if "dt" in decay:
        x, b, c = sections
        rate = tensors["A"] if "A" in tensors else -tensors["A_log"].exp()
        out = linear_oracle.state_space(StateSpace(x, decay["dt"], rate[heads], b, c), groups, 1.0, lengths)
        skip = tensors["D"][heads] if "D" in tensors else None
        return out if skip is None else out + (skip if skip.ndim == 2 else skip[:, None]) * x
    scale = call.head_dim**-0.5 if call.scale is None else call.scale
    normed = call.operation.endswith(("_net", "_mixer")) or call.has("norm")
    if KINDS[call.operation] == "gdp":
        q, steps = sections[-1], call.steps
        v, k = torch.stack(sections[:steps], 1), torch.stack(sections[steps:-1], 1)
        q, k = map(_unit, (q, k)) if normed else (q, k)
        return linear_oracle.delta_product(q, k, v, decay["g"], decay["beta"], groups, scale, lengths)
    q, k, v = sections
    q, k = map(_unit, (q, k)) if normed else (q, k)
    v = decay["w"] * v if "w" in decay else v
    return linear_oracle.delta_rule(Delta(q, k, v, decay["g"], decay["beta"]), groups, scale, lengths)


def _unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _convolved(call, x, weight, bias, *, silu):
    if not len(x):
        return x * 1
    taps = weight.flatten(1) if weight.ndim == 3 else weight
    return _along_paths(call, lambda call, tokens: linear_oracle.convolution(x[tokens], taps, bias, call.lengths, silu))
