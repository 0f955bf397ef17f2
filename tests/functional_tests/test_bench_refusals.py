"""Benchmarks refuse what they cannot run."""

import pytest

from megatron_cp.cli.main import main

REFUSED = {
    "exchange": [
        (["--cp", "3"], "--cp: got 3; allowed: divisors of the 16 key heads above 1"),
        (["--cells", "2x1024"], "--cells: got '2x1024'; allowed: RANKSxTOKENS/DOCUMENTS"),
        (["--cells", "2x0/1"], "--cells: got '2x0/1'"),
        (["--cells", "2x64/20"], "--cells: got '64 tokens in 20 documents'; allowed: multiples of 2 * cp = 4"),
        (["--cells", "32x1024/16"], "divisors of the 16 key heads"),
        (["--lengths", "7,1", "--cp", "2"], "--lengths: got [7, 1]; allowed: multiples of 2 * cp = 4"),
        (["--layer", "kda"], "--layer: got 'kda'; allowed: gdn"),
        (["--scheme", "chunkwise"], "--scheme: got 'chunkwise'; allowed: headwise"),
        (["--ranks", "threads"], "--ranks: got 'threads'; allowed: processes"),
        (["--cp", "8", "--head-chunks", "4"], "--head-chunks"),
    ],
    "layer": [
        (["--layer", "kda"], "--layer: got 'kda'; allowed: gdn or mamba"),
        (["--scheme", "chunkwise"], "--scheme: got 'chunkwise'; allowed: headwise"),
        (["--layout", "balanced"], "--layout: got 'balanced'; allowed: zigzag"),
        (["--kernel", "fla"], "--kernel: got 'fla'; allowed: auto"),
        (["--ranks", "threads"], "--ranks: got 'threads'; allowed: processes"),
        (["--cp", "3"], "--cp: got 3; allowed: divisors of the 16 key heads above 1"),
        (["--lengths", "7,1"], "--lengths: got [7, 1]; allowed: multiples of 2 * cp = 4"),
        (["--model", "llama3-8b"], "--model: got 'llama3-8b'"),
        (["--layer", "mamba", "--model", "qwen3-next"], "--model: got 'qwen3-next'; allowed: nemotron-h or tiny"),
    ],
    "linear": [
        (["--layer", "attention"], "--layer: got 'attention'; allowed: gdn or kda or mamba or conv1d"),
        (["--scheme", "headwise"], "--scheme: got 'headwise'; allowed: nothing. This benchmark measures headwise"),
        (["--model", "llama3-8b"], "--model: got 'llama3-8b'"),
        (["--cp", "1024"], "at most 64 local ranks"),
        (["--kernel", "fla"], "--kernel"),
        (["--kernel", "nonsense"], "--kernel: got 'nonsense'"),
        (["--mask", "causal"], "--mask: got 'causal'; allowed: nothing, since gdn has none"),
        (["--layer", "mamba", "--key-heads", "2"], "--key-heads: got 2; allowed: nothing, since mamba has none"),
        (["--heads", "4", "--key-heads", "3"], "--key-heads"),
        (["--lengths", "5", "--tokens-per-rank", "7"], "only without --lengths"),
    ],
    "wire": [
        (["--only", "wires"], "--only: got 'wires'; allowed: transports or codecs or overlap"),
        (["--only", "codecs,"], "--only: got 'codecs,'"),
        (["--transport", "slow"], "--transport: got 'slow'; allowed: collective or pairwise or hierarchical"),
        (["--codec", "zip"], "--codec: got 'zip'; allowed: none or fp8"),
        (["--layer", "mamba"], "--layer: got 'mamba'; allowed: attention or gdn"),
        (["--scheme", "p2p"], "--scheme: got 'p2p'; allowed: nothing. This benchmark measures a2a and headwise."),
        (["--head-chunks", "9", "--cp", "2"], "--head-chunks: got 9; allowed: 1 to 4"),
        (["--hosts", "9", "--cp", "4"], "--hosts: got 9; allowed: 1 to the 4 ranks"),
        (["--cp", "1"], "--cp: got 1; allowed: 2 ranks or more"),
        (["--cp", "1024"], "at most 64 local ranks"),
        (["--kernel", "nonsense"], "--kernel: got 'nonsense'"),
    ],
}


@pytest.mark.parametrize(
    ("benchmark", "arguments", "says"), [(name, *row) for name, rows in REFUSED.items() for row in rows]
)
def test_rejects_what_cannot_run_with_status_2(benchmark, arguments, says, capsys):
    if benchmark == "layer":
        pytest.importorskip("megatron.core", reason="pip install '.[megatron]'")
    assert main(["bench", benchmark, *arguments, "--device", "cpu"]) == 2
    assert says in capsys.readouterr().err
