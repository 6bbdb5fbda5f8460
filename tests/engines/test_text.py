"""Streaming text: what is given out piece by piece is what one decode of the whole gives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from changeover.engines.embedded.text import Detokenizer, StopStrings


class BytesTokenizer:
    """One byte a token, as byte-level tokenizers end up for rare characters."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(ids).decode(errors="replace")


@given(st.text(max_size=40))
def test_pieces_join_to_the_whole_text(text: str) -> None:
    detokenizer = Detokenizer(BytesTokenizer())
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(pieces) + detokenizer.finish() == text


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\ufffd"), min_size=1, max_size=20))
def test_no_piece_holds_half_a_character(text: str) -> None:
    detokenizer = Detokenizer(BytesTokenizer())
    assert all("\ufffd" not in detokenizer.push(byte) for byte in text.encode())


def test_a_real_tokenizer_gives_its_own_decoding(tiny_model_dir: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    text = "Compare a cat with a dog: grüße, 日本語 🙂 done."
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(one) for one in ids] + [detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert sum(bool(piece) for piece in pieces) > 10


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_stop_string_is_found_across_pieces_and_never_given_out(cut: int) -> None:
    text = "one\n\nUser: two"
    stops = StopStrings(["\nUser:", "never"])
    given_out = "".join(stops.push(text[at : at + cut]) for at in range(0, len(text), cut)) + stops.finish()
    assert given_out == "one\n"
    assert stops.stopped


def test_text_that_only_looked_like_a_stop_string_comes_out_in_the_end() -> None:
    stops = StopStrings(["STOP"])
    assert stops.push("a ST") == "a "
    assert stops.push("ART") == "START"[:3] + "RT"
    assert stops.push(" ST") == " "
    assert stops.finish() == "ST"
    assert not stops.stopped


@given(
    st.lists(st.text(alphabet="ab", max_size=4), max_size=8), st.text(alphabet="ab", min_size=1, max_size=3)
)
def test_stop_strings_cut_where_one_search_over_the_whole_would(pieces: list[str], stop: str) -> None:
    stops = StopStrings([stop])
    given_out = "".join(stops.push(piece) for piece in pieces) + stops.finish()
    assert given_out == "".join(pieces).split(stop)[0]
