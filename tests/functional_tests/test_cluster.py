"""tools/cluster: what its links carry, what its ranks are told, how it ends and what it leaves behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

from tests.limits import limit

TOOL = Path(__file__).parents[2] / "tools" / "cluster"
EXCHANGE = """
import json, os
import torch
import torch.distributed as dist
from megatron_cp.executor.launch import in_torchrun, start_torchrun_rank

assert in_torchrun()
start_torchrun_rank(timeout=60)
rank, size = dist.get_rank(), dist.get_world_size()
received = torch.empty(size, dtype=torch.int64)
dist.all_to_all_single(received, 10 * rank + torch.arange(size))
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "OMP_NUM_THREADS")
told = [None] * size
numbers = [int(os.environ[name]) for name in names]
dist.all_gather_object(told, [received.tolist(), numbers, os.getpid(), os.readlink("/proc/self")])
if rank == 0:
    print(json.dumps(told))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def can_run():
    check = subprocess.run([sys.executable, TOOL, "check"], capture_output=True, text=True, timeout=30)
    if check.returncode == 2:
        pytest.skip(check.stderr.strip())
    assert check.returncode == 0, check.stderr


@pytest.fixture
def start(can_run):
    """Starts the tool with a mark in the environment, which everything that it starts inherits."""
    mark = f"CLUSTER_TEST={uuid.uuid4()}"
    tools = []

    def started(*arguments):
        environment = os.environ | dict([mark.split("=")]) | {"CUDA_VISIBLE_DEVICES": ""}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        tool = subprocess.Popen(
            [sys.executable, TOOL, *arguments], env=environment, text=True, start_new_session=True, **pipes
        )
        tool.mark = mark
        tools.append(tool)
        return tool

    yield started
    for tool in tools:
        tool.kill()
        tool.communicate(timeout=limit(30))


@pytest.fixture
def run(start):
    """Runs the tool to its end: its exit code, standard output and standard error, and nothing is left of it."""

    def finished(*arguments, timeout=60):
        tool = start(*arguments)
        out, err = tool.communicate(timeout=limit(timeout))
        assert marked(tool.mark) == []
        return tool.returncode, out, err

    return finished


def marked(mark):
    """Process numbers of all processes whose environment has the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(path.name)
        except OSError:  # it has just ended
            continue
    return found


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + limit(seconds)
    while not condition():
        assert time.monotonic() < deadline, "this did not happen in time"
        time.sleep(0.05)


def outside():
    """The links and named namespaces of the machine, which are none of the tool's business."""
    return sorted(Path("/sys/class/net").iterdir()), sorted(Path("/run").glob("netns/*"))


def test_links_have_the_rate_that_is_set_and_nothing_limits_a_host_itself(run):
    """Both ends of a host's link: its own, and the bridge's, which are in the network of the first process."""
    show = "tc qdisc show dev eth0; tc qdisc show dev lo; nsenter --target 1 --net tc qdisc show"
    code, out, err = run("run", "--ranks-per-host", "1,1,1", "--between", "100mbit", "--", "sh", "-c", show)
    assert code == 0, err
    assert "100 Mbit/s each way, burst 16384 bytes" in err.splitlines()[0]
    limited = re.findall(r"^qdisc tbf \S+ (?:dev (\S+) )?root .*rate 100Mbit burst 16Kb", out, re.MULTILINE)
    assert limited == ["", "port0", "port1", "port2"]
    assert "qdisc noqueue" in out.splitlines()[1]


def test_ranks_exchange_as_under_torchrun(run, tmp_path):
    script, hosts = tmp_path / "exchange.py", [2, 1]
    script.write_text(EXCHANGE)
    code, out, err = run("run", "--ranks-per-host", "2,1", "--between", "100mbit", "--", sys.executable, str(script))
    assert code == 0, err
    size = sum(hosts)
    places = [(host, local) for host, count in enumerate(hosts) for local in range(count)]
    for rank, (received, told, process, shown) in enumerate(json.loads(out.splitlines()[-1])):
        host, local = places[rank]
        assert received == [10 * other + rank for other in range(size)]
        assert told == [rank, size, local, hosts[host], host, len(hosts), 1]
        assert process < 1000  # a number of a namespace of its own
        assert shown == str(process)  # and /proc is that namespace's


