"""Runs a drawn case on threads as ranks, and holds what every rank has to the oracle: outputs, gradients, pad rows."""

import contextlib
import dataclasses
import warnings
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

import megatron_cp as cp
from megatron_cp.executor.launch import run_ranks
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.testing.poison import poisoned
from tests.fuzz_cases import ATTENTIONS, KINDS, layout_named
from tests.fuzz_oracle import evaluate
from tests.fuzz_problem import INDEX_DIM, INDEX_HEADS, arguments, problem_of

# Of the largest entry, which counts as `FLOOR` at least: gradients of few parameters, and sums that cancel, lose most.
# In bfloat16 that shows what is altogether wrong; whole numbers show the rest.
TOLERANCES = {"float64": 1e-11, "float32": 1e-4, "bfloat16": 1e-1}
OF_ATTENTION = 1e-12  # in float64
CODED = 1e-6  # the oracle codes too; arithmetic on codes is in float32
FLOOR = 0.1
HALF_A_UNIT = 2**-8 * 1.001  # of the last place in bfloat16, over the number
ROUNDINGS = (
    4  # how often the oracle is run on rounded inputs where float32 is off, and how much of its error is allowed
)


class MismatchError(AssertionError):
    """A tensor that is not what the oracle says."""


def check(case, limit=60.0):
    """Fails unless every rank's tensors of every call are right.

    Args:
        limit: seconds until ranks that wait for one another count as hung.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # ranks without heads
        plans = [plan_of(call, case.cp_size) for call in case.calls]
        problems = [problem_of(call, case.cp_size) for call in case.calls]
        found = run_ranks(run_rank, case.cp_size, case, plans, problems, timeout=limit)
        for number, call in enumerate(case.calls):
            chosen = _chosen(call, plans[number])
            _compare(chosen, plans[number], problems[number], [rank[number] for rank in found])


def _chosen(call, plan):
    """Returns the call with the scheme that "auto" has chosen."""
    if call.operation not in ATTENTIONS or call.scheme != "auto":
        return call
    modes = {"latent_mode": plan.attend.latent_mode} if call.operation == "latent_attention" else {}
    return dataclasses.replace(call, scheme=plan.scheme, **modes)


def plan_of(call, cp_size):
    """The plan, or where rows are only moved the layouts of before and after."""
    mask = call.mask_and_pairs()[0] if call.operation in ATTENTIONS else None
    options = {"align": call.align, "seed": call.seed}
    is_cross = call.operation in ATTENTIONS and call.kv_lengths
    layout = layout_named(call.layout, call.packing, cp_size, mask=None if is_cross else mask, **options)
    wire = {"head_chunks": call.head_chunks, "codec": call.codec, "transport": call.transport_of_ranks()}
    wire["hardware"] = call.machine()
    if call.operation not in KINDS:
        other = layout_named(call.kv_layout, call.kv_packing, cp_size, seed=call.seed + 1, align=call.align)
        if call.operation not in ATTENTIONS:
            return layout, other
        cross = {"kv_packing": call.kv_packing, "kv_layout": other} if is_cross else {}
        if call.latent:
            cross |= {"latent": call.latent, "latent_mode": call.latent_mode}
        layer = {
            "heads": call.heads, "kv_heads": call.groups, "head_dim": call.head_dim,
            "value_head_dim": call.value_head_dim, "mask": mask, "scheme": call.scheme,
            "ulysses_degree": call.ulysses_degree, **_selection(call), **wire,
        }  # fmt: skip
        return _by_slot(
            call, cp.plan_attention(call.packing, layout, **layer, **cross), cp.AttentionSpec, layer | cross
        )
    kind = KINDS[call.operation]
    sizes = {"heads": call.heads, "key_heads": call.groups, "head_dim": call.head_dim}
    sizes |= {"value_head_dim": call.value_head_dim}
    if kind == "mamba":
        sizes = {"heads": call.heads, "groups": call.groups, "head_dim": call.value_head_dim, "state": call.head_dim}
    elif kind == "conv1d":
        sizes = {"channels": call.heads * call.value_head_dim}
    elif kind == "gdp":
        sizes["num_householder"] = call.steps
    hidden_size = 64 if call.scheme == "redistribute" or call.seed % 2 else None
    layer = {"conv_width": call.width, "mode": call.scheme, "hidden_size": hidden_size, **wire}
    plan = cp.plan_linear(call.packing, layout, kind, **sizes, **layer)
    heads = call.heads * call.value_head_dim if kind == "conv1d" else call.heads
    of_slot = {"kind": kind, "heads": heads, "key_heads": heads if kind == "conv1d" else call.groups}
    of_slot |= {"head_dim": call.head_dim, "value_head_dim": call.value_head_dim, "num_householder": call.steps}
    return _by_slot(call, plan, cp.LinearSpec, of_slot | layer)


def _by_slot(call, plan, kind, fields):
    """Returns the plan of a slot with these fields, if the call wants it, which must be the same one."""
    if call.planner != "slot":
        return plan
    made = kind(**fields).plan(plan.hidden_layout or plan.layout)
    if made.describe() != plan.describe():
        raise MismatchError(f"{call.operation}: the slot's plan is another one than the function's")
    return made


def _selection(call):
    if call.operation != "sparse_attention":
        return {}
    return {"topk": call.width} | ({"block": call.block} if call.block else {"indexer": (INDEX_HEADS, INDEX_DIM)})


def layouts_of(call, plan):
    """Returns the layouts of the inputs, of the keys, and of the output; None if every rank has the whole output."""
    if isinstance(plan, tuple):
        return plan[0], plan[0], (None if call.operation == "gather" else plan[1])
    hidden_layout = plan.hidden_layout or plan.layout
    return hidden_layout, (plan.kv_layout if call.operation in ATTENTIONS else hidden_layout), hidden_layout


def run_rank(group, case, plans, problems):
    """Returns this rank's results after all calls: for each the output and the gradients by name."""
    plans = [plan_of(call, case.cp_size) for call in case.calls] if case.own_plans else plans
    calls = [_Rank(group, *call) for call in zip(case.calls, plans, problems, strict=True)]
    begun = set()
    with poisoned() if case.poison else contextlib.nullcontext():
        for number in case.schedule:
            calls[number].backward() if number in begun else calls[number].forward()
            begun.add(number)
    left = len(group.buffers._taken)
    if left:  # a transfer that was started and not waited for, or a buffer that was forgotten
        raise MismatchError(f"{left} messages are still under way")
    return [call.results() for call in calls]


