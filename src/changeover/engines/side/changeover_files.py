"""Files of hidden states under names that a client asked for: what is there under its name is whole.

Used inside vLLM and SGLang, and by the embedded server. Nothing of Changeover can be imported here.
"""

import os
import re
from pathlib import Path
from typing import Any

CAPTURE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\.safetensors")


def write_whole(folder: Path, name: str, tensors: dict[str, Any]) -> int:
    """Write under a temporary name, sync, rename; the file's size in bytes. ``tensors`` are torch's, on the CPU."""
    from safetensors.torch import save_file

    temporary = folder / f".{name}.{os.getpid()}.tmp"
    try:
        save_file({key: value.contiguous() for key, value in tensors.items()}, temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        size = temporary.stat().st_size
        temporary.replace(folder / name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return size