@pytest.mark.parametrize(("end", "expected"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_a_failing_rank_ends_the_others_and_gives_its_exit_code(run, end, expected):
    script = f"echo said by $RANK; if [ $RANK = 2 ]; then sleep 0.5; {end}; fi; sleep 600"
    code, out, err = run("run", "--ranks-per-host", "2,2", "--", "sh", "-c", script)
    assert code == expected
    assert out == "said by 0\n"
    assert err.splitlines()[1:] == [f"tools/cluster: rank 2 failed with exit code {expected}", "rank 2: said by 2"]


def test_what_ranks_leave_behind_ends_with_them(run):
    code, out, err = run("run", "--", "sh", "-c", "sleep 600 & echo done by $RANK")
    assert (code, out) == (0, "done by 0\n")
    assert len(err.splitlines()) == 1  # nothing of the tool's own but its first line


def test_time_limit(run):
    script = "echo said by $RANK; [ $RANK = 0 ] || sleep 600"
    code, out, err = run("run", "--ranks-per-host", "1,2", "--time-limit", "1", "--", "sh", "-c", script)
    assert code == 124
    assert out == "said by 0\n"
    assert "rank 2: said by 2" in err
    assert "ranks [1, 2] still ran" in err
    assert err.splitlines()[-1] == "tools/cluster: ended by --time-limit 1"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_nothing_is_left_of_it_when_it_is_killed(start, tmp_path, number):
    before = outside()
    script = f"sleep 600 & touch {tmp_path}/$RANK; trap '' TERM INT; wait; sleep 600"
    tool = start("run", "--ranks-per-host", "2,2", "--", "sh", "-c", script)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 4)
    processes = marked(tool.mark)
    assert len(processes) >= 2 + 2 * 4
    assert outside() == before
    (os.killpg if number == signal.SIGINT else os.kill)(tool.pid, number)  # Ctrl-C reaches all that it can
    _, err = tool.communicate(timeout=limit(10))
    assert tool.returncode == -number
    assert len(err.splitlines()) == 1
    wait_until(lambda: not marked(tool.mark))  # of which the kernel ends network namespaces with the last
    assert outside() == before


@pytest.mark.parametrize(
    ("answer", "expected"), [("Error: Specified qdisc kind is unknown.", 2), ("Error: argument is wrong.", 1)]
)
def test_only_what_the_kernel_lacks_is_called_so(run, monkeypatch, tmp_path, answer, expected):
    (tmp_path / "tc").write_text(f"#!/bin/sh\necho '{answer}' >&2\nexit 2\n")
    (tmp_path / "tc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    code, out, err = run("check")
    assert (code, out) == (expected, "")
    assert err.strip().endswith(f"failed: {answer}")
    assert ("Traceback" in err) == (expected == 1)  # else tests would be skipped where they should fail


@pytest.fixture
def main(monkeypatch):
    """The tool's main in this process, for what is refused before anything starts."""
    loader = SourceFileLoader("cluster_tool", str(TOOL))
    spec = spec_from_loader(loader.name, loader)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, loader.name, module)  # where dataclasses look
    loader.exec_module(module)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "no-such-command" else f"/bin/{name}")
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it started something"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it started something"))
    return module.main


def refused_by_the_kernel(flags):
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize(
    ("where", "name", "substitute", "sentence"),
    [
        (os, "geteuid", lambda: 1000, "it needs root, to make network namespaces and to limit the links between them."),
        (shutil, "which", lambda name: None if name == "tc" else name, "it needs tc, of Debian's packages iproute2"),
        (os, "unshare", refused_by_the_kernel, "a PID namespace is refused (Operation not permitted)."),
    ],
    ids=["root", "tools", "namespaces"],
)
def test_rejects_machines_where_it_cannot_run(main, monkeypatch, capsys, where, name, substitute, sentence):
    monkeypatch.setattr(where, name, substitute)
    for arguments in (["check"], ["run", "--", "true"]):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"tools/cluster: cannot run here: {sentence}")
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--ranks-per-host", "2,0", "--", "true"], "'2,0'; give 2,2 or such, a number from 1 on for each"),
        (["run", "--between", "fast", "--", "true"], "'fast'; give 100mbit or 2.5gbit, 8kbit or more"),
        (["run", "--between", "1kbit", "--", "true"], "'1kbit'; give 100mbit or 2.5gbit, 8kbit or more"),
        (["run"], "tools/cluster run [options] -- COMMAND"),
        (["check", "--", "true"], "tools/cluster run [options] -- COMMAND"),
        (["run", "--", "no-such-command"], "there is no command 'no-such-command'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_rejects_arguments(main, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