class _Rank:
    """A call on one rank."""

    def __init__(self, group, call, plan, problem):
        self.group, self.call, self.plan = group, call, plan
        rank = group.rank
        rows, keys, out = layouts_of(call, plan)
        # Pad rows hold what must not matter. A projection of NaN would be NaN, in gradients that are the user's.
        pad = 3.0 if call.operation == "projected_attention" else torch.nan
        self.leaves = {}
        for name, x in problem.leaves.items():
            layout = keys if name in problem.of_keys else rows
            local = x.clone() if name in problem.whole else layout.shard(x, rank, pad_value=pad)
            self.leaves[name] = _lying(local, call.strides).requires_grad_(name not in call.frozen)
        self.gradients = [self._gradient(x, out) for x in problem.gradients]
        self.before = [x.detach().clone() for x in (*self.leaves.values(), *self.gradients)]

    def _gradient(self, x, layout):
        """This rank's gradient of the result."""
        if layout is None:
            return (x[self.group.rank] if self.call.scheme == "own_loss" else x).clone()
        if self.call.ones:
            return torch.ones((), dtype=x.dtype).expand(int(layout.row_counts[self.group.rank]), *x.shape[1:])
        return _lying(layout.shard(x, self.group.rank, pad_value=torch.nan), self.call.strides)

    def forward(self):
        self.outs = [self._out() for _ in range(2 if self.call.twice == "input" else 1)]

    def _out(self):
        names = list(self.leaves)

        def layer(*tensors):
            return operate(self.call, self.plan, self.group, dict(zip(names, tensors, strict=True)))

        if not self.call.checkpoint:
            return layer(*self.leaves.values())
        return checkpoint(layer, *self.leaves.values(), use_reentrant=self.call.checkpoint == "reentrant")

    def backward(self):
        call, outs = self.call, self.outs
        if not any(x.requires_grad for x in self.leaves.values()):
            assert not any(out.requires_grad for out in outs)
            return
        if call.twice == "input":
            torch.autograd.backward(outs, self.gradients)
        elif call.twice == "output":
            torch.autograd.backward([outs[0], outs[0].view_as(outs[0])], self.gradients)
        elif call.twice == "backward":
            outs[0].backward(self.gradients[0], retain_graph=True)
            outs[0].backward(self.gradients[0])
        else:
            outs[0].backward(self.gradients[0])

    def results(self):
        after = [x.detach() for x in (*self.leaves.values(), *self.gradients)]
        if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(self.before, after, strict=True)):
            raise MismatchError("an input, or a gradient that was given, has changed")
        found = {f"out {number}": out.detach() for number, out in enumerate(self.outs)}
        return found | {name: x.grad for name, x in self.leaves.items()}


