"""`megatron-cp plan --whole`, several sizes, machines and what fits."""

import itertools
import json
import re

import pytest

from megatron_cp.apps.estimate import command as whole
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
        parts = [value for name, value in row["milliseconds"].items() if name != "step"]
        assert row["milliseconds"]["step"] == pytest.approx(sum(parts))
        assert 0 < row["mfu"] < 1
        assert {plan["kind"] for plan in row["plans"]} == {"attention", "gdn"}
    assert found["machine"].startswith("h200: ")
    assert "predicted for h200" in out
    if found["fits"]:
        assert out.count("take this: --context-parallel-size") == 1
        assert found["take_this"] == found["best"]["flags"]
        rate = {row["flags"]: row["tokens_per_second_per_gpu"] for row in found["rows"] if row["fits"]}
        assert rate[found["take_this"]] == max(rate.values())


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
def test_a_search_lets_auto_weigh_tiles_of_a_whole_model(tmp_path):
    one_head = (
        "--num-layers 2 --hidden-size 128 --num-attention-heads 1 --ffn-hidden-size 256 --swiglu --vocab-size 512 "
        "--disable-bias-linear"
    )
    shape = ["--whole", "--model", one_head, "--cp", "4", "--layout", "contiguous", "--lengths", "65536"]
    shape += ["--mask", "global_local"]
    _, without = printed(*shape)
    assert "tiled" not in without["best"]["flags"]
    page = tmp_path / "step.html"
    search = ["--search", "0.01", "--report", str(page)]
    _, found = printed(*shape, *search)
    assert "--cp-comm-type tiled --cp-search 0.01" in found["take_this"]
    assert found["best"]["milliseconds"]["step"] < without["best"]["milliseconds"]["step"]
    text = re.search(r'id="report">(.*?)</script>', page.read_text(), re.DOTALL)[1]
    tiles = json.loads(text)["tiles"]
    assert [picture["name"] for picture in tiles] == ["attention forward", "attention backward"]
    assert all(picture["queries"] == 65536 and "The busiest rank sends or" in picture["text"] for picture in tiles)


def test_the_smallest_size_that_fits_is_taken():
    shape = ["--whole", "--model", "llama3-8b", "--layout", "balanced", *BATCH]
    _, roomy = printed(*shape, "--cp", "4,8,16", "--fit", "60GiB")
    fitting = [row["cp"] for row in roomy["rows"] if row["fits"]]
    assert roomy["best"]["cp"] == min(fitting)
    out, small = printed(*shape, "--cp", "4,8", "--fit", "2GiB")
    assert (small["fits"], small["take_this"]) == (False, None)
    assert "nothing fits 2.0 GiB: the nearest is cp 8" in out


def test_gpus_name_jobs_and_what_the_search_left_out():
    shape = ["--whole", "--model", "llama3-8b", "--lengths", "8192", "--gpus", "4", "--global-batch", "16", "--tp", "2"]
    out, found = printed(*shape)
    assert found["fits"]
    assert found["take_this"].startswith("torchrun --standalone --nproc-per-node 4 pretrain_gpt.py ")
    assert found["best"]["flags"] in found["take_this"]
    assert all(row["gpus"] == 4 and row["tp"] == 2 and row["fits"] for row in found["rows"])
    search = found["search"]
    said = f"saved activations of {search['too_large']} exceed the memory"
    assert f"searched: {search['counted']} jobs; weights, optimizer and {said}" in out
    assert search["bound_ms"] is None  # all were priced
    assert search["tried"] == search["counted"] - search["too_large"]
    assert "\nsensitive to: the step would be a tenth shorter if products of weights took " in out
    lines = dict(line.split(": ", 1) for line in out.splitlines()[:7] if ": " in line)
    best, others = found["best"], [row for row in found["rows"] if row["flags"] != found["best"]["flags"]]
    replicas, batches = best["replicas"], best["microbatches"]
    words = f"4 GPUs = {replicas} data-parallel replica{'s' * (replicas > 1)} of 2 tensor-parallel ranks"
    assert lines["job"].startswith(words)
    assert f"a step is {batches} microbatch" in lines["job"]
    longer = best["tokens_per_second_per_gpu"] / max(row["tokens_per_second_per_gpu"] for row in others) - 1
    assert found["verdict"] == out.split("\n\n")[0].splitlines()
    assert "; next is tp 2, " in lines["why"]
    assert f", which takes {longer:.1%} longer: " in lines["why"]
    assert all((row["gradients"], row["tp_overlap"]) == ("fp32", False) for row in found["rows"])


def test_a_pack_that_fits_is_among_the_lengths_that_fit():
    """The number is rounded down, but not below the pack's own."""
    shape = ["--whole", "--model", "llama3-8b", "--cp", "1", "--lengths", "4000", "--gpu", "b200"]
    predicted = sum(printed(*shape)[1]["best"]["bytes"].values())
    assert printed(*shape, "--fit", str(int(predicted) + 1))[1]["longest"] == 4000


