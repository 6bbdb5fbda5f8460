"""Are the stored states the ones the model answered from? Asked before a dataset is sealed.

``lm_head`` of the stored last state at row t must give the token at row t + 1, since the answers are greedy.
Where it does not, the rows are shifted, the final norm is missing or applied twice, or another model
answered; a drafter trained on such states is never accepted (TorchSpec issue 87; speculators pull request
313).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from changeover.machine.errors import InvalidInput
from changeover.states.reader import StatesReader
from changeover.states.target_files import files_by_tensor, read_json

MAX_SAMPLES = 50
MIN_AGREEMENT = 0.99
NEAR_TIE = 2**-6
"""How far below the best logit the answer's may lie, as a share of the best: four steps of bfloat16, in which servers
compute both, once in decoding and once more in the prefill that is captured. SmolLM2-135M in bfloat16 on a CPU: of
1,077 rows 29 had another token first, the farthest 0.0149 below; with the norm missing 22 % of the rows lay within
this, with it applied twice 33 %.
"""


@dataclass(frozen=True)
class ProbeResult:
    """``agreed`` of ``rows`` generated rows, near ties counted in; ``exact`` without them. The worst sample is named
    because one bad one hides in a mean.
    """

    samples: int
    rows: int
    agreed: int
    exact: int
    agreement: float
    min_agreement: float
    worst_sample: str | None
    worst_agreement: float | None
    passed: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(counts: Sequence[tuple[str, int, int, int]]) -> ProbeResult:
    """The verdict over (sample id, rows looked at, rows that agreed, those of them without the near ties)."""
    rows = sum(seen for _, seen, _, _ in counts)
    agreed = sum(same for _, _, same, _ in counts)
    exact = sum(first for _, _, _, first in counts)
    shares = [(same / seen, name) for name, seen, same, _ in counts if seen]
    worst = min(shares, default=(None, None))
    agreement = agreed / rows if rows else 0.0
    return ProbeResult(
        samples=len(counts),
        rows=rows,
        agreed=agreed,
        exact=exact,
        agreement=agreement,
        min_agreement=MIN_AGREEMENT,
        worst_sample=worst[1],
        worst_agreement=worst[0],
        passed=agreement > MIN_AGREEMENT,
    )


def probe(reader: StatesReader, model_path: Path) -> ProbeResult:
    """Look at up to MAX_SAMPLES samples, spread evenly over ``reader``.

    Raises InvalidInput where the folder at ``model_path`` has no output layer of the right shape, and where
    the states are not post-norm (then lm_head alone is not the answer).
    """
    import torch

    manifest = reader.manifest
    if manifest.last_norm != "post":
        raise InvalidInput(
            expected="post-norm last states to probe",
            seen=f"{manifest.last_norm}-norm",
            todo="Capture post-norm.",
        )
    head = load_output_layer(model_path)
    if head.shape[1] != manifest.hidden or head.shape[0] < manifest.vocab:
        raise InvalidInput(
            expected=f"an output layer of [{manifest.vocab}, {manifest.hidden}] in {model_path}",
            seen=str(list(head.shape)),
            todo="Probe with the model that the states were captured from.",
        )
    head = head.float()
    count = min(MAX_SAMPLES, len(reader))
    positions = [round(i * (len(reader) - 1) / max(1, count - 1)) for i in range(count)]
    counts = []
    for position in positions:
        sample = reader.read(position)
        # Row t predicts token t + 1; the last row predicts the last sampled token, which was never fed or
        # stored.
        rows = np.flatnonzero(sample.loss_mask[1:])
        last = torch.from_numpy(sample.last[rows].view(np.int16)).view(torch.bfloat16)
        logits = last.float() @ head.T
        best = logits.max(dim=-1).values
        below = best - logits[torch.arange(len(rows)), torch.from_numpy(sample.input_ids[rows + 1])]
        agreed = int((below <= best.abs() * NEAR_TIE).sum())
        counts.append((sample.id, len(rows), agreed, int((below <= 0).sum())))
    return judge(counts)


def load_output_layer(model_path: Path) -> Any:
    """The output layer [V, H] of a Hugging Face folder (a torch tensor), the embeddings where the model ties
    them.
    """
    from safetensors import safe_open

    config = read_json(model_path / "config.json")
    text_config = config.get("text_config", config)
    tied = bool(text_config.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    files = files_by_tensor(model_path)
    for ending in ("lm_head.weight", *(("embed_tokens.weight",) if tied else ())):
        name = next((name for name in sorted(files) if name.endswith(ending)), None)
        if name is not None:
            with safe_open(files[name], "pt") as weights:
                return weights.get_tensor(name)
    raise InvalidInput(
        expected=f"lm_head.weight (or tied embeddings) in {model_path}",
        seen=f"{len(files)} tensors without it",
        todo="Give the folder of the model that answered.",
    )
