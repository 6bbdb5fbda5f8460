"""The decisions of greedy speculative decoding, without any tensor."""

from __future__ import annotations

from collections.abc import Sequence


def accepted_prefix(drafted: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The new tokens of a verify step: the longest prefix of ``drafted`` that the target chose too, and its
    next token.

    ``chosen[i]`` is the target's own token after the pending token and the first ``i`` drafted ones, so
    ``chosen`` is one longer than ``drafted``. The result has one to ``len(drafted) + 1`` tokens and is
    exactly what decoding without a drafter gives (Leviathan et al. 2023, for greedy decoding).
    """
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == chosen[accepted]:
        accepted += 1
    return list(chosen[: accepted + 1])


def draft_budget(*, remaining_tokens: int, fed_after_pending: int, context_tokens: int) -> int:
    """How many drafted tokens are worth verifying: never beyond ``max_tokens`` (a verify step always adds one
    token of the target's own) nor beyond the context.
    """
    return max(0, min(remaining_tokens - 1, context_tokens - fed_after_pending))
