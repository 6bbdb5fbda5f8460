import pytest
from hypothesis import given
from hypothesis import strategies as st

from changeover.pipeline.estimates import disk_refusal, expected_tokens, minutes, states_bytes

GIB = 2**30


def test_the_reference_run_is_924_gib():
    """17.3 M tokens x (three aux boundaries + last) x 7168 x 2 bytes: what the Kimi-K2.5 extraction wrote."""
    assert states_bytes(17_300_000, 7168, 3) == 992_051_200_000
    assert round(states_bytes(17_300_000, 7168, 3) / GIB, 1) == 923.9


def test_a_short_disk_is_refused_with_both_numbers():
    refusal = disk_refusal(924 * GIB, 50 * GIB, 900 * GIB, "/data")
    assert "1,066.4 GiB free at /data" in refusal
    assert "saw 900.0 GiB" in refusal
    assert disk_refusal(924 * GIB, 50 * GIB, 1100 * GIB, "/data") is None


@given(st.integers(0, 10**12), st.integers(0, 10**11), st.integers(0, 10**13))
def test_what_is_let_through_fits(needed, reserve, free):
    if disk_refusal(needed, reserve, free, "/") is None:
        assert needed + reserve <= free


def test_minutes_name_the_rate_that_is_missing():
    assert minutes(1200, "tokens", 10, "x").value == pytest.approx(2.0)
    unknown = minutes(1200, "tokens", None, "captured_tokens_per_s")
    assert unknown.value is None
    assert "estimates.captured_tokens_per_s" in unknown.basis


def test_tokens_are_counted_from_above():
    assert expected_tokens(prompt_characters=400, samples=10, max_tokens=96) == 100 + 960
