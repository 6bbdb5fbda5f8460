"""Simulated acceptance length of a drafter on samples it was not trained on, with its confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from changeover.drafter.corpus import open_corpus
from changeover.drafter.export import load_drafter
from changeover.drafter.model import Drafter
from changeover.drafter.replay import SampleReplay, acceptance_length, replay
from changeover.drafter.step import Frozen
from changeover.drafter.target import TargetWeights, read_target_facts, read_target_weights
from changeover.drafter.vocabulary import DraftVocabulary, count_supervised
from changeover.machine.errors import InvalidInput
from changeover.machine.progress import Progress, ProgressSink
from changeover.states.store import Sample

BATCH_ROWS = 2048
RESAMPLES = 2000


@dataclass(frozen=True)
class Judge:
    """Held-out samples and what is needed to replay them."""

    samples: Sequence[Sample]
    target: TargetWeights
    vocabulary: DraftVocabulary
    eos_token_ids: tuple[int, ...]
    draft_tokens: int

    def replays(self, drafter: Drafter, frozen: Frozen) -> list[SampleReplay]:
        """Every sample replayed, a few at a time."""
        results: list[SampleReplay] = []
        batch: list[Sample] = []
        for index, sample in enumerate(self.samples):
            batch.append(sample)
            if sum(s.input_ids.size for s in batch) >= BATCH_ROWS or index == len(self.samples) - 1:
                results += replay(
                    drafter,
                    frozen,
                    self.target,
                    self.vocabulary,
                    batch,
                    self.draft_tokens,
                    self.eos_token_ids,
                )
                batch = []
        return results


def frozen_for(
    target: TargetWeights, vocabulary: DraftVocabulary, head_dtype: torch.dtype = torch.float32
) -> Frozen:
    """The target's part of a step; ``head_dtype`` is the type that the teacher's head is applied in."""
    rows = torch.from_numpy(vocabulary.token_ids).to(target.lm_head.device)
    return Frozen(embedding=target.embedding, head=target.lm_head[rows].to(head_dtype))


def bootstrap_interval(replays: Sequence[SampleReplay], *, seed: int) -> tuple[float, float] | None:
    """95 % percentile interval of the acceptance length, resampling whole samples (tokens of one answer are
    not independent); None below two samples.
    """
    if len(replays) < 2:
        return None
    counts = np.array([(one.verify_steps, one.accepted) for one in replays], dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(replays), size=(RESAMPLES, len(replays)))
    totals = counts[picks].sum(axis=1)
    lengths = 1.0 + totals[:, 1] / np.maximum(totals[:, 0], 1.0)
    low, high = np.percentile(lengths, [2.5, 97.5])
    return float(low), float(high)


def summarise(replays: Sequence[SampleReplay], *, draft_tokens: int, seed: int = 0) -> dict[str, Any]:
    """The numbers of an evaluation, as JSON. A draft step that nothing reached has no rate (null)."""
    reached = [sum(one.reached[k] for one in replays) for k in range(draft_tokens)]
    accepted_at = [sum(one.accepted_at[k] for one in replays) for k in range(draft_tokens)]
    interval = bootstrap_interval(replays, seed=seed)
    return {
        "draft_tokens": draft_tokens,
        "samples": len(replays),
        "generated_tokens": sum(one.generated for one in replays),
        "verify_steps": sum(one.verify_steps for one in replays),
        "accepted_tokens": sum(one.accepted for one in replays),
        "acceptance_length": acceptance_length(replays),
        "ci95": None if interval is None else list(interval),
        "step_acceptance": [a / r if r else None for a, r in zip(accepted_at, reached, strict=True)],
        "step_reached": reached,
    }


def evaluate(
    *,
    states: Path,
    model: Path,
    drafter: Path,
    draft_tokens: int,
    device: str = "cpu",
    on_progress: ProgressSink,
) -> dict[str, Any]:
    """Replay the store's held-out samples with an exported drafter.

    Raises InvalidInput when the drafter, the target and the states do not belong together, or nothing is held
    out.
    """
    facts = read_target_facts(model)
    corpus = open_corpus(states, facts)
    loaded, vocabulary = load_drafter(drafter, dtype=torch.float32, device=device)
    shape = loaded.shape
    if (shape.hidden, shape.vocab, shape.boundaries) != (facts.hidden, facts.vocab, corpus.boundaries):
        raise InvalidInput(
            expected=f"hidden {facts.hidden}, vocab {facts.vocab}, boundaries {corpus.boundaries}",
            seen=f"hidden {shape.hidden}, vocab {shape.vocab}, boundaries {shape.boundaries}",
            todo="Evaluate a drafter on states of its own target and layers.",
        )
    if not corpus.held_out:
        raise InvalidInput(
            expected=f"held-out samples in {states}",
            seen=f"none of {len(corpus.reader)}",
            todo="Collect with a held-out share above 0.",
        )
    target = read_target_weights(model, dtype=torch.float32, device=device)
    on_progress(Progress("evaluate", 0, len(corpus.held_out), "samples"))
    judge = Judge(corpus.read(corpus.held_out), target, vocabulary, facts.eos_token_ids, draft_tokens)
    replays = judge.replays(loaded, frozen_for(target, vocabulary))
    result = summarise(replays, draft_tokens=draft_tokens)
    on_progress(
        Progress(
            "evaluate",
            len(replays),
            len(replays),
            "samples",
            {"acceptance_length": result["acceptance_length"]},
        )
    )
    counts = count_supervised(corpus.token_pairs(corpus.held_out), facts.vocab)
    return {**result, "vocabulary_coverage": vocabulary.coverage(counts), "drafter": str(drafter)}
