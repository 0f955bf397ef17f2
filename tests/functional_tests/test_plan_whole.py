"""`megatron-cp plan --whole`, several sizes, machines and what fits."""

import itertools
import json
import re

import pytest

from megatron_cp.cli.main import main, parsed
from megatron_cp.cli.report import Report

BATCH = ["--documents", "64", "--tokens-per-rank", "4096"]


def printed(*arguments):
    """The text and the object of a plan, whose exit status is 3 if nothing fits."""
    args = parsed(["plan", *arguments])
    report = args.run(args)
    assert report.status == (0 if report.data.get("fits", True) else 3)
    return report.text, json.loads(json.dumps(report.data))


def test_a_whole_model_has_a_row_for_each_size_and_layout():
    out, found = printed("--whole", "--model", "qwen3-next", "--cp", "8,16", *BATCH, "--gpu", "h200")
    assert [(row["cp"], row["layout"]) for row in found["rows"]] == [
        (cp, layout) for cp in (8, 16) for layout in ("contiguous", "zigzag", "balanced")
    ]
    for row in found["rows"]:
        parts = [value for name, value in row["milliseconds"].items() if name != "layers"]
        assert row["milliseconds"]["layers"] == pytest.approx(sum(parts))
        assert {plan["kind"] for plan in row["plans"]} == {"attention", "gdn"}
    assert found["machine"].startswith("h200: ")
    assert "predicted for h200" in out


def test_the_smallest_size_that_fits_is_taken_in_its_fastest_layout():
    out, found = printed("--whole", "--model", "llama3-8b", "--cp", "8,16", *BATCH, "--gpu", "h200")
    times = {row["layout"]: row["milliseconds"]["layers"] for row in found["rows"] if row["cp"] == 8}
    best = found["best"]
    assert (best["cp"], times[best["layout"]]) == (8, min(times.values()))
    first, flags = out.splitlines()[:2]
    (plan,) = best["plans"]
    assert first.startswith(f"take this: cp 8 in layout {best['layout']}, attention (causal in each document) by ")
    assert plan["scheme"] in first
    assert first.endswith(" in 32 layers")
    assert flags == f"flags: {best['flags']}"
    assert found["take_this"] == best["flags"]
    assert found["verdict"] == out.split("\n\n")[0].splitlines()


@pytest.mark.parametrize(("room", "fits"), [(1.12, True), (1.1, False)])
def test_a_tenth_of_the_memory_stays_free(room, fits):
    shape = ["--whole", "--model", "llama3-8b", "--cp", "1", "--lengths", "4096", "--recompute", "none"]
    predicted = sum(printed(*shape, "--gpu", "b200")[1]["best"]["bytes"].values())
    out, found = printed(*shape, "--fit", str(int(room * predicted)))
    assert found["fits"] == fits
    assert ("and 10% must stay free" if fits else "with 10% of it free") in out.splitlines()[3 if fits else 0]


def test_a_mask_is_that_of_every_attention():
    shape = ["--whole", "--model", "llama3-8b", "--cp", "8", "--layout", "balanced", "--lengths", "262144"]
    times = {}
    for mask in ("causal", "star", "strided"):
        found = printed(*shape, "--mask", mask)[1]
        times[mask] = found["rows"][0]["milliseconds"]["attention"]
    # As visible pairs, a half, 5/16 and 56/256 of all, and a little more, since each band loads its queries anew.
    for mask, share in (("star", 10 / 16), ("strided", 112 / 256)):
        assert 1 <= times[mask] / (share * times["causal"]) < 1.08, mask


@pytest.mark.thorough
def test_a_search_lets_auto_weigh_tiles_of_a_whole_model():
    one_head = (
        "--num-layers 2 --hidden-size 128 --num-attention-heads 1 --ffn-hidden-size 256 --swiglu --vocab-size 512 "
        "--disable-bias-linear"
    )
    shape = ["--whole", "--model", one_head, "--cp", "4", "--layout", "contiguous", "--lengths", "65536"]
    shape += ["--mask", "global_local"]
    _, without = printed(*shape)
    assert "tiled" not in without["best"]["flags"]
    _, found = printed(*shape, "--search", "0.01")
    assert "--cp-comm-type tiled --cp-search 0.01" in found["take_this"]
    assert found["best"]["milliseconds"]["layers"] < without["best"]["milliseconds"]["layers"]


