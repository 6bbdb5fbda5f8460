"""Reading what the journal says of a changeover and of progress into facts for the view."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from changeover.report.reading import mapping, mappings, number, text, whole
from changeover.report.view import ClearanceView, Evidence, ProgressPoint, Refusal, Signal, Stage


def read_clearance(said: Mapping[str, Any]) -> ClearanceView:
    """A clearance as ``Clearance.to_json()`` spells it."""
    return ClearanceView(
        verdict=(text(said.get("verdict")) or "no verdict recorded").lower(),
        exit_code=whole(said.get("exit_code")),
        seconds=number(said.get("seconds")),
        evidence=tuple(
            Evidence(
                item=text(item.get("item")) or "unnamed item",
                verdict=text(item.get("verdict")) or "not said",
                expected=spell(item.get("expected")),
                seen=spell(item.get("seen")),
                note=spell(item.get("note")),
            )
            for item in mappings(said.get("evidence"))
        ),
        refusals=tuple(
            Refusal(
                whole(item.get("pid")),
                text(item.get("comm")),
                text(item.get("reason")) or "no reason recorded",
            )
            for item in mappings(said.get("refusals"))
        ),
        lost_requests=whole(said.get("lost_requests")),
    )


def spell(value: Any) -> str | None:
    """A JSON value in words: strings as they are, mappings as ``key value`` pairs."""
    if value is None or value in ("", [], {}):
        return None
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {spell(item) or '-'}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(spell(item) or "-" for item in value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def read_progress(t_s: float, data: Mapping[str, Any]) -> ProgressPoint:
    said = mapping(data.get("progress"))
    return ProgressPoint(
        t_s=t_s,
        stage=text(said.get("stage")),
        done=number(said.get("done")),
        total=number(said.get("total")),
        unit=text(said.get("unit")),
        detail=mapping(said.get("detail")),
    )


def read_stage(said: Mapping[str, Any]) -> Stage:
    return Stage(
        name=text(said.get("stage")) or "unnamed stage",
        seconds=number(said.get("seconds")),
        outcome=text(said.get("outcome")),
        detail=spell(said.get("detail")),
    )


def read_signal(said: Mapping[str, Any]) -> Signal:
    return Signal(
        pid=whole(said.get("pid")),
        start_ticks=whole(said.get("start_ticks")),
        signal=text(said.get("signal")),
        proof=spell(said.get("proof")),
        comm=text(said.get("comm")),
    )
