"""Loaded by SGLang, in SGLang's own environment: writes the states of announced prompts.

By ``--forward-hooks`` (:func:`capture`), or by the patch in the model's source (:func:`attach`), for versions and
models that no hook reaches.

The hook sits on the logits processor, which every model calls with the rows after the final norm and the captured ones
(``layers/logits_processor.py`` of 0.5.6 to 0.5.23). The model is asked for the captured ones as SGLang itself asks for
them where an EAGLE-3 drafter is loaded (``set_eagle3_layers_to_capture``), and what it then holds is looked at: for
some models its meaning depends on the version. Only prefill is written, and only a whole sequence: with the radix cache
on, or in chunks, rows would be missing. A sequence is announced by a file ``want-<sha256 of its ids as int64>`` that
holds the name to write; others cost one hash.

Nothing of Changeover can be imported here.
"""

import hashlib
import json
import os
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from changeover_files import CAPTURE_NAME, write_whole

_ATTACHED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def capture(config):
    """The hook for ``config``: ``folder``, and ``boundaries``, which rows are captured side by side."""
    # SGLang hands a factory the configuration alone; the model is the caller's (register_forward_hooks(model, ...)).
    return _hook_for(sys._getframe(1).f_locals["model"], config)


def attach(model):
    """Called by a patched model at the start of each ``forward``; ``CHANGEOVER_CAPTURE`` is the configuration."""
    if model not in _ATTACHED:
        _ATTACHED.add(model)
        hook = _hook_for(model, json.loads(os.environ["CHANGEOVER_CAPTURE"]))
        model.logits_processor.register_forward_hook(hook)


def _hook_for(model, config):
    folder, boundaries = Path(config["folder"]), list(config["boundaries"])
    record(model, boundaries)
    writing = ThreadPoolExecutor(max_workers=2, thread_name_prefix="changeover-states")

    def hook(_module, args, _output):
        ids, last, _, batch, *more = args
        if not batch.forward_mode.is_extend() or not _is_first_rank():
            return
        aux = _side_by_side(more[0] if more else None, boundaries, last.shape[-1])
        at = 0
        for length, prefix in zip(batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True):
            rows = slice(at, at + int(length))
            at += int(length)
            name = None if prefix else _announced(folder, ids[rows])
            if name is not None:
                tensors = {
                    "aux": aux[rows].reshape(int(length), len(boundaries), -1).to("cpu", copy=True),
                    "last": last[rows].to("cpu", copy=True),
                    "token_ids": ids[rows].to("cpu", torch.int64, copy=True),
                }
                writing.submit(write_whole, folder, name, tensors)

    return hook


def record(model, boundaries):
    """Have the model hand its rows at ``boundaries`` to the logits processor. Raises ValueError where it cannot."""
    ask = getattr(model, "set_eagle3_layers_to_capture", None)
    if ask is None:
        raise ValueError(f"{type(model).__name__} captures no states in this version of SGLang")
    # Most count the outputs of layers; the DeepSeek-V2 family takes ids as they are, from 0.5.13 on (PR #25454).
    for ids in ([boundary - 1 for boundary in boundaries], boundaries):
        ask(list(ids))
        held = [
            list(it.layers_to_capture) for it in model.modules() if getattr(it, "layers_to_capture", None)
        ]
        if held == [boundaries]:
            return
    raise ValueError(f"expected {type(model).__name__} to capture {boundaries}; it would capture {held}")


def _side_by_side(aux, boundaries, hidden):
    if aux is None:
        raise ValueError(f"the model captured nothing; expected boundaries {boundaries}")
    aux = aux if torch.is_tensor(aux) else torch.cat(list(aux), dim=-1)
    if aux.shape[-1] != len(boundaries) * hidden:
        raise ValueError(
            f"captured {aux.shape[-1]} numbers a token; expected {len(boundaries)} times {hidden}"
        )
    return aux


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
