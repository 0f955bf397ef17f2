import pytest

from tools.cpus import SETTINGS, exceeds


@pytest.mark.parametrize(
    ("best", "left_out"),
    [("DEFAULT", ["avx2", "avx512"]), ("AVX2", ["avx512"]), ("AVX512", []), ("ZVECTOR", [])],
)
def test_settings_that_a_cpu_has_no_instructions_for_are_left_out(best, left_out):
    found = [setting["ATEN_CPU_CAPABILITY"] for setting in SETTINGS if exceeds(setting, best)]
    assert found == left_out
