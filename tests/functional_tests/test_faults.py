"""`make faults`: what it draws, what it makes of what it saw, that it sees hangs and orphans; and some of it."""

import dataclasses
import json
import sys

import pytest

pytest.importorskip("megatron.core")
if not sys.platform.startswith("linux"):
    pytest.skip("it finds processes by what Linux has", allow_module_level=True)

from megatron_cp.executor.launch import run_ranks
from megatron_cp.plan.schemes import SCHEMES
from tests.commands import run_python
from tools.faults import operations
from tools.faults.__main__ import line, summary, table
from tools.faults.cases import BEHAVIOUR, DISAGREE, FAULTS, Case, deviated, draw
from tools.faults.classify import CAUSES, classify, names_cause, names_rank, said
from tools.faults.job import Job

ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
NUMBERS = [[1.0, 2.0], [3.0, 4.0]]
GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:29"


def case_of(kind, **changes):
    """A case of that kind of fault, on rank 1 of 2, of ranks that start by themselves."""
    case = next(case for case in (draw(0, number) for number in range(2000)) if case.fault.kind == kind)
    fault = dataclasses.replace(case.fault, rank=1)
    return dataclasses.replace(
        case, **{"cp_size": 2, "fault": fault, "launch": "independent", "train": False, "dtype": "float64", **changes}
    )


def record_of(case, *ranks, **changes):
    """Returns the record of a job whose ranks wrote `numbers`, an error's message, or nothing and that exit code."""
    made = [
        {"numbers": end} if isinstance(end, list) else {"error": {"message": end}} if isinstance(end, str) else {}
        for end in ranks
    ]
    codes = {str(r): end if isinstance(end, int) else int(isinstance(end, str)) for r, end in enumerate(ranks)}
    return {
        "case": dataclasses.asdict(case), "fault": {"at": 100.0}, "hung": [], "stacks": "", "orphans": [],
        "last": 107.5, "codes": codes, "ranks": made, "caller": {}, "checkpoint": "", "reference": [NUMBERS] * 2,
        "log": {}, **changes,
    }  # fmt: skip


def test_a_case_is_decided_by_its_seed_and_number_and_its_fault_changes_the_layer():
    cases = [draw(3, number) for number in range(300)]
    assert cases == [draw(3, number) for number in range(300)]
    assert cases != [draw(4, number) for number in range(300)]
    assert [Case.of(case.text()) for case in cases] == cases
    for number in range(600):
        case = draw(2, number)
        if case.fault.kind in ("scheme", "transport", "chunks", "codec"):
            layer = case.layers[case.fault.layer]
            assert deviated(layer, case.fault, case.cp_size) != layer, case.text()


def test_every_fault_transport_scheme_and_launch_is_drawn():
    cases = [draw(0, number) for number in range(1500)]
    layers = [layer for case in cases for layer in case.layers]
    assert {case.fault.kind for case in cases} == set(FAULTS)
    assert {layer.kind for layer in layers} == {"attention", "gdn", "kda", "mamba", "conv1d"}
    assert {layer.transport for layer in layers} == {"collective", "pairwise", "hierarchical"}
    assert {*SCHEMES, "headwise", "chunkwise", "redistribute"} == {layer.scheme for layer in layers}
    assert {case.cp_size for case in cases} == {2, 3, 4}
    for name in ("launch", "spawn", "fresh", "train", "replan", "agree", "own_reduce", "destroy"):
        assert len({getattr(case, name) for case in cases}) == 2, name
    assert {layer.chunks for layer in layers} == {None, 1, 2}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of ranks without heads
@pytest.mark.thorough
def test_every_case_can_be_planned_with_and_without_its_fault():
    for number in range(400):
        case = draw(1, number)
        planned = (*case.layers, deviated(case.layers[case.fault.layer], case.fault, case.cp_size))
        plans = [operations.parity_case(layer, case, case.lengths).plan() for layer in planned]
        assert {plan.cp_size for plan in plans} == {case.cp_size}


def test_jobs_without_their_fault_have_the_same_numbers_on_any_ranks():
    def rank(group, case):
        return Job(case, group, group, None).run()

    for case in (draw(0, number) for number in (2, 13, 22)):  # which search for no tiles
        case = dataclasses.replace(case, fault=dataclasses.replace(case.fault, kind="kill"), own_reduce=False)
        assert run_ranks(rank, case.cp_size, case) == run_ranks(rank, case.cp_size, case)


