"""Samples for the tests: small, random, with a prompt and an answer."""

from __future__ import annotations

import numpy as np

from changeover.states.store import Manifest, Sample

HIDDEN = 16
BOUNDARIES = (2, 4, 5)


def small_manifest(**changes: object) -> Manifest:
    facts: dict[str, object] = {"hidden": HIDDEN, "layers": 8, "vocab": 100, "boundaries": BOUNDARIES}
    return Manifest(**(facts | changes))  # type: ignore[arg-type]


def make_sample(
    name: str, tokens: int = 12, prompt_tokens: int = 5, seed: int = 0, hidden: int = HIDDEN
) -> Sample:
    random = np.random.default_rng([seed, *name.encode()])

    def bf16(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    return Sample(
        id=name,
        input_ids=random.integers(0, 100, tokens, dtype=np.int64),
        loss_mask=(np.arange(tokens) >= prompt_tokens).astype(np.uint8),
        aux=bf16(tokens, len(BOUNDARIES), hidden),
        last=bf16(tokens, hidden),
    )


def assert_same(a: Sample, b: Sample) -> None:
    assert a.id == b.id
    for name in ("input_ids", "loss_mask", "aux", "last"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert getattr(a, name).dtype == getattr(b, name).dtype
