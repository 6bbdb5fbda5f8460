"""What can go wrong with a states folder.

::

    ChangeoverError
    ├── StoreDamaged   bytes on disk are not what was written
    ├── StoreBusy      another writer has the folder
    ├── StoreFull      the disk (or its reserve) ends here; what is complete is kept
    └── CollectFailed  the server cannot be collected from, or the gate or probe says no
"""

from __future__ import annotations

from changeover.machine.errors import ChangeoverError


class StoreDamaged(ChangeoverError):  # noqa: N818 - read as a sentence, as in machine.errors
    """Bytes on disk are not what was written."""


class StoreBusy(ChangeoverError):  # noqa: N818
    """Another process writes to the same folder."""


class StoreFull(ChangeoverError):  # noqa: N818
    """No room for the next sample; every complete sample is kept and the folder can be resumed."""


class CollectFailed(ChangeoverError):  # noqa: N818
    """The collection cannot go on or cannot be sealed; says what stands in the way."""
