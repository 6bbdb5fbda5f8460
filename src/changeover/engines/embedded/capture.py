"""Hidden states of one request, gathered row by row while it runs, and written as one safetensors file at its
end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from changeover.engines.side.changeover_files import write_whole


@dataclass
class CaptureRows:
    """The rows fed so far: ``aux`` chunks ``[n, n_aux, H]`` and ``last`` chunks ``[n, H]``, bfloat16 on the
    CPU.
    """

    boundaries: tuple[int, ...]
    aux: list[torch.Tensor] = field(default_factory=list)
    last: list[torch.Tensor] = field(default_factory=list)

    def add(self, rows: slice, boundaries: Mapping[int, torch.Tensor], last: torch.Tensor) -> None:
        """Copy the rows of one pass; ``last`` is after the final norm."""
        aux = torch.stack([boundaries[boundary][rows] for boundary in self.boundaries], dim=1)
        self.aux.append(aux.to(device="cpu", dtype=torch.bfloat16))
        self.last.append(last[rows].to(device="cpu", dtype=torch.bfloat16, copy=True))


def write_capture(
    folder: Path, name: str, rows: CaptureRows, token_ids: Sequence[int], prompt_tokens: int
) -> dict[str, Any]:
    """Write the file under a temporary name, sync it, rename it; return the response's ``capture`` object.

    ``token_ids`` are prompt and generated tokens; the last one was sampled and never fed, so the file holds
    one row fewer.
    """
    fed = len(token_ids) - 1
    aux, last = torch.cat(rows.aux), torch.cat(rows.last)
    if aux.shape[0] != fed:
        raise RuntimeError(f"{aux.shape[0]} captured rows for {fed} fed tokens: a fault of the server")
    tensors = {"input_ids": torch.tensor(token_ids[:fed], dtype=torch.int64), "aux": aux, "last": last}
    size = write_whole(folder, name, tensors)
    return {
        "path": name,
        "tokens": fed,
        "prompt_tokens": prompt_tokens,
        "boundaries": list(rows.boundaries),
        "last_norm": "post",
        "bytes": size,
        "output_token_ids": list(token_ids[prompt_tokens:]),
    }
