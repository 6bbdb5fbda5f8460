"""Make orphans come home: the kernel hands the children of a dead child to the nearest subreaper (prctl(2)).

Not inherited by fork, and it changes the whole process: for Changeover's own runner, never for a library
user's application.
"""

from __future__ import annotations

import ctypes
import os

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


def become_subreaper() -> None:
    """Raises OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def is_subreaper() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    answer = ctypes.c_int()
    return libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0) == 0 and answer.value == 1
