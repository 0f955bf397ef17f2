"""The table of Megatron's flags: flags that there are, proofs that there are, a page that is current."""

import re
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from megatron_cp.cli import megatron_job
from megatron_cp.megatron.features import EXPECTED, FEATURE_BY_FLAG, FEATURES, PROVED, REFUSED, UNTRIED
from tools import megatron_features

ROOT = Path(__file__).parents[3]


def test_every_flag_is_megatrons_and_is_in_one_row():
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_megatron_arguments(parser)
    options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    megatron_job._refuse_unknown(options)  # by the source alone: none of them is taken for a slip
    first = {action.option_strings[0] for action in parser._actions}
    assert set(FEATURE_BY_FLAG) - first == set()
    assert sum(len(feature.flags) for feature in FEATURES) == len(FEATURE_BY_FLAG)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.flags[0])
def test_proofs_are_tests_and_the_rest_has_a_reason(feature):
    assert feature.verdict in (PROVED, EXPECTED, REFUSED, UNTRIED)
    assert len(feature.remark) > 10
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", feature.remark)
    assert bool(named) == (feature.verdict == PROVED)
    for path, function in named:
        text = (ROOT / path).read_text()
        assert not function or f"def {function}(" in text
    assert not feature.depends or feature.verdict == REFUSED


def test_the_page_is_what_the_table_says():
    assert megatron_features.PAGE.read_text() == megatron_features.page()
