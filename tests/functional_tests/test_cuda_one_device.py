"""Tests of a rank with a device of its own: over NCCL on a GPU, over gloo on the emulated device."""

import os
import socket
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_cp.cli.main import main
from megatron_cp.executor.launch import start_torchrun_rank
from tests.functional_tests.test_cuda import ATTENTION, GDN, assert_close, layer_on_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

IS_EMULATED = "NULLGPU" in os.environ


@pytest.fixture
def told(monkeypatch):
    """Returns the arguments that torch receives when the rank joins a job that torchrun would start."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    job = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in (job | {"MASTER_PORT": port}).items():
        monkeypatch.setenv(name, str(value))
    join, told = dist.init_process_group, {}

    def joins(backend, **how):
        told.update(how, backend=backend)
        return join(backend, **how)

    monkeypatch.setattr(dist, "init_process_group", joins)
    yield told
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_rank_says_which_device_is_its_own(told):
    group = start_torchrun_rank()
    assert (told["backend"], told["device_id"]) == ("nccl", torch.device("cuda", 0))
    assert (group.rank, group.size) == (0, 1)
    assert dist.get_backend(group.host_group) == "gloo"
    assert group.all_gather_object({"rows": 3}) == [{"rows": 3}]


@pytest.mark.parametrize("case", [replace(ATTENTION, scheme="a2a"), GDN], ids=lambda case: case.layer)
def test_a_layer_over_it_equals_float64(told, case):
    """Its rows are shuffled, so that all of them go through the group."""
    case = replace(case, cp=1, layout="random")
    assert_close(case, [layer_on_device(start_torchrun_rank(), case, True)], case, 2e-2)


@pytest.mark.skipif(IS_EMULATED, reason="needs NCCL")
def test_a_wait_of_nccl_orders_streams_and_not_the_host(told):
    group = start_torchrun_rank()
    sent, received = torch.arange(1 << 22, device="cuda"), torch.zeros(1 << 22, dtype=torch.int64, device="cuda")
    group.start_all_to_all(received, sent, [1 << 22], [1 << 22]).wait()  # the first one makes what others need
    torch.cuda.synchronize()
    received.zero_()
    torch.cuda._sleep(200_000_000)  # a tenth of a second
    slept = torch.cuda.Event()
    slept.record()
    group.start_all_to_all(received, sent, [1 << 22], [1 << 22]).wait()
    assert not slept.query()
    assert torch.equal(received, sent)


@pytest.mark.skipif(IS_EMULATED, reason="needs NCCL")
def test_a_graph_replays_collectives(told):
    group = start_torchrun_rank()
    sent, received, gathered = (torch.arange(64, device="cuda") * number for number in (1, 0, 0))

    def step():
        group.start_all_to_all(received, sent, [64], [64]).wait()
        group.start_all_gather(gathered, sent).wait()

    step()  # makes what a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    sent += 1
    graph.replay()
    assert torch.equal(received, sent)
    assert torch.equal(gathered, sent)


def test_commands_choose_the_device(told, capsys):
    """`check` of such a job runs on its devices, doctor looks at the kernels for them."""
    tiny = ["--lengths", "7,3", "--heads", "2", "--head-dim", "16"]
    assert main(["check", "--layer", "attention", "--cp", "1", *tiny]) == 0
    assert main(["doctor", "--all"]) == 0
    assert "kernel varlen of attention" in capsys.readouterr().out


def test_a_group_of_device_memory_has_a_twin_for_the_hosts(told, monkeypatch):
    megatron = pytest.importorskip("megatron_cp.megatron.groups", reason="needs megatron-core")
    start_torchrun_rank()
    world, backend = dist.group.WORLD, dist.get_backend
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl" if group is world else backend(group))
    twin = megatron._host_twin(world)
    assert dist.get_backend(twin) == "gloo"
    assert dist.get_process_group_ranks(twin) == [0]
    assert megatron._host_twin(twin) is None