OTHER = [[1.0, 2.0], [3.0, 4.001]]
LOST, LAUNCHED = "lost rank 1", {"launch": "launcher"}
FIRST, SECOND = "Error: rank 0 waits for rank 1", "Error: rank 2 waits for rank 0"
ABORTED = "0 of 2 ended with exit code -6, rank 1"
SAID = "megatron-cp train: rank 1 of 2 failed:\nTraceback\nKeyError: 'x'\n\n"
BAR = {"caller": {"ok": False, "exit_codes": []}, "log": {"-1": f"CP=2: 0%|  | 0/4 [00:00<?, ?step/s]{SAID}"}}


def caller(message, *codes):
    return {"caller": {"ok": False, "error": {"message": f"RankError: rank {message}"}, "exit_codes": codes}}


# The fault, changes of its case, the ends of its ranks, changes of the record, and what that is called: as a whole, or
# for some of the ranks.
OUTCOMES = [
    ("softcap", {}, [NUMBERS, NUMBERS], {}, "right"),
    ("softcap", {}, [OTHER, NUMBERS], {}, {"rank 0": "silent", "rank 1": "right"}),
    ("softcap", {}, [[[1.0, float("nan")], [3.0, 4.0]], NUMBERS], {}, "silent"),
    ("softcap", {}, [NUMBERS[:1], NUMBERS], {}, "silent"),
    ("softcap", {}, [NUMBERS, NUMBERS], {"reference": "ended with 1"}, "not known"),
    ("dtype", {}, [-6, "x: dtypes differ"], {}, {"rank 0": "abort"}),
    ("dtype", {}, [-11, "x: dtypes differ"], {}, {"rank 0": "abort"}),
    ("kill", {}, [-6, -9], {}, "abort"),
    ("kill", {}, [LOST, -9], {}, "error"),  # the fault's own rank may
    ("stop", {}, [LOST, 0], {"hung": [0]}, "hang"),
    ("stop", LAUNCHED, [LOST, 0], {"hung": [-1]}, {"caller": "hang"}),
    ("kill", {"save": "megatron"}, [LOST, -9], {}, "error"),
    ("kill", {"save": "megatron"}, [LOST, -9], {"orphans": ["77 T python"]}, "orphan"),
    ("kill", {"save": "megatron"}, [LOST, -9], {"checkpoint": "step 2 was saved"}, "checkpoint"),
    ("kill", {"save": "megatron"}, [LOST, -9], {"fault": {}}, "not reached"),
    # Errors must name the lost rank, or the peer that they wait for.
    ("kill", {}, [GLOO, -9], {}, "no cause"),
    ("kill", {}, ["LostError: rank 0 failed", -9], {}, "no cause"),
    ("kill", {}, [1, -9], {"log": {"0": ""}}, "no cause"),
    ("stop", {"cp_size": 3}, [FIRST, -9, SECOND], {}, "error"),
    ("stop", {"cp_size": 3}, [FIRST, -9, GLOO], {}, {"rank 2": "no cause"}),
    ("stop", {"cp_size": 3}, [SECOND, -9, SECOND], {}, "no cause"),
    ("delay", {}, [NUMBERS, NUMBERS], {}, "right"),
    ("delay", {}, ["LostError: rank 1 is late", NUMBERS], {}, "refused"),
    # A launcher is judged by what its caller gets; of new processes it alone knows how they ended.
    ("kill", LAUNCHED, [GLOO, -9], caller("1 of 2 was killed; out of memory", 1, -9), "error"),
    ("exit", LAUNCHED, [GLOO, 0], caller(f"0 of 2 failed:\n{GLOO}", 1, 0), {"caller": "no cause"}),
    ("exit", LAUNCHED, [-6, 0], caller(ABORTED, -6, 1), {"rank 0": "abort"}),
    ("exit", LAUNCHED, [1, 0], caller(ABORTED), {"a rank": "abort"}),
    ("kill", LAUNCHED, [GLOO, -9], {"caller": {}}, "abort"),
    ("exit", LAUNCHED, [NUMBERS, NUMBERS], {"caller": {"ok": True}}, "right"),
    ("seed", LAUNCHED, [[[9.0]], NUMBERS], {"caller": {"ok": True}}, {"rank 0": "silent"}),
    # Whoever complains first is named in front, which is not whom it complains about.
    ("stop", LAUNCHED, [1, -9], caller("1 of 2 failed:\nTimed out waiting", 1, 1), "no cause"),
    ("raise", LAUNCHED | {"train": True}, [1, 1], BAR, "error"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "ends", "record", "expected"), OUTCOMES)
