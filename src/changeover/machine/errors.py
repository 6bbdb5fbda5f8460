"""What went wrong, said so that somebody can act on it.

::

    ChangeoverError        exit code 7 unless a subclass says otherwise
    ├── InvalidInput       2: the user's file, flag or folder is not what it must be
    └── NotSupported       2: asked for something that this version does not do, and says so
"""

from __future__ import annotations


class ChangeoverError(Exception):
    """An error with its three parts: what was expected, what was seen, and what to do next."""

    exit_code = 7

    def __init__(self, *, expected: str, seen: str, todo: str) -> None:
        self.expected = expected
        self.seen = seen
        self.todo = todo
        super().__init__(f"expected {expected}; saw {seen}. {todo}")

    def to_json(self) -> dict[str, str | int]:
        return {
            "error": type(self).__name__,
            "exit_code": self.exit_code,
            "expected": self.expected,
            "seen": self.seen,
            "todo": self.todo,
        }


class InvalidInput(ChangeoverError):  # noqa: N818 - read as a sentence: "raise InvalidInput"
    """The user's file, flag or folder is not what it must be."""

    exit_code = 2


class NotSupported(ChangeoverError):  # noqa: N818
    """Asked for something that this version does not do."""

    exit_code = 2
