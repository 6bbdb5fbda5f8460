"""A command job: asks the phase's server a few prompts, greedily, and keeps the answers beside the run."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path

PROMPTS = [
    "The capital of France is",
    "def add(left, right):",
    "Three fruits are apples,",
    "Once upon a time there was",
]
TOKENS = 24


def ask(url: str, prompt: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=200) as answer:
        return str(json.load(answer)["choices"][0]["text"])


if __name__ == "__main__":
    answers = [ask(os.environ["CHANGEOVER_SERVER_URL"], prompt) for prompt in PROMPTS]
    Path(sys.argv[1]).write_text(json.dumps(answers))
