"""The example of the how-to runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path


def test_the_example_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs/how-to/simulate-a-machine.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(compile(example, "simulate-a-machine.md", "exec"), {})