def test_the_smallest_size_that_fits_is_taken():
    shape = ["--whole", "--model", "llama3-8b", "--layout", "balanced", *BATCH]
    _, roomy = printed(*shape, "--cp", "4,8,16", "--fit", "80GiB")
    fitting = [row["cp"] for row in roomy["rows"] if row["fits"]]
    assert roomy["best"]["cp"] == min(fitting) == 8
    out, small = printed(*shape, "--cp", "4,8", "--fit", "2GiB")
    assert (small["fits"], small["take_this"]) == (False, None)
    assert "nothing fits 2.0 GiB with 10% of it free: the nearest is cp 8" in out


def test_levers_that_are_advised_can_be_given_and_each_saves_memory():
    shape = ["--whole", "--model", "qwen3-next", "--cp", "8", "--sharding", "zero3", "--lengths", "262144"]
    near = printed(*shape)[1]
    limit = str(int(min(lever["total"] for lever in near["levers"]) / 0.9) + 2**28)
    (advised,) = re.findall(r" or (--logit-rows .*)\.$", printed(*shape, "--fit", limit)[0].splitlines()[0])
    text, found = printed(*shape, "--fit", limit, *advised.split())
    assert found["fits"]
    assert "all layers recomputed" in text.splitlines()[0]
    assert "--recompute-granularity full" in found["take_this"]
    assert ("--mlp-rows" in advised) == (near["levers"][2]["total"] < near["levers"][1]["total"])


def test_a_pack_that_fits_is_among_the_lengths_that_fit():
    """The number is rounded down, but not below the pack's own."""
    shape = ["--whole", "--model", "llama3-8b", "--cp", "1", "--lengths", "4000", "--gpu", "b200"]
    predicted = sum(printed(*shape)[1]["best"]["bytes"].values())
    assert printed(*shape, "--fit", str(int(predicted / 0.9) + 1))[1]["longest"] == 4000


@pytest.mark.parametrize("seconds", ["9", "2"])
def test_a_long_search_is_announced(capsys, monkeypatch, seconds):
    """The line is on standard error, before the plan: standard output is JSON all the same."""
    monkeypatch.setattr("megatron_cp.cli.plan._of_one_size", lambda args, cp, *_: Report("a plan", {"cp": cp}))
    assert main(["plan", "--lengths", "64", "--layout", "contiguous", "--search", seconds, "--json"]) == 0
    out, err = capsys.readouterr()
    said = "searching tiles for up to 18 s for each size and scheme of tiles ...\n"
    assert err == (said if seconds == "9" else "")
    assert json.loads(out) == {"cp": 4}


@pytest.mark.parametrize("batch", [["--lengths", "65536"], ["--lengths", "50001,1023,9000"]])
@pytest.mark.parametrize("fit", ["17GiB", "30GiB", "70GiB"])
@pytest.mark.few(of=lambda fit, batch: (fit, tuple(batch)))
def test_the_length_that_is_said_to_fit_does(fit, batch):
    """Asked again, with the documents scaled to it; and a tenth more does not."""
    shape = ["--whole", "--model", "llama3-8b", "--layout", "zigzag", "--cp", "16", "--fit", fit, "--sharding", "zero3"]
    out, found = printed(*shape, *batch)
    longest, given = found["longest"], [int(length) for length in batch[1].split(",")]
    assert f" {longest} tokens " in out
    assert "about" not in next(line for line in out.splitlines() if f" {longest} tokens " in line)
    for share, fits in ((1.0, True), (1.1, False)):
        edges = [round(sum(given[:number]) / sum(given) * longest * share) for number in range(len(given) + 1)]
        lengths = ",".join(str(hi - lo) for lo, hi in itertools.pairwise(edges))
        recompute = ["--recompute", found["best"]["recompute"]]
        assert printed(*shape, "--lengths", lengths, *recompute)[1]["fits"] == fits


LEVERS = ["--whole", "--model", "llama3-8b", "--cp", "8", "--layout", "contiguous", "--sharding", "zero3"]


def test_levers_of_memory_say_what_fits_with_them_and_what_they_cost():
    shape = [*LEVERS, "--recompute", "selective", "--fit", "80GiB"]
    out, found = printed(*shape, "--lengths", "65536")
    levers = found["levers"]
    assert levers[0]["longest"] == found["longest"]
    assert levers[0]["total"] == sum(found["best"]["bytes"].values())
    assert [lever["longest"] for lever in levers] == sorted(lever["longest"] for lever in levers)
    costs = [(lever["more_products"], lever["host_bytes"]) for lever in levers]
    assert costs[:2] == [(0, 0), (0, 0)]
    assert costs == sorted(costs)
    table = out.split("levers of memory")[1].splitlines()
    flags = []
    for lever, line in zip(levers, table[1:], strict=False):
        name = lever["name"] if lever in levers[:2] else f"and {lever['name']}"
        assert line.split("  ")[0] == name
        assert f" {lever['longest']} " in line
        flags += lever["name"].split() if lever is not levers[0] else []
        # A flag that is given again counts, as --recompute full.
        asked = [*shape, *flags]
        for share, fits in ((1.0, True), (1.1, False)):
            again = printed(*asked, "--lengths", str(int(share * lever["longest"])))[1]
            assert again["fits"] == fits, (lever["name"], share)
        same = printed(*asked, "--lengths", "65536")[1]["best"]
        assert (same["bytes"], same["host_bytes"]) == (lever["bytes"], lever["host_bytes"])