def _lying(x, strides):
    """Returns equal numbers that are not dense: in every other row, with axes turned round, or misaligned."""
    if not x.ndim or strides == "dense":
        return x.clone()
    if strides == "last":
        return torch.stack([x, x], -1)[..., 0]
    if strides == "turned" and x.ndim > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def operate(call, plan, group, leaves, **cache):
    """The operation on this rank's tensors; `cache` is its keyword argument, if there is one."""
    tensors = arguments(call, leaves)
    if call.operation == "gather":
        return cp.gather(tensors["x"], plan[0], group, same_loss=call.scheme == "same_loss")
    if call.operation == "relayout":
        return cp.relayout(tensors["x"], *plan, group)
    if call.operation in ATTENTIONS:
        return _attended(call, plan, group, tensors, **cache)
    options = _linear_options(call) | cache
    moved = partial(cp.relayout, group=group, transport=plan.transport)
    if plan.hidden_layout is not None:
        rows = _sharded(call)
        tensors = {n: moved(x, plan.hidden_layout, plan.layout) if n in rows else x for n, x in tensors.items()}
    if call.operation == "causal_conv1d":
        tensors.setdefault("bias", None)
    if call.operation == "gated_delta_product":  # whose steps of a token are rows
        tensors = {name: x.flatten(0, 1) if name in ("k", "v", "beta") else x for name, x in tensors.items()}
    out = getattr(cp, call.operation)(**tensors, plan=plan.inside, group=group, kernel=call.kernel, **options)
    return out if plan.hidden_layout is None else moved(out, plan.layout, plan.hidden_layout)


def _attended(call, plan, group, tensors, **cache):
    if call.block:
        return cp.sparse_attention(**tensors, plan=plan, group=group, softmax_scale=call.scale, **cache).out.flatten(1)
    if call.operation == "sparse_attention":
        found = cp.sparse_attention(
            **tensors, plan=plan, group=group, softmax_scale=call.scale, index_relu=call.has("relu"),
            index_loss="dense" if call.has("dense") else "sparse", **cache,
        )  # fmt: skip
        return torch.cat([found.out.flatten(1), found.index_loss[:, None]], 1)
    options = {
        "softmax_scale": 256.0 if call.whole else call.scale, "softcap": call.softcap, "dropout": call.dropout,
        "seed": call.seed, "kernel": call.kernel, "sink": tensors.get("sink"), **cache,
    }  # fmt: skip
    if call.operation == "attention":
        return cp.attention(tensors["q"], tensors["k"], tensors["v"], plan, group, **options)
    if call.operation == "latent_attention":
        names = ("q", "latent", "shared_key", "up")
        return cp.latent_attention(*(tensors[name] for name in names), plan, group, **options)
    x, y = tensors["x"], tensors.get("y", tensors["x"])

    def project(heads, kv_heads):
        made = ((x, "wq", heads), (y, "wk", kv_heads), (y, "wv", kv_heads))
        return tuple(torch.einsum("t...m,hmd->t...hd", rows, tensors[name][own]) for rows, name, own in made)

    return cp.projected_attention(project, plan, group, **options)


