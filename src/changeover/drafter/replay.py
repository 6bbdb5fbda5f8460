"""How long a drafter's accepted runs would be, replayed over answers that are already known.

A greedy server with the drafter writes the same answer as without it. So on a known answer every chain that
the server could start can be computed in parallel (training-time test form: as long as the drafted tokens are
accepted they *are* the answer's tokens), and the server's walk over them is arithmetic: it begins at the
first answer token, which prefill gives, and each verify step advances by the accepted tokens and the target's
own next one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from changeover.drafter.data import bf16_tensor, pack
from changeover.drafter.model import Drafter
from changeover.drafter.step import Frozen, ttt_hidden
from changeover.drafter.target import TargetWeights
from changeover.drafter.vocabulary import DraftVocabulary
from changeover.states.store import Sample


@dataclass(frozen=True)
class SampleReplay:
    """One answer under speculation. ``reached[k]`` verify steps drafted a token k with all before it
    accepted.
    """

    id: str
    generated: int
    verify_steps: int
    accepted: int
    reached: tuple[int, ...]
    accepted_at: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """Tokens ``first`` .. ``last`` (positions in the sample, inclusive) were generated.

    ``stopped``: the last one ended the answer (eos); otherwise max_tokens cut it there.
    """

    first: int
    last: int
    stopped: bool


def answers(
    loss_mask: npt.NDArray[np.uint8], known: npt.NDArray[np.int64], eos_token_ids: Collection[int]
) -> list[Answer]:
    """The generated runs of a sample of T rows; ``known`` int64 [T + 1] are its tokens and the last one,
    never fed.
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loss_mask.astype(np.int8), [0]])))
    found = []
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        last = end if end == loss_mask.size else end - 1
        if first > 0:
            found.append(Answer(first, last, int(known[last]) in eos_token_ids))
    return found


def walk(
    sample_id: str, spans: Sequence[Answer], depth: npt.NDArray[np.int64], draft_tokens: int
) -> SampleReplay:
    """Walk the answers as the server does; ``depth[s]`` tokens of the chain at slot s equal the answer's.

    A verify step ends with one token that is the target's own, so at most ``left - 1`` drafted tokens of the
    ``left`` that the answer still takes count as accepted. A server knows where max_tokens cuts and drafts no
    further (and counts no verify step when that leaves nothing to draft); where eos will come it cannot know,
    so there it drafts.
    """
    steps = accepted_total = generated = 0
    reached = [0] * draft_tokens
    accepted_at = [0] * draft_tokens
    for span in spans:
        generated += span.last - span.first + 1
        at = span.first
        while at < span.last:
            room = min(draft_tokens, span.last - at - 1)
            accepted = min(int(depth[at - 1]), room)
            for k in range(min(accepted + 1, room)):
                reached[k] += 1
                accepted_at[k] += k < accepted
            steps += room > 0 or span.stopped
            accepted_total += accepted
            at += accepted + 1
    return SampleReplay(sample_id, generated, steps, accepted_total, tuple(reached), tuple(accepted_at))


@torch.no_grad()
def last_tokens(samples: Sequence[Sample], target: TargetWeights) -> list[int]:
    """The greedy token after each sample's last row: generated, but never fed, so not among its rows."""
    device, dtype = target.lm_head.device, target.lm_head.dtype
    rows = torch.stack([bf16_tensor(s.last[-1:])[0] for s in samples]).to(device=device, dtype=dtype)
    tokens: list[int] = (rows @ target.lm_head.t()).argmax(-1).tolist()
    return tokens


@torch.no_grad()
def replay(
    drafter: Drafter,
    frozen: Frozen,
    target: TargetWeights,
    vocabulary: DraftVocabulary,
    samples: Sequence[Sample],
    draft_tokens: int,
    eos_token_ids: Collection[int],
) -> list[SampleReplay]:
    """Replay each of ``samples`` (all at once: give as many as fit a batch) with ``draft_tokens`` a verify
    step.
    """
    device, dtype = str(frozen.embedding.device), frozen.embedding.dtype
    samples = [s for s in samples if s.loss_mask[1:].any()]
    batch = pack(samples, steps=draft_tokens, dtype=dtype, device=device)
    steps = ttt_hidden(drafter, frozen.embedding, batch)
    proposals = [
        vocabulary.token_ids[(drafter.lm_head(drafter.norm(hidden))).argmax(-1).cpu().numpy()]
        for hidden in steps
    ]
    ends = last_tokens(samples, target)
    results = []
    base = 0
    offsets = [0] * draft_tokens
    for index, (sample, end) in enumerate(zip(samples, ends, strict=True)):
        known = np.append(sample.input_ids, end)
        depth = np.zeros(batch.lengths[index], dtype=np.int64)
        for k in range(draft_tokens):
            rows = slice(offsets[k], offsets[k] + batch.chain_counts[k][index])
            slots = batch.chains[k].slots[rows].cpu().numpy() - base
            right = (proposals[k][rows] == known[slots + 2 + k]) & (depth[slots] == k)
            depth[slots[right]] = k + 1
            offsets[k] = rows.stop
        base += batch.lengths[index]
        results.append(walk(sample.id, answers(sample.loss_mask, known, eos_token_ids), depth, draft_tokens))
    return results


def acceptance_length(replays: Iterable[SampleReplay]) -> float:
    """1 + accepted / verify steps, over all samples together, as the servers' counters give it; 1.0 without
    steps.
    """
    steps, accepted = 0, 0
    for one in replays:
        steps, accepted = steps + one.verify_steps, accepted + one.accepted
    return 1.0 if steps == 0 else 1.0 + accepted / steps