def test_the_length_that_fits_is_that_of_joined_packs(monkeypatch):
    priced, row = [], whole._row
    monkeypatch.setattr(whole, "_row", lambda *given: priced.append(given[3].total) or row(*given))
    shape = ["--whole", "--model", "llama3-8b", "--cp", "8", "--layout", "zigzag", "--packs", "4", "--fit", "60GiB"]
    longest = printed(*shape, "--lengths", "8192")[1]["longest"]
    assert priced == [4 * 8192, 4 * longest]  # the job, and the length that it is said to fit
    for more, fits in ((0, True), (4096, False)):
        assert printed(*shape, "--lengths", str(longest + more))[1]["fits"] == fits


def test_of_searched_jobs_the_fastest_that_fits_is_taken_and_what_the_next_saves_is_said():
    shape = ["--whole", "--model", "llama3-8b", "--lengths", "65536", "--gpus", "8", "--global-batch", "8"]
    out, found = printed(*shape, "--fit", "60GiB")
    best, other = found["rows"][:2]
    assert found["best"]["flags"] == best["flags"]
    assert "\nwhy: the most tokens/s a GPU of those that fit; next is " in out
    scale = found["best"]["tokens_per_second_per_gpu"] / other["tokens_per_second_per_gpu"]
    assert f", which takes {scale - 1:.1%} longer: " in out
    more = {name: other["milliseconds"][name] - value for name, value in best["milliseconds"].items() if name != "step"}
    name, saved = min(more.items(), key=lambda pair: pair[1])
    assert f", and {-saved:,.1f} ms less " in out, (name, out)


def test_where_no_job_fits_the_nearest_recomputes_everything():
    shape = ["--whole", "--model", "llama3-8b", "--lengths", "32768", "--gpus", "4", "--global-batch", "16"]
    _, found = printed(*shape, "--fit", "4GiB")
    assert (found["fits"], found["take_this"]) == (False, None)
    assert found["best"]["recompute"] == "full"


def test_a_search_says_how_far_it_is(capsys, monkeypatch):
    """Progress is on standard error, so that standard output is what it was."""
    monkeypatch.setattr("megatron_cp.cli.terminal._EVERY_SECONDS", 0.0)
    printed("--whole", "--model", "tiny", "--lengths", "8192", "--gpus", "2", "--global-batch", "2", "--pp", "1")
    out, err = capsys.readouterr()
    assert out == ""
    bounded, priced = ([line for line in err.splitlines() if f" jobs {what}" in line] for what in ("bounded", "priced"))
    assert bounded[-1].split()[0].split("/")[0] == bounded[-1].split()[0].split("/")[1]
    assert len(priced) >= 1
    assert err.splitlines() == bounded + priced


def test_layers_that_are_left_out_are_said(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "model_type": "deepseek_v3", "hidden_size": 256, "num_hidden_layers": 7, "num_attention_heads": 4,
        "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "intermediate_size": 512, "moe_intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "vocab_size": 1000, "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
    }))  # fmt: skip
    shape = ["--whole", "--model", str(path), "--lengths", "4096", "--cp", "1", "--pp", "2", "--microbatches", "4"]
    out, found = printed(*shape)
    assert "\nleft out: layers of multi-token prediction (1), which the model has\n" in out
    assert "; 3 of 7 layers in the last stage; " in out
    assert "\nstages wait: " not in out
    assert " --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 3 " in found["take_this"]
    out, found = printed(*shape[:-2])
    share = found["best"]["milliseconds"]["pipeline"] / found["best"]["milliseconds"]["step"]
    assert f"\nstages wait: {share:.0%} of the step, with 1 microbatch: more --microbatches fill them" in out


@pytest.mark.parametrize(("memory", "fit", "is_close"), [(1.05, None, True), (1.2, None, False), (1.2, 1.05, False)])
def test_memory_is_close_if_the_machine_would_not_suffice_with_the_worst_known_error(memory, fit, is_close, tmp_path):
    shape = ["--whole", "--model", "llama3-8b", "--cp", "1", "--lengths", "4096", "--recompute", "none"]
    predicted = sum(printed(*shape, "--gpu", "b200")[1]["best"]["bytes"].values())
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "mine"\nbase = "b200"\n[hardware]\nmemory = {memory * predicted}\n')
    out, _ = printed(*shape, "--gpu", str(path), *(["--fit", str(int(fit * predicted))] if fit else []))
    assert ("\nmemory is close: the prediction for a published job was 11% too low" in out) == is_close


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


def test_a_size_has_a_line_and_hosts_that_are_far_apart_cost_time():
    out, found = printed("--cp", "2,4,8", "--layer", "gdn", "--model", "qwen3-next", *BATCH)
    assert list(found["sizes"]) == ["2", "4", "8"]
    assert found["cp"] == 2
    assert [line.split()[0] for line in out.splitlines()[5:8]] == ["2", "4", "8"]
    shape = ["--model", "llama3-8b", "--cp", "8", "--scheme", "a2a", "--lengths", "65536"]
    times = [printed(*shape, "--hosts", hosts)[1]["predicted_ms"]["forward"] for hosts in ("1", "4")]
    assert times[1] > 1.1 * times[0]