def _linear_options(call):
    options = {}
    match call.operation:
        case "causal_conv1d":
            options = {"activation": "silu" if call.has("silu") else None}
        case "gated_delta_rule" | "kda" | "gdn2" | "gated_delta_product":
            options = {"use_qk_l2norm_in_kernel": call.has("norm"), "scale": call.scale}
        case "gated_delta_net":
            options = {"scale": call.scale, "allow_neg_eigval": call.has("negative")}
        case "gdn2_mixer" | "gated_delta_product_mixer":
            options = {"scale": call.scale}
        case "kda_mixer":
            options = {"scale": call.scale, "lower_bound": -5.0 if call.has("bound") else None}
        case "mamba2":
            options = {"dt_softplus": call.has("softplus")}
    if call.has("limit"):
        options["dt_limit"] = (0.1, 1.5)
    return options


def _sharded(call):
    return {"q", "k", "v", "qkv", "xBC", "x", "dt", "B", "C", "alpha", "beta", "g", "b", "w", "vkq"}


def _compare(call, plan, problem, ranks):
    expected, ties = expectation(call, plan, problem)
    rows, keys, out = layouts_of(call, plan)
    for name, value in expected.items():
        of_ranks = [rank[name] for rank in ranks]
        if name in call.frozen:
            _require(all(x is None for x in of_ranks), call, name, "has a gradient that nobody wanted")
            continue
        _require(not any(x is None for x in of_ranks), call, name, "has no gradient on some rank")
        layout = out if name.startswith("out ") else keys if name in problem.of_keys else rows
        if name in problem.whole:
            found = [sum(x.double() for x in of_ranks)]
        elif layout is None:
            found = of_ranks
        else:
            for rank, x in enumerate(of_ranks):
                pads = x[int(layout.token_counts[rank]) :]
                _require(not bool(pads.count_nonzero()), call, name, f"has pad rows that are not zero on rank {rank}")
            found = [layout.unshard(of_ranks)]
        largest = _largest(call, name, value, expected, problem)
        rounding = partial(_rounding_of_entries, call, plan, problem, name, value)
        for x in found:
            _close(call, name, x, ties.get(name, value[None]), largest, len(ranks), rounding)


def expectation(call, plan, problem, dtype=torch.float64):
    """Returns the results and gradients over the whole stream, and all sums that rounded shares may have.

    The second mapping has `[sums, *shape]` for gradients whose shares are rounded: a share that lies exactly between
    two numbers of bfloat16 may become either of them.
    """
    leaves = {name: x.to(dtype).requires_grad_(name not in call.frozen) for name, x in problem.leaves.items()}
    gradients = [x.to(dtype) for x in problem.gradients]
    if call.operation == "gather" and call.scheme == "own_loss":
        gradients = [x.sum(0) for x in gradients]
    outs = [evaluate(call, plan, leaves) for _ in range(2 if call.twice == "input" else 1)]
    if call.twice == "output":
        gradients = [gradients[0] + gradients[1]]
    ties = {}
    if outs[0].requires_grad:  # not of a stream without tokens
        trained = [name for name, x in leaves.items() if x.requires_grad]
        hosts = _readers_of_hosts(call, plan) if _gathers(call) else []
        for readers in hosts:
            of_host = {}
            for share in _of_readers(plan, readers, gradients[0]):
                parts = torch.autograd.grad(outs[0], [leaves[name] for name in trained], share, retain_graph=True)
                for name, part in zip(trained, parts, strict=True):
                    _add_sums(of_host, name, _rounded_both_ways(part))
            for name, sums in of_host.items():
                _add_sums(ties, name, _rounded_both_ways(sums).flatten(0, 1) if len(readers) > 1 else sums)
        if not hosts:
            torch.autograd.backward(outs, gradients)
        for name, sums in ties.items():
            leaves[name].grad = sums[0]
    by = 2 if call.twice == "backward" else 1
    found = {f"out {number}": out.detach() for number, out in enumerate(outs)}
    for name, x in leaves.items():
        found[name] = x.grad * by if x.grad is not None else torch.zeros_like(x)
    return found, ties


