"""Loaded by SGLang, in SGLang's own environment (``--forward-hooks``): writes the states of announced prompts.

The hook sits on the logits processor, which every model calls with the rows after the final norm and the captured ones
(``layers/logits_processor.py`` of 0.5.23): so it needs to know nothing of the model. Only prefill is written, and only
a whole sequence: with the radix cache on, or in chunks, rows would be missing. A sequence is announced by a file
``want-<sha256 of its ids as int64>`` that holds the name to write; others cost one hash.

Nothing of Changeover can be imported here.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from changeover_files import CAPTURE_NAME, write_whole


def capture(config):
    """The hook for ``config``: ``folder``, and ``layers``, how many captured rows there are side by side."""
    folder, layers = Path(config["folder"]), int(config["layers"])
    writing = ThreadPoolExecutor(max_workers=2, thread_name_prefix="changeover-states")

    def hook(_module, args, _output):
        ids, last, _, batch, *more = args
        aux = more[0] if more else None
        if aux is None or not batch.forward_mode.is_extend() or not _is_first_rank():
            return
        aux = aux if torch.is_tensor(aux) else torch.cat(list(aux), dim=-1)
        at = 0
        for length, prefix in zip(batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True):
            rows = slice(at, at + int(length))
            at += int(length)
            name = None if prefix else _announced(folder, ids[rows])
            if name is not None:
                tensors = {
                    "aux": aux[rows].reshape(int(length), layers, -1).to("cpu", copy=True),
                    "last": last[rows].to("cpu", copy=True),
                    "token_ids": ids[rows].to("cpu", torch.int64, copy=True),
                }
                writing.submit(write_whole, folder, name, tensors)

    return hook


def _announced(folder, ids):
    sha256 = hashlib.sha256(ids.to("cpu", torch.int64).numpy().tobytes()).hexdigest()
    try:
        name = (folder / f"want-{sha256}").read_text()
    except OSError:
        return None
    return name if CAPTURE_NAME.fullmatch(name) else None


def _is_first_rank():
    from sglang.srt.distributed import parallel_state

    return parallel_state.get_tensor_model_parallel_rank() == 0
