"""The command line: reports, JSON keys, exit codes, torchrun."""

import json
import re
import sys

import pytest

from megatron_cp.cli.main import main
from megatron_cp.extras import install
from megatron_cp.plan.schemes import SCHEMES
from megatron_cp.testing.parity import Case
from megatron_cp.testing.sweep import MASKS, sweep
from tests.commands import command, only_json, reported

BATCH = ["--lengths", "7,1,130,64,2", "--heads", "6"]
SHAPE = {"attention": ["--kv-heads", "2"], "gdn": ["--key-heads", "2"]}
GRADIENTS = {
    "attention": {"d_q", "d_k", "d_v"}, "gdn": {"d_qkv", "d_beta", "d_alpha", "d_conv", "d_A_log", "d_dt_bias"},
}  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        ["plan", *BATCH],
        ["plan", "--whole", "--model", "tiny", "--cp", "2,4", "--layout", "zigzag", "--lengths", "4096"],
        ["check", "--cp", "2", "--lengths", "3", "--scheme", "a2a"],
        ["doctor"],
    ],
    ids=" ".join,
)
def test_json_is_one_object_and_nothing_else(command, capsys):
    assert main([*command, "--json"]) == 0
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (1, "")
    assert json.loads(out)
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") > 1
    assert err == ""


# `test_parity.test_layer_equals_one_rank` has every layer in every layout.
@pytest.mark.parametrize(("layer", "layout"), [("attention", "contiguous"), ("gdn", "random")])
def test_check_passes_bitwise_forward(layer, layout, capsys):
    scheme = "a2a" if layer == "attention" else "headwise"
    options = ["--cp", "2,5,8", "--layout", layout, "--scheme", scheme, "--dtype", "float64", "--json"]
    assert main(["check", "--layer", layer, *BATCH, *SHAPE[layer], *options]) == 0
    report = only_json(capsys.readouterr().out)
    assert report["pass"] is True
    assert report["bitwise_forward"] is True
    assert report["cases"] == 3
    assert set(report["max_rel_err"]) == {"out"} | GRADIENTS[layer]
    assert max(report["max_rel_err"].values()) <= 1e-12


@pytest.mark.thorough
def test_check_all_varies_what_is_not_given():
    out, report = reported(["check", "--all", "--cp", "2,4", "--lengths", "5,1,12", "--layout", "random"])
    assert report["pass"] is True
    on_two = [name for name, scheme in SCHEMES.items() if not scheme.is_product]
    assert report["cases"] == (len(on_two) + len(SCHEMES)) * len(MASKS)  # schemes that are possible times masks
    assert max(error for error in report["max_rel_err"].values()) <= 1e-12
    assert f"ok     cp=4 a2a+exact         {len(MASKS):2} cases" in out


def test_check_runs_every_mode_of_a_linear_layer_and_draws_documents(capsys):
    sizes = ["--heads", "6", "--groups", "2", "--state", "8"]
    out, report = reported(["check", "--layer", "mamba", *sizes, "--all", "--cp", "3", "--lengths", "5,1,12"])
    assert report["cases"] == 3 * 4  # modes times layouts
    assert "ok     cp=3 chunkwise          4 cases" in out
    assert main(["check", "--cp", "3", "--documents", "5", "--tokens-per-rank", "20", "--seed", "3", "--json"]) == 0
    assert only_json(capsys.readouterr().out)["cases"] == len(MAY_BE_TAKEN["attention"])


# On one host, by three ranks, which are no product.
MAY_BE_TAKEN = {"attention": {"a2a", "p2p", "all_gather", "exact"}, "gdn": {"headwise", "chunkwise", "redistribute"}}


@pytest.mark.parametrize("layer", MAY_BE_TAKEN)
def test_check_runs_what_auto_may_take_in_the_layout_of_jobs(layer):
    """By every scheme that longer documents could make it take, and first by what it takes here."""
    batch = ["--layer", layer, "--cp", "3", "--lengths", "7,1,30"]
    text, report = reported(["check", *batch])
    lines = [line.split() for line in text.splitlines() if line.startswith("ok     ")]
    assert {line[2] for line in lines} == MAY_BE_TAKEN[layer]
    assert {line[4] for line in lines} == {"balanced"}
    assert report["cases"] == len(lines)
    planned = reported(["plan", *batch, "--layout", "balanced", "--dtype", "float64"])[1]
    assert (planned["scheme"], planned["layout"]) == (lines[0][2], "balanced")
    text, report = reported(["check", *batch, "--scheme", "auto"])
    assert report["cases"] == 1
    assert "schemes:" not in text


