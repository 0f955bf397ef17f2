"""Models by name and from files, and what cannot be read."""

import json

import pytest

from megatron_cp.apps.estimate.model_files import read_model
from megatron_cp.apps.estimate.model_presets import PRESETS
from megatron_cp.errors import ArgumentError

SMALL = {
    "model_type": "llama", "hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_read_by_name(name):
    assert read_model(f" {name}\n") is PRESETS[name]


def test_a_folder_is_read_by_its_file_and_a_file_next_to_the_user_is_found(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert read_model(str(tmp_path)).blocks == read_model(str(tmp_path / "config.json")).blocks
    assert read_model(str(tmp_path)).name == tmp_path.name
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").write_text(json.dumps(SMALL))
    assert len(read_model("small").blocks) == 2


def test_flags_may_be_in_a_file_as_in_a_script(tmp_path):
    path = tmp_path / "model.args"
    path.write_text("# a model\n--num-layers 4 \\\n  --hidden-size 512 --num-attention-heads 8 --window-size 127,0 \\\n"
                    "  # its softmax\n  --softmax-type learnable --vocab-size 1000 --lr 1e-5\n")  # fmt: skip
    found = read_model(str(path))
    assert found == read_model(
        "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --window-size 127,0 --softmax-type learnable "
        "--vocab-size 1000 --lr 1e-5"
    )
    assert [(block.mixer.mask, block.mixer.sink) for block in found.blocks] == [("window:127,0", True)] * 4


NAMES = "allowed: qwen3-next or kimi-linear or nemotron-h or llama3-8b or llama3-70b or qwen3-8b or tiny, the path of"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lama3-8b", f"model: got 'lama3-8b'; {NAMES} a config.json, or Megatron's flags in one string or a file. D"),
        ("lama3-8b", "Did you mean llama3-8b?"), ("qwen3_next", "Did you mean qwen3-next?"),
        ("gpt5", NAMES), ("", NAMES), (" ", NAMES), (None, NAMES),
        (8, NAMES), ("a\0b", NAMES), ("a\0b/config.json", "a file of JSON"), ("x" * 5000, NAMES),
        ("no/such/config.json", "allowed: a file that can be read (No such file or directory)"),
        ("x/" * 5000, "allowed: a file that can be read"),
    ],
)  # fmt: skip
def test_rejects_models_that_nobody_knows(text, message):
    with pytest.raises(ArgumentError, match=r"^model: got") as error:
        read_model(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "a file of JSON"), (b"torchrun a.py --lr 1", "A file of Megatron's flags begins with --."),
        (b"\xff\xfe", "a file of JSON"),
        (b"[" * 100_000, "a file of JSON"), (b'{"hidden_size": ' + b"9" * 5000 + b"}", "a file of JSON"),
        (b"[1]", "a file with one JSON object"), (b"null", "a file with one JSON object"),
        (b" " * 10_000_001, "a config.json of at most 10000000 bytes"), (b"{}", "model_type: got None"),
    ],
    ids=["cut", "command", "binary", "deep", "long", "list", "null", "large", "none"],
)  # fmt: skip
def test_rejects_files_that_are_no_configurations(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ArgumentError) as error:
        read_model(str(path))
    assert message in str(error.value)
