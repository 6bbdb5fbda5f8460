"""``python -m changeover.engines.convert GGUF FOLDER SOURCE NOTE``: a GGUF file as a bfloat16 Hugging Face
folder.

The folder appears by rename when it is complete, with ``changeover-model.json`` beside the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from changeover.engines.models import RECORD_NAME, hash_weights


def convert(gguf: Path, folder: Path, *, source: str, note: str) -> None:
    """Dequantize and save. Raises what transformers raises for a file that it cannot read."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _save(gguf, temporary)
        with gguf.open("rb") as opened:
            gguf_sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
        weights = sorted(temporary.glob("*.safetensors"))
        record = {
            "source": source,
            "gguf": gguf.name,
            "gguf_sha256": gguf_sha256,
            "sha256": hash_weights(weights),
            "dtype": "bfloat16",
            "note": note,
        }
        (temporary / RECORD_NAME).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
        for file in temporary.iterdir():
            file.chmod(0o644)
        temporary.chmod(0o755)
        _take_place(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _save(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    quantized: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    config = quantized.config
    # save_pretrained refuses a model that was quantized, although its weights are plain now: copy them over.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    plain.load_state_dict(quantized.state_dict())
    plain.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _take_place(temporary: Path, folder: Path) -> None:
    """Rename over what an interrupted or parallel conversion left; a complete folder of somebody else's
    stays.
    """
    if (folder / RECORD_NAME).is_file():
        shutil.rmtree(temporary)
        return
    if folder.exists():
        folder.rename(folder.with_name(f".{folder.name}.incomplete.{os.getpid()}"))
    temporary.rename(folder)


if __name__ == "__main__":
    gguf_argument, folder_argument, source_argument, note_argument = sys.argv[1:]
    convert(Path(gguf_argument), Path(folder_argument), source=source_argument, note=note_argument)