def test_a_job_is_called(kind, changes, ends, record, expected):
    verdict = classify(record_of(case_of(kind, **changes), *ends, **record))
    found = verdict.of if isinstance(expected, dict) else {"all": verdict.outcome}
    assert found.items() >= (expected if isinstance(expected, dict) else {"all": expected}).items()


def test_errors_are_timed_and_a_final_message_may_follow_a_bar():
    named = classify(record_of(case_of("kill"), "LostError: rank 1 closed its connection", -9))
    assert (named.outcome, named.named, named.seconds) == ("error", (1, 1), 7.5)
    barred = classify(record_of(case_of("raise", launch="launcher", train=True), 1, 1, **BAR))
    assert barred.messages["caller"].startswith(SAID[:22])


@pytest.mark.parametrize("kind", sorted(DISAGREE))
def test_errors_must_name_what_differs(kind):
    case = case_of(kind)
    words = {
        "dtype": "dtype: torch.float32, torch.float64", "batch": "batch: 2, 1", "scale": "softmax_scale: 3.0, 0.35",
        "sink_given": "sink: given, None", "sink_values": "sink: other values", "requires_grad": "requires_grad: q",
        "no_grad": "grad mode: off", "inference_mode": "grad mode: off", "lengths": "document lengths: 3, 4",
        "chunks": "head_chunks: 1, 2", "skip_layer": "rank 1 calls another layer",
        "skip_backward": "rank 1: no backward", "order": "rank 1 is in another layer",
        "checkpoint": "only rank 1 recomputes",
    }  # fmt: skip
    found = f"PlanMismatchError: {words.get(kind, f'{kind}: a, b')}"
    assert classify(record_of(case, found, found)).outcome == "error"
    assert classify(record_of(case, found, GLOO)).outcome == "no cause"
    timed_out = "RuntimeError: Timed out waiting 8000ms for recv operation to complete"
    assert classify(record_of(case, timed_out, timed_out)).outcome == "no cause"


def test_every_disagreement_has_words_that_name_it():
    assert set(CAUSES) == set(DISAGREE) - set(BEHAVIOUR)  # of those no rank can tell more than who did


@pytest.mark.parametrize("kind", sorted(DISAGREE))
def test_ranks_that_wait_for_others_than_the_fault_name_no_cause(kind):
    """Steps, advice and the rank that speaks stand in every error of a wait, and must not pass for the cause."""
    steps = ("attention [0a1b2c3d], a2a, exchange of q, k, v to tokens, backward", "gradients of keys and values")
    ranks = {0: (steps[0], 2), 2: (steps[1], 0)}
    lines = [
        f"  rank {rank} is in {step}, waiting for 8 bytes from rank {peer}" for rank, (step, peer) in ranks.items()
    ]
    text = (
        f"PeerError: rank 0 of 4, in {steps[0]}, waiting for 8 bytes from rank 2: ranks do different things with the "
        "same group, so it never arrives; every rank must make the same calls in the same order, forward and "
        "backward:\n" + "\n".join(lines)
    )
    case = case_of(kind, cp_size=3)
    assert not names_cause(dataclasses.replace(case, fault=dataclasses.replace(case.fault, rank=3)), text)