def test_levers_that_make_a_job_fit_are_among_the_remedies():
    out, found = printed(*LEVERS, "--lengths", "262144", "--fit", "40GiB", "--recompute", "selective")
    assert [lever["fits"] for lever in found["levers"]] == [False, False, False, True, True]
    assert out.splitlines()[0].endswith(" or --logit-rows 1024 --mlp-rows 1024 --recompute full.")


def test_a_size_has_a_line_and_hosts_that_are_far_apart_cost_time():
    out, found = printed("--cp", "2,4,8", "--layer", "gdn", "--model", "qwen3-next", *BATCH)
    assert list(found["sizes"]) == ["2", "4", "8"]
    assert found["cp"] == 2
    assert [line.split()[0] for line in out.splitlines()[5:8]] == ["2", "4", "8"]
    shape = ["--model", "llama3-8b", "--cp", "8", "--scheme", "a2a", "--lengths", "65536"]
    times = [printed(*shape, "--hosts", hosts)[1]["predicted_ms"]["forward"] for hosts in ("1", "4")]
    assert times[1] > 1.1 * times[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "h1000"], "--gpu: got 'h1000'; allowed: a100"),
        (["--whole", "--plot", "x.png"], "--plot: got 'x.png'; allowed: only without --whole"),
        (["--whole", "--lengths", "7,3", "--parents=-1,0"], "--parents: got [-1, 0]; allowed: only without --whole"),
        (["--fit", "80GiB"], "--fit"),
        (["--whole", "--gpus", "8"], "--gpus: there is no such option. plan no longer searches jobs: give --cp 8"),
        (["--whole", "--global-batch", "8"], "--global-batch: there is no such option. plan no longer predicts steps"),
        (["--whole", "--packs", "2"], "--packs: there is no such option. Give the lengths of all documents"),
        (["--whole", "--tp", "3"], "--tp: got 3; allowed: a divisor of"),
        (["--whole", "--pp", "49"], "--pp: got 49; allowed: stages that divide 48 layers"),
        (["--whole", "--recompute", "ops"], "--recompute: got 'ops'; allowed: none or selective or full"),
        (["--whole", "--recompute", "ops", "--sharding", "zero3"], "with these layers. ops is known only for"),
        (["--logit-rows", "8"], "--logit-rows: got 8; allowed: only with --whole"),
        (["--saved-on-host"], "--saved-on-host: got True; allowed: only with --whole"),
        (
            ["--whole", "--saved-on-host", "--recompute", "none"],
            "--saved-on-host: got True; allowed: only with recompute",
        ),
        (["--whole", "--mlp-rows", "0"], "--mlp-rows"),
        (["--gradients", "bf16"], "--gradients: got 'bf16'; allowed: only with --whole"),
        (["--whole", "--heads", "16"], "--heads: got 16; allowed: only without --whole"),
        (["--whole", "--layer", "gdn"], "--layer: got 'gdn'; allowed: only without --whole"),
        (["--whole", "--search", "1", "--scheme", "a2a"], "--search: got 1.0; allowed: 0 with a2a. No layer here"),
        (["--search", "nan"], "--search: got nan; allowed: seconds from 0 to 86400"),
        (["--fit", "80 apples"], "--fit: got '80 apples'; allowed: at least 1MiB, with its unit, such as 70GiB"),
        (["--fit", "70"], "--fit: got '70', which is 70 bytes; allowed: at least 1MiB"),
        (["--whole", "--cp", "3", "--scheme", "a2a+exact"], "3 has no other divisor"),
        (["--cp", "8,16", "--hosts", "3"], "--hosts: got 3; allowed: 1 or 2 or 4 or 8. Every host must have as many"),
        (["--cp", "1025"], "--cp: got '1025'; allowed: integers from 1 to 1024, as in 4,8"),
        (["--cp", "4", "--hosts", "5"], "--hosts: got 5; allowed: 1 to the 4 ranks"),
    ],
)
def test_rejects(arguments, says, capsys):
    assert main(["plan", *arguments]) == 2
    assert says in capsys.readouterr().err