@pytest.mark.parametrize(("layout", "scheme"), [("contiguous", "chunkwise"), ("zigzag", "redistribute")])
def test_plan_prices_the_ways_of_a_linear_layer(layout, scheme):
    shape = ["--layer", "gdn", "--model", "qwen3-next", "--tokens-per-rank", "32768", "--cp", "8"]
    out, report = reported(["plan", *shape, "--documents", "64", "--layout", layout])
    assert report["scheme"] == scheme
    assert 0 < report["predicted_ms"]["forward"] < report["predicted_ms"]["backward"]
    assert re.search(rf"chosen {scheme} +predicted [0-9.]+ ms forward", out)
    assert re.search(r"other  headwise +predicted", out)
    # For what, so that nobody takes these numbers for those of the machine at hand.
    assert "predicted for h100: NVIDIA H100 SXM5 80 GB, eight a host with NVLink" in out
    assert report["predicted_for"].startswith("h100: NVIDIA H100 SXM5 80 GB")


def test_plan_counts_pad_tokens_and_bytes(capsys):
    assert main(["plan", "--cp", "3", "--align", "16", *BATCH, "--kv-heads", "2", "--json"]) == 0
    assert only_json(capsys.readouterr().out)["pad_tokens"] == 240 - 204
    shape = ["--layer", "gdn", "--model", "qwen3-next", "--cp", "8", "--layout", "contiguous"]
    assert main(["plan", *shape, "--lengths", str(8 * 32768), "--json"]) == 0
    sent = only_json(capsys.readouterr().out)["bytes_sent_per_rank"]
    assert max(*sent["forward"], *sent["backward"]) <= 30 * 2**20