def test_names_of_ranks_and_seeds_are_looked_for_in_what_an_error_says():
    assert names_rank("waits for rank 1", 1)
    assert names_rank("ranks 0, 2 and 3 did not answer", 3)
    assert not names_rank("waits for rank 12", 1)
    assert not names_rank("waited 1 s", 1)
    assert not names_rank("rank 0 waited 1 s", 1)
    text = 'RankError: failed:\nTraceback (most recent call last):\n  File "a.py"\n    softcap = rank 1\nOSError: no'
    assert said(text) == "RankError: failed:\nOSError: no"
    waits = "PeerError: rank {} of 2, in attention [0a1b2c3d], seed {}, a2a, waiting for 8 bytes from rank 1"
    case = case_of("seed")
    assert not names_cause(case, waits.format(0, 2))
    assert names_cause(case, waits.format(0, 2) + ":\n" + waits.format(1, 5))
    # Whom torch's own collectives have lost, none of their errors says.
    lost = "PeerError: rank 0 of 2, in {}, after 0 s: another rank did not answer, has ended, or does something else."
    case = case_of("kill_in_save", save="megatron")
    assert names_cause(case, lost.format("saving iter_0000002"))
    assert not names_cause(case, lost.format("step 2 of training"))
    assert not names_cause(case_of("kill", save="none"), lost.format("saving iter_0000002"))


def test_report_counts_and_reproduces():
    case, other = case_of("kill"), case_of("softcap")
    results = [
        (case, classify(record_of(case, LOST, -9))),
        (case, classify(record_of(case, GLOO, -9))),
        (other, classify(record_of(other, [[9.0]], NUMBERS))),
    ]
    expected = {"cases": 3, "failed": 2, "silent": 1, "no cause": 1, "hang": 0, "errors": 2, "seconds_most": 7.5}
    assert expected.items() <= summary(results).items()
    assert [row.split()[:2] for row in table(results).splitlines()[1:]] == [
        ["kill", "2"],
        ["softcap", "1"],
        ["all", "3"],
    ]
    assert Case.of(line(*results[2]).split("'")[1]) == other


SAVED = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from tools.faults import saves
folder = Path(sys.argv[1])

def problem():
    found = saves.problem(folder)
    if dist.is_initialized():
        dist.destroy_process_group()
    return found[:60]

print(problem())  # nothing was promised
dist.init_process_group("gloo", init_method=f"file://{folder}/saving", rank=0, world_size=1)
saves.save(folder, {"a": torch.ones(2)}, 1)
dist.destroy_process_group()
saves.note(folder, 1)
print(problem())
saves.note(folder, 2)
print(problem())
for data in folder.glob("checkpoints/*/*.distcp"):
    data.write_bytes(data.read_bytes()[:100])
print(problem())
"""


@pytest.mark.thorough
def test_checkpoint_that_is_damaged_or_older_than_promised_is_a_problem(tmp_path):
    nothing, fine, older, damaged = run_python("-c", SAVED, tmp_path, **ON_CPU).stdout.splitlines()
    assert (nothing, fine, older) == ("", "", "step 2 was saved, and step 1 is there")
    assert damaged.startswith("step 2 was saved, and loading ends in ")


# Jobs of one process, made as the campaign makes them: who watches forks it.
WATCHED = """
import dataclasses, os, sys, time
from pathlib import Path
from tools.faults.cases import draw
from tools.faults.watch import Watch, adopt
adopt(lambda *_: None)
case = dataclasses.replace(draw(0, 0), launch="launcher")
for what in ("well", "orphan", "hang"):
    watched = Watch(case, Path(sys.argv[1]), limit=2.0, grace=1.0)
    watched.fault = {"at": time.monotonic(), "ask": None, "pid": 0}
    pid = os.fork()
    if pid == 0:
        if what == "orphan" and os.fork():
            os._exit(0)
        time.sleep(0 if what == "well" else 60)
        os._exit(0)
    watched.pids[-1] = pid
    seen = watched.follow()
    print(what, seen["hung"], len(seen["orphans"]))
"""


def test_sees_what_hangs_and_what_is_left(tmp_path):
    printed = run_python("-c", WATCHED, tmp_path, **ON_CPU).stdout
    assert printed.splitlines() == ["well [] 0", "orphan [] 1", "hang [-1] 0"]


@pytest.mark.timeout(600)  # on a busy machine, and with hangs to wait for
@pytest.mark.thorough
def test_some_faults_come_to_a_good_end(tmp_path):
    # Stopped ranks, a kill within a save, and twice the process that started the ranks is killed, once `train`.
    command = ["-m", "tools.faults", "--seed", "280", "--count", "16", "--timeout", "12"]
    run_python(*command, "--json", tmp_path / "faults.json", seconds=550, **ON_CPU)
    assert json.loads((tmp_path / "faults.json").read_text())["summary"]["cases"] == 16