def test_the_default_plan_has_even_work():
    _, found = printed()
    assert found["work_imbalance"] < 1.02
    assert found["predicted_ms"]["forward"] > 0
    assert found["prices"][0]["candidate"].startswith(found["scheme"])


def test_a_model_may_be_a_config_or_flags(tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": 1000, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    _, by_config = printed("--whole", "--model", str(path), "--lengths", "4096")
    flags = (
        "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --group-query-attention --num-query-groups 4 "
        "--ffn-hidden-size 1024 --swiglu --vocab-size 1000 --make-vocab-size-divisible-by 1 --normalization RMSNorm "
        "--disable-bias-linear"
    )
    _, by_flags = printed("--whole", "--model", flags, "--lengths", "4096")
    assert by_config["parameters"] == by_flags["parameters"]
    assert by_config["best"]["milliseconds"] == pytest.approx(by_flags["best"]["milliseconds"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "h1000"], "--gpu: got 'h1000'; allowed: a100"),
        (["--whole", "--model", "llama4-900b"], "--model: got 'llama4-900b'"),
        (["--whole", "--plot", "x.png"], "--plot: got 'x.png'; allowed: only without --whole"),
        (
            ["--whole", "--lengths", "7,3", "--parents=-1,0"],
            "--parents: got [-1, 0]; allowed: only without --whole",
        ),
        (["--fit", "80GiB"], "--fit"),
        (["--gpus", "8"], "--gpus: got 8; allowed: only with --whole"),
        (["--whole", "--global-batch", "8"], "--global-batch: got 8; allowed: only with --gpus"),
        (["--whole", "--gpus", "8", "--replicas", "2"], "--replicas: got 2; allowed: only without --gpus"),
        (["--whole", "--gpus", "8", "--cp", "2,4"], "--cp: got [2, 4]; allowed: one size with --gpus"),
        (
            ["--whole", "--gpus", "7", "--global-batch", "2", "--pp", "1", "--cp", "1"],
            "--gpus: got 7; allowed: a number",
        ),
        (["--whole", "--tp", "3"], "--tp: got 3; allowed: a divisor of"),
        (["--whole", "--gpus", "16", "--pp", "3"], "--pp: got 3; allowed: a divisor of 16 GPUs"),
        (
            ["--whole", "--gpus", "8", "--recompute", "ops"],
            "--recompute: got 'ops'; allowed: none or selective or full",
        ),
        (
            ["--whole", "--gpus", "8", "--recompute", "ops", "--sharding", "zero3"],
            "with these layers. ops is known for",
        ),
        (["--whole", "--gpus", "8", "--precision", "fp8", "--gpu", "a100"], "--precision: got 'fp8'; allowed: bf16"),
        (["--gradients", "bf16"], "--gradients: got 'bf16'; allowed: only with --whole"),
        (["--whole", "--tp-comm-overlap"], "--tp-comm-overlap: got 'the flag'; allowed: only with --tp above 1"),
        (["--whole", "--heads", "16"], "--heads: got 16; allowed: only without --whole"),
        (["--whole", "--layer", "gdn"], "--layer: got 'gdn'; allowed: only without --whole"),
        (["--whole", "--hosts", "9"], "1 to the 4 ranks"),
        (["--whole", "--search", "-1"], "--search: got -1.0; allowed: seconds from 0 to 86400"),
        (["--whole", "--search", "1", "--scheme", "a2a"], "--search: got 1.0; allowed: 0 with a2a. No layer here"),
        (["--search", "1", "--scheme", "p2p"], "--search: got 1.0; allowed: 0 with p2p. No layer here"),
        (["--search", "1", "--layer", "gdn"], "--search: got 1.0; allowed: 0 without attention. No layer here"),
        (["--search", "nan"], "--search: got nan; allowed: seconds from 0 to 86400"),
        (["--fit", "80 apples"], "--fit: got '80 apples'; allowed: at least 1MiB, with its unit, such as 70GiB"),
        (["--fit", "70"], "--fit: got '70', which is 70 bytes; allowed: at least 1MiB"),
        (["--fit", "1000KiB"], "--fit: got '1000KiB', which is 1.024e+06 bytes; allowed: at least 1MiB"),
        (["--fit", "1e400"], "--fit: got '1e400'; allowed: at least 1MiB"),
        (["--whole", "--cp", "3", "--scheme", "a2a+exact"], "3 has no other divisor"),
        (["--cp", "8,16", "--hosts", "3"], "--hosts: got 3; allowed: 1 or 2 or 4 or 8. Every host must have as many"),
        (["--cp", "16", "--hosts", "3", "--whole"], "--hosts: got 3; allowed: 1 or 2 or 4 or 8 or 16. Every host"),
        (["--cp", "1025"], "--cp: got '1025'; allowed: integers from 1 to 1024, as in 4,8"),
        (
            ["--cp", "4,1000000000000", "--whole", "--tokens-per-rank", "1"],
            "--cp: got '1000000000000'; allowed: integers",
        ),
        (["--cp", "4", "--hosts", "5"], "--hosts: got 5; allowed: 1 to the 4 ranks"),
    ],
)
def test_rejects(arguments, says, capsys):
    assert main(["plan", *arguments]) == 2
    assert says in capsys.readouterr().err
