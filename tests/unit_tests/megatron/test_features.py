"""The table of Megatron's flags: flags that there are, proofs that there are, a page that is current."""

import argparse
import re
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from megatron.core import __version__ as megatron_version
from megatron.training.arguments import add_megatron_arguments

from megatron_cp.megatron import compat, flags
from megatron_cp.megatron.features import EXPECTED, FEATURE_BY_FLAG, FEATURES, PROVED, REFUSED, UNTRIED
from tools import megatron_features

ROOT = Path(__file__).parents[3]


# In a repository Megatron's version ends with the commit.
@pytest.mark.skipif(
    megatron_version.partition("+")[0] != flags.version(), reason="the table is of another version of Megatron"
)
def test_the_table_of_flags_is_megatrons_parser():
    assert megatron_features.PARSER.read_text() == megatron_features.parser_table()


def test_every_flag_is_megatrons_and_is_in_one_row():
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_megatron_arguments(parser)
    there = {action.option_strings[0] for action in parser._actions}
    # dev has the version of an older release.
    release = "dev" if compat.HAS_LINEAR_CP_MODE else "main" if megatron_version.startswith("0.20") else "0.19.2"
    for_release = {flag for flag, feature in FEATURE_BY_FLAG.items() if release in feature.releases}
    assert for_release == there & set(FEATURE_BY_FLAG)
    assert sum(len(feature.flags) for feature in FEATURES) == len(FEATURE_BY_FLAG)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.flags[0])
def test_proofs_are_tests_and_the_rest_has_a_reason(feature):
    assert feature.verdict in (PROVED, EXPECTED, REFUSED, UNTRIED)
    assert len(feature.remark) > 10
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", feature.proof)
    assert bool(named) == (feature.verdict == PROVED)
    for path, function in named:
        text = (ROOT / path).read_text()
        assert not function or f"def {function}(" in text


def test_the_page_is_what_the_table_says():
    assert megatron_features.PAGE.read_text() == megatron_features.page()
