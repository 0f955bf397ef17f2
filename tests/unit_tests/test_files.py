"""Files that are written completely or not at all."""

import resource
import signal

import pytest

import megatron_cp as cp
from megatron_cp.files import whole_file
from megatron_cp.page import save_page
from megatron_cp.planner.picture import save_picture
from tests.refusals import rejects


@pytest.fixture
def full_disk():
    """Ends every write of this process at 100 bytes of a file, as a full disk would."""
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def plan():
    packing = cp.Packing([7, 1])
    return cp.plan_attention(packing, cp.Layout.zigzag(packing, 2), heads=2, head_dim=4)


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("page.html", lambda path: save_page({"title": "x"}, path)),
        ("plan.png", lambda path: save_picture(plan(), path)),
    ],
)
def test_rejects_a_full_disk_and_keeps_what_was_there(name, save, tmp_path, full_disk):
    path = tmp_path / name
    path.write_text("before")
    full_disk()
    rejects("a file that can be written", save, path)
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {name: "before"}


def test_a_link_keeps_pointing_to_its_file(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file.txt")
    with whole_file(tmp_path / "link") as new:
        new.write_text("whole")
        assert new.suffix == ".txt"
        assert not (tmp_path / "file.txt").exists()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file.txt").read_text() == "whole"
