"""`reduce_gradients`: the sum of every rank's gradients, on every rank."""

import pytest
import torch
from torch import nn

import megatron_cp as cp
from megatron_cp.batch import gradients as gradients_module
from megatron_cp.errors import ArgumentError, CallMismatchError
from megatron_cp.executor.groups import ThreadGroup
from megatron_cp.executor.launch import RankError, run_ranks
from megatron_cp.testing.counters import Counters
from tests.refusals import rejects

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

SHAPES = [(3,), (), (2, 5), (0, 4), (1,)]


def gradient_of(shape, number, rank, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7 * number + rank)).to(dtype)


def parameters_of(rank, lacking=(), dtypes=(torch.float64,)):
    """Parameters with other gradients on every rank, and none where `(rank, number)` is lacking."""
    found = []
    for number, shape in enumerate(SHAPES):
        dtype = dtypes[number % len(dtypes)]
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        if (rank, number) not in lacking:
            parameter.grad = gradient_of(shape, number, rank, dtype)
        found.append(parameter)
    return found


def reduced(group, lacking, dtypes):
    parameters = parameters_of(group.rank, lacking, dtypes)
    cp.reduce_gradients(parameters, group)
    return [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("dtypes", [(torch.float64,), (torch.float64, torch.float32)])
@pytest.mark.parametrize("bucket_bytes", [1, 30, 2**20])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_gradients_are_summed_over_ranks(size, bucket_bytes, dtypes, monkeypatch):
    monkeypatch.setattr(gradients_module, "_BUCKET_BYTES", bucket_bytes)
    everyones = run_ranks(reduced, size, (), dtypes)
    for number, shape in enumerate(SHAPES):
        dtype = dtypes[number % len(dtypes)]
        expected = sum(gradient_of(shape, number, rank, dtype) for rank in range(size))
        for of_rank in everyones:
            assert of_rank[number].dtype == dtype
            assert of_rank[number].shape == shape
            assert torch.allclose(of_rank[number], expected, rtol=0, atol=1e-14 if dtype == torch.float64 else 1e-6)
            assert torch.equal(of_rank[number], everyones[0][number])


@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
def test_a_rank_without_a_gradient_has_zeros_and_gets_the_sum(bucket_bytes, monkeypatch):
    monkeypatch.setattr(gradients_module, "_BUCKET_BYTES", bucket_bytes)
    lacking = {(0, number) for number in range(len(SHAPES))} | {(1, 2), (0, 4), (1, 4), (2, 4)}
    for of_rank in run_ranks(reduced, 3, lacking, (torch.float64,)):
        for number, shape in enumerate(SHAPES):
            having = [rank for rank in range(3) if (rank, number) not in lacking]
            if number == 4:
                assert of_rank[number] is None  # as on one process: an optimizer leaves it alone
            else:
                assert (of_rank[number] - sum(gradient_of(shape, number, rank) for rank in having)).abs().sum() < 1e-14


def step_with_other_weights(group, changed, named):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].weight.requires_grad_(False)  # what is not trained is in the loss too
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(0.5 if group.rank == 2 and name == changed else 0.25)
    model(torch.ones(1, 2)).sum().backward()
    before = model[1].weight.grad.clone()
    try:
        for _ in range(2):
            cp.reduce_gradients(model if named else model.parameters(), group)
    except CallMismatchError as error:
        assert torch.equal(model[1].weight.grad, before)
        return str(error)
    return "reduced"


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("changed", ["0.weight", "1.bias"])
def test_rejects_other_weights_on_a_rank(changed, named):
    for said in run_ranks(step_with_other_weights, 3, changed, named):
        assert "the ranks' parameters differ (rank 2 from rank 0); build the model after the same" in said
        lines = said.splitlines()[1:]
        name = changed if named else {"0.weight": "parameters[0]", "1.bias": "parameters[3]"}[changed]
        assert [line.split(": ")[:2] for line in lines] == [["  rank 0", name], ["  rank 2", name]]
    assert run_ranks(step_with_other_weights, 3, "", named) == ["reduced"] * 3


def test_messages_hold_nothing_that_nobody_wrote(monkeypatch):
    start, sent = ThreadGroup.start_all_to_all, []

    def watched(self, received, message, *splits):
        sent.append(bool(message.isfinite().all()))
        return start(self, received, message, *splits)

    monkeypatch.setattr(ThreadGroup, "start_all_to_all", watched)
    run_ranks(reduced, 3, {(0, 2)}, (torch.float64,))
    assert len(sent) > 3
    assert all(sent)


