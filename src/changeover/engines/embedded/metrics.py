"""The server's counters, and their text in Prometheus' exposition format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Written by the scheduler's thread only; single integers, so readers need no lock.

    ``spec_drafts`` counts verify steps with at least one drafted token. ``spec_accepted_tokens`` counts what
    those steps gave beyond one token each, after cutting at the answer's end; so acceptance length = 1 +
    accepted / drafts is exactly the tokens that verify steps gave, divided by the verify steps.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    spec_drafts: int = 0
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0


def render(counters: Counters, *, running: int, waiting: int, model: str) -> str:
    """Everything under the names that docs/design.md fixes."""
    label = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    rows = (
        ("num_requests_running", "gauge", "Requests being generated or finished.", running),
        ("num_requests_waiting", "gauge", "Requests that wait for a place.", waiting),
        ("prompt_tokens_total", "counter", "Prompt tokens processed.", counters.prompt_tokens),
        ("generation_tokens_total", "counter", "Tokens generated.", counters.generation_tokens),
        ("spec_decode_num_drafts_total", "counter", "Verify steps.", counters.spec_drafts),
        ("spec_decode_num_draft_tokens_total", "counter", "Tokens drafted.", counters.spec_draft_tokens),
        (
            "spec_decode_num_accepted_tokens_total",
            "counter",
            "Drafted tokens kept.",
            counters.spec_accepted_tokens,
        ),
    )
    lines = []
    for name, kind, text, value in rows:
        lines.append(f"# HELP changeover:{name} {text}")
        lines.append(f"# TYPE changeover:{name} {kind}")
        lines.append(f'changeover:{name}{{model_name="{label}"}} {value}')
    return "\n".join(lines) + "\n"
