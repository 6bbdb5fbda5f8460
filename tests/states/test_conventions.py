"""Layer numbers: what each tool writes for a boundary, and what cannot be written without being misread."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from changeover.machine.errors import InvalidInput
from changeover.states.conventions import (
    Convention,
    check_boundaries,
    default_boundaries,
    from_ids,
    from_sglang_config,
    to_ids,
    to_sglang_config,
)

LAYERS = 61
rising = st.sets(st.integers(1, LAYERS), min_size=1, max_size=5).map(sorted)
versions = st.sampled_from(["0.5.6", "0.5.12", "v0.5.12.post1", "0.5.13", "0.5.18", "0.5.23", "0.6.0"])
families = st.sampled_from(["llama", "qwen3", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "gpt_oss"])


@given(st.sampled_from(Convention), rising)
def test_what_is_written_is_read_back(convention: Convention, boundaries: list[int]) -> None:
    assert from_ids(convention, to_ids(convention, boundaries, LAYERS), LAYERS) == tuple(boundaries)


@given(families, versions, rising)
def test_what_is_written_for_an_sglang_version_is_what_it_captures(
    family: str, version: str, boundaries: list[int]
) -> None:
    try:
        ids = to_sglang_config(boundaries, LAYERS, family, version)
    except InvalidInput:
        assume(False)
    assert from_sglang_config(ids, LAYERS, family, version) == tuple(boundaries)


@given(families, rising)
def test_what_is_written_for_no_version_is_read_the_same_by_all(family: str, boundaries: list[int]) -> None:
    try:
        ids = to_sglang_config(boundaries, LAYERS, family, None)
    except InvalidInput:
        assert family in ("deepseek_v3", "kimi_k2", "glm4_moe_lite") and boundaries[0] != 2
        return
    for version in ("0.5.12", "0.5.13", "0.5.23"):
        assert from_sglang_config(ids, LAYERS, family, version) == tuple(boundaries)


def test_the_numbers_of_the_default_three() -> None:
    boundaries = default_boundaries(32)
    assert boundaries == (2, 16, 29)
    assert to_ids(Convention.VLLM, boundaries, 32) == [2, 16, 29]
    assert to_ids(Convention.SPECULATORS, boundaries, 32) == [2, 16, 29]
    assert to_ids(Convention.SPECFORGE, boundaries, 32) == [1, 15, 28]
    assert to_sglang_config(boundaries, 32, "llama", None) == [1, 15, 28]
    assert default_boundaries(30) == (2, 15, 27)
    assert default_boundaries(7) == (2, 3, 4)


def test_sglang_25454_the_same_ids_are_other_layers_from_0_5_13_on() -> None:
    """AQ-MedAI's Kimi drafter says [2, 30, 58]: boundaries 3, 31, 59 up to 0.5.12, and 2, 30, 58 since."""
    ids = [2, 30, 58]
    assert from_sglang_config(ids, 61, "kimi_k2", "0.5.12") == (3, 31, 59)
    assert from_sglang_config(ids, 61, "kimi_k2", "0.5.13") == (2, 30, 58)
    assert from_sglang_config(ids, 61, "llama", "0.5.13") == (3, 31, 59)
    with pytest.raises(InvalidInput, match="the version"):
        from_sglang_config(ids, 61, "kimi_k2", None)
    assert to_sglang_config((3, 31, 59), 61, "kimi_k2", "0.5.12") == [2, 30, 58]
    assert to_sglang_config((3, 31, 59), 61, "kimi_k2", "0.5.13") == [3, 31, 59]
    with pytest.raises(InvalidInput, match="version"):
        to_sglang_config((3, 31, 59), 61, "kimi_k2", None)
    with pytest.raises(InvalidInput, match="first boundary"):
        to_sglang_config((1, 30, 58), 61, "kimi_k2", "0.5.23")


def test_gpt_oss_with_its_last_layer_depends_on_the_version() -> None:
    assert from_sglang_config([2, 12, 24], 24, "gpt_oss", "0.5.18") == (2, 12, 24)
    for version in (None, "0.5.15"):
        with pytest.raises(InvalidInput, match="gpt_oss"):
            from_sglang_config([2, 12, 24], 24, "gpt_oss", version)
    with pytest.raises(InvalidInput, match="rising"):
        from_sglang_config([2, 12, 24], 24, "gpt_oss", "0.5.12")  # it would be layer 25 of 24


@pytest.mark.parametrize("bad", [[], [3, 2], [2, 2], [-1, 2], [2, 62]])
def test_boundaries_must_rise_within_the_model(bad: list[int]) -> None:
    with pytest.raises(InvalidInput, match="rising"):
        check_boundaries(bad, 61)


def test_what_has_no_number_is_refused() -> None:
    with pytest.raises(InvalidInput, match="boundary 0"):
        to_ids(Convention.SPECFORGE, (0, 2), 8)
    with pytest.raises(InvalidInput, match="boundary 0"):
        to_sglang_config((0, 2), 8, "llama", None)
    with pytest.raises(InvalidInput, match="7 layers"):
        default_boundaries(6)
    with pytest.raises(InvalidInput, match="version such as"):
        to_sglang_config((3, 4), 8, "kimi_k2", "latest")