def in_bfloat16(group):
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    parameter.grad = torch.full([1], 256.0 if group.rank == 0 else 1.0, dtype=torch.bfloat16)
    cp.reduce_gradients([parameter], group)
    return parameter.grad.item()


def test_sums_of_fewer_bits_are_made_in_fp32_and_other_parameters_are_rejected():
    assert run_ranks(in_bfloat16, 3) == [258.0] * 3  # 256 + 1 is 256 in bfloat16
    with pytest.raises(RankError, match=r"parameter 0: .*\[3, 2\]") as caught:
        run_ranks(other_parameters, 2)
    assert isinstance(caught.value.__cause__, CallMismatchError)


def of_module(group):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight  # shared: summed once
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model[1].bias.requires_grad_(False).grad = torch.ones(2)
    storage = torch.full((4,), group.rank + 1.0)
    model[0].weight.grad = storage.view(2, 2)
    model[0].bias.grad = torch.ones(2)
    cp.reduce_gradients(model, group)
    return storage.tolist(), model[0].bias.grad.tolist(), model[1].bias.grad.tolist()


def test_a_modules_gradients_are_summed_where_they_are(monkeypatch):
    assert run_ranks(of_module, 3) == [([6.0] * 4, [3.0] * 2, [1.0] * 2)] * 3
    (weight,) = parameters_of(0)[:1]
    before = weight.grad.clone()
    cp.reduce_gradients(iter([weight]))
    assert torch.equal(weight.grad, before)
    monkeypatch.setattr(gradients_module, "_BUCKET_BYTES", 1000)
    assert run_ranks(bytes_kept, 2) == [(0, 2000.0)] * 2


def with_sparse_gradient():
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    return layer


class Sharded(nn.Parameter):
    """Looks like a DTensor."""

    placements = ()


REFUSED = {
    "sparse": (with_sparse_gradient, r"parameters\[0\]: got 'a gradient that is torch.sparse_coo'"),
    "sharded": (lambda: [Sharded(torch.ones(2))], r"parameters\[0\]: got 'a DTensor'.*averaged_gradients=True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rejects_what_has_no_gradients_to_sum(case):
    make, message = REFUSED[case]
    rejects(message, cp.reduce_gradients, make())


@pytest.mark.parametrize("name", ["DistributedDataParallel", "FullyShardedDataParallel"])
@pytest.mark.parametrize("inside", [False, True])
def test_rejects_a_module_that_reduces_by_itself(monkeypatch, name, inside):
    class Wrapped(nn.Linear):
        pass

    monkeypatch.setattr(gradients_module, name, Wrapped)  # the real ones want a process group
    with pytest.raises(ArgumentError, match=r"parameters: got 'a Wrapped module'.*averaged_gradients=True"):
        cp.reduce_gradients(nn.Sequential(Wrapped(2, 2)) if inside else Wrapped(2, 2))


def tied(group, first):
    weight, other = (nn.Parameter(torch.ones(n)) for n in (3, 5))
    weight.grad, other.grad = torch.full((3,), group.rank + 1.0), torch.ones(5)
    cp.reduce_gradients([weight, other, weight] if first else [other, weight, weight], group)
    return weight.grad.tolist(), other.grad.tolist()


@pytest.mark.parametrize("first", [True, False])
def test_tied_weights_are_summed_once(first, monkeypatch):
    monkeypatch.setattr(gradients_module, "_BUCKET_BYTES", 16)  # every parameter is a bucket
    assert run_ranks(tied, 2, first) == [([3.0] * 3, [2.0] * 5)] * 2


def bytes_kept(group):
    weight = nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones(1000)
    cp.reduce_gradients([weight], group)
    return group.buffers.size, weight.grad.sum().item()


def test_rejects_a_gradient_of_another_type():
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    if not hasattr(weight, "grad_dtype"):
        pytest.skip("before torch 2.10 a gradient has the type of its parameter")
    weight.grad_dtype = None
    weight.grad = torch.ones(2)
    rejects(r"a gradient of torch.float32 of a parameter of torch.bfloat16", cp.reduce_gradients, [weight])


def other_parameters(group):
    cp.reduce_gradients(nn.Linear(2, 3 if group.rank == 1 else 2), group)


def test_parameters_are_compared_with_one_wait_for_the_device():
    """However many there are: on a device each reading of a number waits for all work before it."""

    def on_rank(group, count):
        tensors = [torch.ones(2, requires_grad=True) for _ in range(count)]
        counters = Counters()
        with counters:
            cp.reduce_gradients(tensors, group)
        return counters.host_syncs["tolist"]

    few, many = (run_ranks(lambda group, count=count: on_rank(group, count), 2) for count in (3, 90))
    assert few == many
