"""The decisions of greedy speculative decoding."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from changeover.engines.embedded.speculation import accepted_prefix, draft_budget


def test_accepts_the_longest_common_prefix_and_one_more() -> None:
    assert accepted_prefix([1, 2, 3], [1, 2, 9, 4]) == [1, 2, 9]
    assert accepted_prefix([1, 2, 3], [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert accepted_prefix([1, 2, 3], [7, 2, 3, 4]) == [7]
    assert accepted_prefix([], [5]) == [5]


@given(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=5), st.data())
def test_gives_what_decoding_one_by_one_gives(start: int, drafted: list[int], data: st.DataObject) -> None:
    """The target as a table from the last two tokens to the next one."""
    table = data.draw(st.lists(st.integers(0, 2), min_size=16, max_size=16))

    def following(history: list[int]) -> int:
        return table[(4 * history[-2] + history[-1]) % 16] if len(history) > 1 else table[history[-1]]

    history = [start]
    chosen = [following([start, *drafted[:count]]) for count in range(len(drafted) + 1)]
    got = accepted_prefix(drafted, chosen)
    for _ in got:
        history.append(following(history))
    assert got == history[1:]


def test_never_drafts_beyond_max_tokens_or_the_context() -> None:
    assert draft_budget(remaining_tokens=1, fed_after_pending=10, context_tokens=100) == 0
    assert draft_budget(remaining_tokens=5, fed_after_pending=10, context_tokens=100) == 4
    assert draft_budget(remaining_tokens=5, fed_after_pending=98, context_tokens=100) == 2
    assert draft_budget(remaining_tokens=5, fed_after_pending=101, context_tokens=100) == 0
