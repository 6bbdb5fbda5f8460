"""speculators' offline states (0.9): ``hidden_states/hs_0.safetensors`` beside an Arrow dataset of the tokens.

``hidden_states`` bf16 [T, n + 1, H], the last one *before* the final norm, and ``token_ids`` int64 [T]; its fp8 files
have ``hidden_states`` as float8 and ``hidden_states_scales``. The dataset (``datasets.save_to_disk``) has in row i the
``input_ids``, ``loss_mask`` and ``seq_len`` for ``hs_i``; ``token_freq.pt`` counts the supervised tokens.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from changeover.machine import durable
from changeover.machine.errors import InvalidInput, NotSupported
from changeover.states.formats.peer import (
    Norm,
    PeerFileInvalid,
    PeerSample,
    TokenRow,
    bits_of,
    integers_of,
    numbers_in,
    tensor_of,
    write_whole,
)
from changeover.states.layout import Sample

FOLDER = "hidden_states"
ARROW = "data-00000-of-00001.arrow"
COLUMNS = ("input_ids", "loss_mask", "seq_len")


class Speculators:
    name = "speculators"
    last_norm: Norm | None = "pre"

    def path(self, index: int, sample_id: str) -> Path:
        return Path(FOLDER) / f"hs_{index}.safetensors"

    def write(self, path: Path, sample: Sample) -> None:
        import torch
        from safetensors.torch import save_file

        states = torch.cat([tensor_of(sample.aux), tensor_of(sample.last)[:, None]], dim=1)
        save_file({"hidden_states": states, "token_ids": torch.from_numpy(sample.input_ids.copy())}, path)

    def files(self, folder: Path) -> list[Path]:
        return sorted((folder / FOLDER).glob("hs_*.safetensors"), key=numbers_in)

    def read(self, path: Path, boundaries: int, hidden: int) -> PeerSample:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            loaded = load_file(path)
        except (OSError, SafetensorError, ValueError) as error:
            raise PeerFileInvalid(f"{type(error).__name__}: {error}") from error
        if not {"hidden_states", "token_ids"} <= loaded.keys():
            raise PeerFileInvalid(f"no hidden_states or no token_ids; it has {', '.join(sorted(loaded))}")
        ids = integers_of(loaded["token_ids"], "token_ids")
        states = loaded["hidden_states"]
        if "hidden_states_scales" in loaded:
            states = states.float() * loaded["hidden_states_scales"].float()
        bits = bits_of(states, (len(ids), boundaries + 1, hidden), "hidden_states")
        number = int(re.sub(r"\D", "", path.stem))
        rows = read_rows(path.parents[1])
        if number >= len(rows):
            raise PeerFileInvalid(f"row {number} of the dataset beside it: it has {len(rows)}")
        row = rows[number]
        if not np.array_equal(row.input_ids, ids):
            raise PeerFileInvalid(f"other tokens than row {number} of the dataset beside it")
        return PeerSample(path.stem, ids, row.loss_mask, bits[:, :-1], np.ascontiguousarray(bits[:, -1]))

    def finish(self, folder: Path, rows: Sequence[TokenRow]) -> None:
        import torch

        write_whole(folder / ARROW, lambda path: _write_arrow(path, rows))
        durable.replace_json(folder / "dataset_info.json", {"features": _FEATURES})
        durable.replace_json(folder / "state.json", _STATE)
        counts = Counter(int(one) for row in rows for one in row.input_ids[row.loss_mask.astype(bool)])
        write_whole(folder / "token_freq.pt", lambda path: torch.save(dict(counts), path))


@lru_cache(maxsize=1)
def read_rows(folder: Path) -> list[TokenRow]:
    """The dataset beside the states. Raises InvalidInput where there is none, or it has other columns."""
    arrow = _pyarrow()
    try:
        names = [one["filename"] for one in json.loads((folder / "state.json").read_text())["_data_files"]]
        tables = [arrow.ipc.open_stream((folder / Path(name).name).read_bytes()).read_all() for name in names]
        columns = [arrow.concat_tables(tables).column(name).to_pylist() for name in COLUMNS[:2]]
    except (OSError, ValueError, KeyError, TypeError, arrow.ArrowException) as error:
        raise InvalidInput(
            expected=f"an Arrow dataset with {', '.join(COLUMNS)} in {folder}",
            seen=f"{type(error).__name__}: {error}",
            todo="Give the folder that `speculators generate-offline-data` wrote, not the one in it.",
        ) from error
    return [
        TokenRow(np.asarray(ids, np.int64), np.asarray(mask, np.uint8))
        for ids, mask in zip(*columns, strict=True)
    ]


def _write_arrow(path: Path, rows: Sequence[TokenRow]) -> None:
    arrow = _pyarrow()
    table = arrow.table(
        {
            "input_ids": arrow.array([row.input_ids for row in rows], arrow.list_(arrow.int64())),
            "loss_mask": arrow.array(
                [row.loss_mask.astype(np.int64) for row in rows], arrow.list_(arrow.int64())
            ),
            "seq_len": arrow.array([len(row.input_ids) for row in rows], arrow.int64()),
        }
    )
    with path.open("wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


# As datasets.Dataset.save_to_disk writes them; the format has its rows given out as torch tensors.
_INT64 = {"dtype": "int64", "_type": "Value"}
_FEATURES = {
    "input_ids": {"feature": _INT64, "_type": "List"},
    "loss_mask": {"feature": _INT64, "_type": "List"},
    "seq_len": _INT64,
}
_STATE = {
    "_data_files": [{"filename": ARROW}],
    "_fingerprint": "changeover",
    "_format_columns": list(COLUMNS),
    "_format_kwargs": {},
    "_format_type": "torch",
    "_output_all_columns": False,
    "_split": None,
}


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise NotSupported(
            expected="the package pyarrow for speculators' datasets",
            seen="not installed",
            todo="pip install 'changeover[convert]'.",
        ) from error
    return pyarrow