def test_segments_of_a_tree_are_planned_and_checked(capsys):
    tree = ["--lengths", "40,5,9,3", "--parents", "-1,0,0,2", "--cp", "2"]
    assert main(["plan", *tree, "--layer", "kda"]) == 0
    assert "2 documents in 4 segments, 57 tokens in place of 97" in capsys.readouterr().out
    assert main(["check", *tree, "--layer", "gdn", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pass"]


def test_check_in_bf16_shows_the_kernels_own_error():
    out, report = reported(
        ["check", "--scheme", "p2p", "--cp", "3", "--lengths", "40,7", "--dtype", "bfloat16", "--details"]
    )
    assert out.count("(kernel ") == 4
    assert all(0 < error < 2e-2 for error in report["kernel_err"].values())


def test_plan_draws_documents_from_the_corpus_and_compares_schemes():
    arguments = ["plan", "--documents", "64", "--cp", "8", "--scheme", "exact", "--model", "llama3-8b", "--json"]
    reports = {}
    for layout in ("contiguous", "balanced"):
        out, reports[layout] = reported([*arguments, "--layout", layout])
        assert "documents: 64 lengths drawn from the documents of --corpus default with --seed 0" in out
    assert reports["balanced"]["work_imbalance"] <= 1.01 < 1.5 < reports["contiguous"]["work_imbalance"]
    for report in reports.values():
        assert report["pad_tokens"] == 0
        assert sum(report["fragments_per_rank"]) <= 15
        sent = {name: scheme["bytes_sent"] for name, scheme in report["schemes"].items()}
        # Tiles take seconds to assign: they are there when they are asked for.
        # On one host a key cannot cross between hosts.
        left_out = (scheme.assigns_tiles or scheme.goes_by_host for scheme in SCHEMES.values())
        assert set(sent) == {name for name, left in zip(SCHEMES, left_out, strict=True) if not left}
        for way in ("forward", "backward"):
            assert sent["exact"][way] <= min(sent["p2p"][way], sent["all_gather"][way])


def test_plan_names_a_layout_that_is_much_faster():
    arguments = ["plan", "--documents", "64", "--cp", "8", "--hosts", "2", "--tokens-per-rank", "4096", "--json"]
    found = {}
    for layout in ("zigzag", "contiguous"):
        out, report = reported([*arguments, "--layout", layout])
        found[layout] = report
        assert ("try --layout contiguous" in out) == (layout == "zigzag")
    assert found["contiguous"]["faster_layout"] is None
    faster = found["zigzag"]["faster_layout"]
    assert faster["name"] == "contiguous"
    assert faster["predicted_ms"] == pytest.approx(sum(found["contiguous"]["predicted_ms"].values()))


def test_check_fails_where_one_of_the_sizes_fails(capsys, monkeypatch):
    from megatron_cp.testing import parity

    monkeypatch.setitem(parity.TOLERANCES, parity.torch.float64, -1.0)
    assert main(["check", "--cp", "2", "--lengths", "3", "--json"]) == 1
    assert only_json(capsys.readouterr().out)["pass"] is False
    assert main(["check", "--cp", "2,100", "--lengths", "3", "--json"]) == 1
    assert only_json(capsys.readouterr().out)["cp_not_run"] == [100]


def test_plan_reports_every_key(tmp_path):
    picture = tmp_path / "plan.png"
    out, report = reported(["plan", "--cp", "3", *BATCH, "--kv-heads", "2", "--plot", str(picture)])
    assert set(report) >= {
        "scheme", "cp", "tokens_per_rank", "fragments_per_rank", "pad_tokens", "work_imbalance", "bytes_sent_per_rank",
        "bytes_lower_bound", "solver", "collectives", "predicted_ms", "plan_ms",
    }  # fmt: skip
    assert report["scheme"] == "a2a"
    assert sum(report["tokens_per_rank"]) == 204
    assert report["collectives"] == {"forward": 2, "backward": 2}
    assert all(
        a >= b
        for a, b in zip(report["bytes_sent_per_rank"]["forward"], report["bytes_lower_bound"]["forward"], strict=True)
    )
    assert "owner" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


WIRE = ["--codec", "int8", "--head-chunks", "2", "--transport", "hierarchical"]


@pytest.mark.parametrize("scheme", ["auto", "a2a+p2p", "exact"])
def test_plan_compares_schemes_by_the_options_that_were_asked_for(scheme):
    """The chosen scheme's row is the plan's own, and a row says what it could not do."""
    shape = ["--heads", "8", "--kv-heads", "8", "--lengths", "7,1,130,64,2", "--cp", "4"]
    out, report = reported(["plan", *shape, *WIRE, "--scheme", scheme])
    assert [report[name] for name in ("transport", "hosts", "codec", "head_chunks")] == [
        "hierarchical", [0, 0, 1, 1], "int8", 2,
    ]  # fmt: skip
    chosen = report["schemes"][report["scheme"]]
    for way, sent in report["bytes_sent_per_rank"].items():
        assert (chosen["bytes_sent"][way], chosen["largest_bytes_sent_per_rank"][way]) == (sum(sent), max(sent))
    for name in ("codec", "head_chunks", "work_imbalance"):
        assert chosen[name] == report[name]
    assert report["schemes"]["a2a"]["codec"] == report["schemes"]["p2p"]["codec"] == "int8"
    assert "p2p has 1 head chunk" in out


def test_plan_of_one_rank_leaves_no_codec_out():
    out, report = reported(["plan", "--cp", "1", "--lengths", "30,4", "--codec", "fp8"])
    assert (report["codec"], "leaves out" in out) == ("none", False)


def test_plan_gives_other_schemes_as_many_chunks_as_they_have_heads():
    shape = ["--heads", "8", "--kv-heads", "4", "--lengths", "7,1,130", "--cp", "4"]
    out, report = reported(["plan", *shape, "--scheme", "all_gather", "--head-chunks", "3"])
    chunks = {name: scheme["head_chunks"] for name, scheme in report["schemes"].items()}
    assert chunks == {
        "a2a": 1, "p2p": 1, "all_gather": 3, "exact": 3, "a2a+p2p": 2, "a2a+all_gather": 2, "a2a+exact": 2,
    }  # fmt: skip
    assert "a2a has 1 head chunk; p2p has 1 head chunk; a2a+p2p has 2 head chunks; a2a+all_gather has 2" in out


def test_doctor_says_what_works_and_lists_all_if_asked():
    text, report = reported(["doctor"])
    rows = report["capabilities"]
    assert {row["feature"]: row["works"] for row in rows}["scheme a2a"] is True
    assert all(row["remark"] for row in rows if not row["works"])
    every = reported(["doctor", "--all"])[0]
    assert "yes scheme a2a" in every
    assert "yes scheme a2a" not in text


def test_doctor_says_no_to_megatron_where_it_is_not_installed(capsys, monkeypatch):
    rows = {}
    for hidden in (False, True):
        if hidden:
            monkeypatch.setitem(sys.modules, "megatron", None)
        assert main(["doctor", "--json"]) == 0
        found = only_json(capsys.readouterr().out)["capabilities"]
        rows[hidden] = {row["feature"]: row for row in found if row["feature"].startswith("megatron ")}
    assert rows[False].keys() == rows[True].keys()
    assert any(row["works"] for row in rows[False].values())
    assert not any(row["works"] for row in rows[True].values())
    assert "pip install megatron-core==" in rows[True]["megatron GPTModel"]["remark"]


def test_rejects_training_without_megatron(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron", None)
    assert main(["train"]) == 2
    said = f"megatron-cp train: Megatron-Core is not installed here. Run: {install('megatron')}\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("mask", ["strided", "streaming:5"])
def test_tables_of_blocks_are_masks_by_name(mask, capsys):
    lengths = ["--lengths", "7,1,130,3,64"]
    assert main(["plan", "--cp", "3", "--mask", mask, *lengths]) == 0
    assert f", {mask} in each document" in capsys.readouterr().out
    assert main(["check", "--cp", "5", "--mask", mask, "--scheme", "exact", *lengths, "--json"]) == 0
    assert only_json(capsys.readouterr().out)["pass"]


PLAN = ["plan", "--lengths", "9"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check", "--layer", "nonsense"], "attention or gdn or kda or gdn2 or gdp or mamba or conv1d"),
        (["check", "--layout", "striped"], "balanced"),
        (["check", "--mask", "window:-5"], "window:LEFT,RIGHT"),
        (["check", "--scheme", "a2a+p2p", "--cp", "4", "--ulysses-degree", "3"], "--ulysses-degree"),
        (["check", "--search", "1"], "--search: got 1.0; allowed: 0 with a2a. "),
        (["check", "--all", "--layer", "gdn", "--search", "1"], "--search: got 1.0; allowed: 0 without attention"),
        (["plan", "--search-cache", "kept"], "--search-cache: there is no such option. Every rank finds the same"),
        (["check", "--softcap", "-1"], "--softcap"),
        (["check", "--dropout", "1"], "--dropout"),
        (["check", "--layer", "attention", "--key-heads", "2"], "--kv-heads"),
        (["check", "--layer", "gdn", "--mask", "full"], "gdn has none"),
        ([*PLAN, "--layer", "gdn", "--scheme", "chunkwise", "--codec", "fp8"], "heads of an exchange: use headwise."),
        (["check", "--codec", "fp7"], "--codec"),
        ([*PLAN, "--transport", "pigeon"], "--transport"),
        ([*PLAN, "--transport", "hierarchical", "--hosts", "9", "--cp", "4"], "at most the 4 ranks"),
        (["plan", "--nodes", "2"], "there is no such option. Did you mean --hosts?"),
        (["plan", "--cp-size", "2"], "--cp-size: there is no such option. Did you mean --cp?"),
        (["train", "--learning-rate", "1"], "--learning-rate: there is no such option. Did you mean --lr?"),
        (["train", "--micro-batch-size", "2"], "no such option. A microbatch is one pack of --seq-length tokens."),
        (["plan", "--lengths", "129M"], "--lengths: got '129M'; allowed: integers from 0 to 134217728"),
        (["plan", "--tokens-per-rank", "1G"], "got '1G'; allowed: integers from 1 to 134217728"),
        (["plan", "--documents", "1G"], "got '1G'; allowed: integers from 1 to 134217728"),
        ([*PLAN, "--layer", "gdn", "--scheme", "relay"], "Did you mean redistribute?"),
        (["check", "--layer", "attention", "--conv-width", "4"], "attention has none"),
        (["check", "--lengths", "0,0"], "at least one token"),
        (["check", "--cp", "1024", "--lengths", "5"], "at most 64 local ranks"),
        (["check", "--model", "llama3-8b", "--layer", "gdn"], "llama3-8b"),
        (["check", "--kernel", "varlen"], "CUDA"),
        (["check", "--kernel", "nonsense"], "reference"),
        (["check", "--lengths", "3", "--documents", "2"], "--lengths"),
        ([*PLAN, "--scheme", "tiles"], "Did you mean tiled?"),
        (["plan", "--parents", "-1,0"], "--parents: got [-1, 0]; allowed: only with --lengths"),
        (["plan", "--lengths", "4,3", "--parents", "-1,1"], "parents[1]: got 1; allowed: -1 for a root, or"),
        (["plan", "--lengths", "4,3", "--parents", "-1,x"], "--parents: got 'x'"),
        (["plan", "--lengths", "4,3,2", "--parents", "-1,0,0", "--mask", "full"], "got 'full'; allowed: causal"),
        (["check", "--layer", "mamba", "--key-heads", "2"], "mamba has none"),
        (["check", "--layer", "kda", "--groups", "2"], "kda has none"),
        (["check", "--layer", "conv1d", "--state", "2"], "conv1d has none"),
        (["check", "--layer", "mamba", "--heads", "6", "--groups", "4"], "--groups: got 4"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_rejects_what_cannot_run_with_status_2(arguments, says, capsys):
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


HUGE = "9" * 25


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "megatron-cp: the following arguments are required: command. See megatron-cp --help."),
        (["chekc"], "got 'chekc'; allowed: train or check or plan or doctor. Did you mean check? See"),
        (["bench", "layer", "--cp", "2"], "bench: it is not in the package: in a clone of the repository, `python -m"),
        (["check", "--cp", "0"], "--cp: got '0'; allowed: integers from 1"),
        (["check", "--cp"], "megatron-cp check: --cp: expected one argument. See megatron-cp check --help."),
        (["check", "--lengths", "3,x"], "--lengths: got 'x'; allowed: integers from 0"),
        (["check", "--timeout", "-1"], "--timeout: got '-1'; allowed: seconds above 0"),
        (["check", "--timeout", "inf"], "--timeout: got 'inf'; allowed: seconds above 0"),
        (["check", "--seed", "-1"], "--seed: got '-1'; allowed: integers from 0"),
        (["check", "--dtype", "float46"], "allowed: float64 or float32 or bfloat16 or float16. Did you mean float64?"),
        (["check", "--ranks", "fibres"], "--ranks: got 'fibres'; allowed: threads or processes."),
        (["plan", "--no-such"], "megatron-cp plan: --no-such: there is no such option."),
        (["plan", "--kvheads=2"], "--kvheads: there is no such option. Did you mean --kv-heads?"),
        (["plan", "--tokens", "2"], "Did you mean"),  # nor is it taken for --tokens-per-rank
        (["plan", "2"], "got '2', which is no option and no option's value"),
        (["plan", "--cp", HUGE], "--cp: got"),
        (["check", "--align", HUGE], "--align: got"),
        (["check", "--head-dim", "65537"], "--head-dim: got '65537'; allowed: integers from 1 to 65536"),
        (["train", "--seq-length", str(2**62)], "allowed: integers from 1 to 134217728"),
        (["train", "--window-size", HUGE, "0"], "--window-size: got"),
        (["train", "--lr", "fast"], "--lr: got 'fast'; allowed: numbers"),
        (["train", "--train-iters", "9" * 5000], "(5000 characters); allowed: integers"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_rejects_bad_usage_with_status_2_and_one_line(arguments, says, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert len(printed.err) < 400
    assert printed.err.startswith(f"megatron-cp {arguments[0]}: " if arguments[1:] else "megatron-cp: ")


def test_the_package_runs_as_a_module():
    """With the name, the messages and the exit status of the console script."""
    for arguments, status, said in (
        (["--version"], 0, "megatron-cp "),
        (["plan", "--cp", "none"], 2, "megatron-cp plan: --cp: got "),
    ):
        run = command(*arguments, seconds=60, status=status)
        assert (run.stdout + run.stderr).startswith(said)


def test_check_runs_under_torchrun():
    job = [*BATCH, *SHAPE["attention"], "--cp", "2,3,4", "--layout", "random", "--json"]
    report = only_json(command("check", *job, ranks=3).stdout)
    assert report["pass"]
    assert report["cases"] == 2 * len(MAY_BE_TAKEN["attention"])
    assert (report["cp"], report["cp_not_run"]) == ([2, 3], [4])
    assert (report["backend"], report["device"], report["dtype"]) == ("gloo", "cpu", "float64")


@pytest.mark.parametrize("every", [["--scheme", "a2a"], ["--all", "--scheme", "a2a", "--mask", "causal"]])
def test_check_runs_the_sizes_that_fit_and_says_which_do_not(every):
    shape = ["--heads", "12", "--kv-heads", "6", "--lengths", "7,1,30", "--layout", "zigzag"]
    arguments = ["check", *shape, "--cp", "2,3,5,8,100", "--head-chunks", "2", *every]
    out, report = reported(arguments)
    assert report["pass"]
    assert (report["cp"], report["cp_not_run"]) == ([2, 3, 5], [8, 100])
    assert report["cases"] == 3
    assert "\ncp=8 was not run: --head-chunks: got 2; allowed: 1, for 6 key/value heads over 8 ranks. A chunk" in out
    assert "\ncp=100 was not run: --cp: got 100; allowed: at most 64 local ranks." in out
    assert report["not_run"]["8"].startswith("--head-chunks: got 2")


def test_rejects_a_check_of_which_no_size_fits(capsys):
    assert main(["check", "--cp", "7,8", "--scheme", "a2a", "--head-chunks", "2", "--lengths", "7,1,30"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("megatron-cp check: --head-chunks: got 2; allowed: 1, for 2 key/value heads over 7")
    assert printed.out == ""


@pytest.mark.parametrize(("ranks", "backend"), [("processes", "gloo"), ("threads", "threads")])
def test_check_says_first_where_it_ran(ranks, backend):
    text, report = reported(["check", "--cp", "2", "--scheme", "a2a", "--lengths", "7,1,20", "--ranks", ranks])
    assert report["bitwise_forward"]
    assert f"{backend}, cpu, float64" in text.splitlines()[0]
    assert list(report.items())[:3] == [("backend", backend), ("device", "cpu"), ("dtype", "float64")]


def test_a_time_out_ends_with_status_1_and_the_ranks_stacks():
    slow = ["--kernel", "reference", "--cp", "2", "--lengths", "4000,4000", "--timeout", "0.2"]
    run = command("check", *slow, status=1)
    assert "did not finish in 0.2 s" in run.stderr
    assert "run_layer" in run.stderr


@pytest.mark.parametrize("scale", ["-1", "0"])
def test_scales_that_torchs_kernel_cannot_run_are_run_by_another(scale):
    assert main(["check", "--softmax-scale", scale, "--cp", "2", "--lengths", "5,3"]) == 0


@pytest.mark.parametrize("layer", ["attention", "gdn"])
def test_check_all_gives_chunks_and_codecs_to_those_that_have_them(layer):
    """And to no other: none of them is refused."""
    case = Case(layer, 3, (7, 1, 30), heads=12, groups=6, head_dim=32, head_chunks=2, codec="int8")
    cases = sweep(case, ["layout", "mask", "heads"])
    plans = [one.plan() for one in cases]
    with_both = {plan.scheme for plan in plans if plan.head_chunks == 2 and plan.codec is not None}
    coded = {plan.scheme for plan in plans if plan.codec is not None}
    if layer == "attention":
        assert coded == {plan.scheme for plan in plans}
        assert coded - with_both == {"p2p", "all_gather", "exact", "exact_by_host", "tiled"}
    else:
        assert with_both == coded == {"headwise"}
    assert len({plan.scheme for plan in plans}) > 1
