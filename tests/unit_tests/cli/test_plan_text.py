"""The text of `megatron-cp plan` says which layer it is about."""

import pytest

from megatron_cp.cli.main import main
from megatron_cp.layout import Layout, Packing
from megatron_cp.plan.describe import ownership


def first_line(capsys, *options):
    assert main(["plan", "--lengths", "7,1,130", *options]) == 0
    return capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("options", "layer"),
    [
        (
            [],
            "attention, heads 6, kv-heads 2, head-dim 16, value-dim 16 "
            "(the default; pass --heads --kv-heads --head-dim --value-dim or --model)",
        ),
        (["--cp", "2,4"], "attention, heads 6, kv-heads 2, head-dim 16, value-dim 16 (the default; pass"),
        (
            ["--layout", "auto", "--heads", "8", "--head-dim", "64"],
            "attention, heads 8, kv-heads 2, head-dim 64, value-dim 64 (kv-heads, value-dim not given)",
        ),
        (["--model", "llama3-8b"], "attention, heads 32, kv-heads 8, head-dim 128, value-dim 128 (from --model)"),
        (
            ["--model", "llama3-8b", "--kv-heads", "4"],
            "attention, heads 32, kv-heads 4, head-dim 128, value-dim 128 (from --model, with --kv-heads as given)",
        ),
        (
            ["--layer", "mamba", "--state", "8"],
            "mamba, heads 6, groups 2, state 8, head-dim 16, conv-width 4 "
            "(heads, groups, head-dim, conv-width not given)",
        ),
        (["--layer", "gdn"], "gdn, heads 6, key-heads 2, head-dim 16, value-dim 16, conv-width 4 (the default; pass"),
        (
            ["--layer", "conv1d", "--heads", "3", "--head-dim", "5", "--conv-width", "2"],
            "conv1d, heads 3, head-dim 5, conv-width 2",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_first_line_says_which_layer_is_planned(options, layer, capsys):
    line = first_line(capsys, *options)
    assert line == f"layer: {layer}" or (line.startswith(f"layer: {layer}") and layer.endswith("; pass"))


@pytest.mark.parametrize("command", ["plan", "check"])
def test_help_says_what_documents_takes(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--documents N instead of --lengths: a number of documents, such as 64, whose lengths are drawn" in text


def test_owners_are_letters_for_few_ranks_and_numbers_for_many():
    few, many = (ownership(Layout.contiguous(Packing([700]), ranks), width=700) for ranks in (62, 100))
    assert len(few) == 2
    assert few[1].startswith("owner      0")
    assert "Z   (1 token a character)" in few[1]
    _, tens, ones = many
    assert "(1 token a character, read downwards)" in tens
    owners = [int(ten + one) for ten, one in zip(tens[11:711], ones[11:711], strict=True)]
    assert owners == Layout.contiguous(Packing([700]), 100).owners.tolist()
