"""Forks that workers of a run are: what they have imported before they collect."""

import sys

import pytest

from tests.forked_workers import import_if_it_can_be


@pytest.mark.parametrize("end", ["raise ValueError", "import no_such_module", "pytest.importorskip('no_such_module')"])
def test_nothing_is_kept_of_a_module_that_a_worker_is_to_report(end, tmp_path, pytestconfig):
    path = tmp_path / "test_halves.py"
    path.write_text(f"import pytest\ndef test_before(): pass\n{end}\ndef test_after(): pass\n")
    import_if_it_can_be(path, pytestconfig)
    assert [name for name in sys.modules if name.endswith("test_halves")] == []


def test_a_module_that_can_be_imported_is_kept(tmp_path, pytestconfig):
    path = tmp_path / "test_whole.py"
    path.write_text("def test(): pass\n")
    import_if_it_can_be(path, pytestconfig)
    (name,) = [name for name in sys.modules if name.endswith("test_whole")]
    del sys.modules[name]