def _gathers(call):
    """Returns True if each reader of keys returns rounded gradients, whose exact sums are known."""
    return (
        call.whole
        and call.dtype == "bfloat16"
        and not call.twice
        and call.scheme in SCHEMES
        and SCHEMES[call.scheme].chunks_keys
    )


def _readers_of_hosts(call, plan):
    """The KV ranks in groups whose sum is rounded: each alone, or those of a host where one rank adds them up."""
    readers = range(plan.cp_size // plan.ulysses_degree)
    if call.scheme != "exact_by_host" or not call.hosts:
        return [[reader] for reader in readers]
    return [[reader for reader in readers if call.hosts[reader] == host] for host in sorted(set(call.hosts))]


def _of_readers(plan, readers, gradient):
    """The gradient once for each of these KV ranks, of its queries alone."""
    owners = torch.tensor(plan.layout.owners // plan.ulysses_degree).view(-1, *[1] * (gradient.ndim - 1))
    return [torch.where(owners == reader, gradient, 0.0) for reader in readers]


def _add_sums(sums, name, more):
    """Adds each of `more` to each of the sums so far."""
    sums[name] = (sums[name][:, None] + more).flatten(0, 1) if name in sums else more


def _rounded_both_ways(share):
    """Returns `[1, *shape]`, the share in bfloat16; `[2, *shape]` if entries lie exactly between two numbers."""
    nearest = share.to(torch.bfloat16)
    other = torch.nextafter(nearest, torch.where(share > nearest, torch.inf, -torch.inf).to(torch.bfloat16)).double()
    nearest = nearest.double()
    is_tie = (share != nearest) & ((share - nearest).abs() == (share - other).abs())
    return torch.stack([nearest, torch.where(is_tie, other, nearest)] if bool(is_tie.any()) else [nearest])


def _largest(call, name, value, expected, problem):
    """Returns the scale of an error: the largest entry, or the largest term if terms cancel.

    Whole numbers make a softmax of zeros and ones, whose scores have zero gradients: products of the output and its
    gradient, less equal ones. Tiles that other ranks compute get that product rounded (see `output_with_row_sums`).
    In bfloat16 every kernel takes that product from the output as it is stored, rounded: half a unit of its last place
    is allowed, which is most of a gradient where the softmax is near zeros and ones.
    """
    if not value.numel():
        return FLOOR
    largest = value.abs().max().clamp(min=FLOOR)
    is_rounded = call.operation == "attention" and call.dtype == "bfloat16" and not call.whole
    is_of_tiles = call.whole and assigns_tiles(call)
    if not ((is_rounded or is_of_tiles) and name in ("q", "k") and expected["out 0"].numel()):
        return largest
    gradients, out = torch.stack(list(problem.gradients)).double(), expected["out 0"]
    others = problem.leaves["k" if name == "q" else "q"].double()
    if not others.numel():
        return largest
    scale = call.head_dim**-0.5
    if is_rounded:
        scale = (scale if call.scale is None else call.scale) * HALF_A_UNIT / TOLERANCES["bfloat16"]
    return max(largest, scale * (gradients * out).abs().sum(-1).max() * others.abs().max())


def assigns_tiles(call):
    return call.operation in ATTENTIONS and SCHEMES[call.scheme].assigns_tiles


def _close(call, name, found, sums, largest, cp_size, rounding_of_entries):
    """Fails unless `found` is close to `sums[0]`, or where all entries are exact to any of the sums."""
    value = sums[0]
    _require(found.shape == value.shape, call, name, f"is {tuple(found.shape)}, not {tuple(value.shape)}")
    if not value.numel():
        return
    if is_exact(call, name, cp_size):
        rounded = sums.to(getattr(torch, call.dtype)).double()
        # Of two numbers that are equally near a sum, a kernel whose softmax is 1 up to fp32 may take the other one.
        wrong = int(((found.double() - sums).abs() > (rounded - sums).abs()).all(0).sum())
        _require(wrong == 0, call, name, f"has {wrong} of {value.numel()} entries that are not the exact sums")
        return
    bound = TOLERANCES[call.dtype] if call.codec == "none" else CODED
    if call.operation in ATTENTIONS and call.dtype == "float64" and call.codec == "none":
        bound = OF_ATTENTION
    errors = (found.double() - value).abs()
    if is_rounded_once(call, name, cp_size):
        bound, errors = TOLERANCES["float32"], errors - value.abs() * HALF_A_UNIT
    error = float(errors.max() / largest)
    if error > bound and call.dtype != "float64" and call.codec == "none":
        error = float((errors - rounding_of_entries()).max() / largest)
    _require(error <= bound, call, name, f"is off by {error:.1e} of its largest entry; allowed {bound:g}")


def _rounding_of_entries(call, plan, problem, name, value):
    """Returns what rounding may change in each entry: `ROUNDINGS` times what it does to the oracle, in as many runs.

    Those are in float32, of inputs that are off by a unit of float32, or by half a unit of bfloat16, which is how far
    whatever a kernel stores is off. A head of one feature, normalised, is a step of width 1e-3 at zero: there one
    rounding in float32 changes a gradient by 1e-4 of its largest entry.
    """
    draws = torch.Generator().manual_seed(call.seed)
    unit = HALF_A_UNIT if call.dtype == "bfloat16" else torch.finfo(torch.float32).eps
    errors = []
    for _ in range(ROUNDINGS):
        signs = [torch.randint(0, 2, x.shape, generator=draws) * 2 - 1 for x in problem.leaves.values()]
        pairs = zip(problem.leaves.items(), signs, strict=True)
        leaves = {key: (x.double() * (1 + unit * sign)).float() for (key, x), sign in pairs}
        found, _ = expectation(call, plan, dataclasses.replace(problem, leaves=leaves), torch.float32)
        errors.append((found[name].double() - value).abs())
    return ROUNDINGS * torch.stack(errors).amax(0)


def is_rounded_once(call, name, cp_size):
    """Returns True if every entry in bfloat16 is float32's result, rounded; in rings, but where the output is used.

    A sink scales an output that is rounded already.
    """
    if call.sink and name.startswith("out "):
        return False
    is_ring = call.operation == "attention" and call.scheme == "p2p" and cp_size > 1
    return is_ring and call.dtype == "bfloat16" and not call.twice and (name == "v" or name.startswith("out "))


def is_exact(call, name, cp_size):
    """Returns True if every entry is a sum of whole numbers, rounded at most where `expectation` rounds."""
    if not call.whole or call.has("silu") or call.dtype == "float64":
        return False
    if assigns_tiles(call) and cp_size > 1 and (name in ("q", "k") or (name == "v" and call.dtype == "bfloat16")):
        return (
            False  # of tiles that other ranks compute each share is rounded, and the product that `_largest` tells of
        )
    if call.dtype != "bfloat16" or call.operation == "relayout" or name.startswith("out "):
        return True
    if call.twice:  # whoever adds up the gradients of several uses rounds as well
        return False
    # A key head of several heads may come from several ranks, or from a kernel, that round each share; not in a ring.
    # torch's kernel for CPUs rounds what each 32 queries of a document leave at a key.
    is_ring = call.scheme == "p2p" and cp_size > 1
    at_once = call.heads == call.groups and (call.kernel == "reference" or max(call.lengths) <= 32) and not call.parents
    return call.operation == "gather" or (call.operation == "attention" and (is_ring or at_once))


def _require(holds, call, name, what):
    if not holds:
        raise MismatchError(f"{call.operation} {call.scheme}: {name} {what}")
