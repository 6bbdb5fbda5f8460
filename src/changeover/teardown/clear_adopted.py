"""Clear servers that somebody else started, after the user has said so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from changeover.machine.protocol import Machine
from changeover.teardown.adoption import Tree, TreeRefused, Wish, pinned, targets_of
from changeover.teardown.audit import Audit, terminated_before
from changeover.teardown.budgets import Budgets
from changeover.teardown.claim import claim
from changeover.teardown.clear import clear
from changeover.teardown.clearance import Clearance
from changeover.teardown.drains import drain_for
from changeover.teardown.footprint import StopPolicy
from changeover.teardown.late_baseline import take_late_baseline


def clear_adopted(
    machine: Machine,
    wish: Wish,
    trees: Sequence[Tree],
    audit: Audit,
    *,
    budgets: Budgets,
    stop: StopPolicy = StopPolicy.GRACEFUL,
    token: str | None = None,
) -> Clearance:
    """Take exactly these trees, under the machine's lock, with everything in the audit.

    ``token`` is the server's API key for the drain. No tree at all (an engine of which nothing runs) is a verification
    alone. Raises TreeRefused, and MachineClaimed where a run or another clear has the machine.
    """
    expect_willing(trees)
    names = ", ".join(tree.name for tree in trees) or f"engine {wish.engine}"
    with claim(f"clear of {names}"):
        before = terminated_before(audit.path.parent, machine.boot_id)
        still = pinned(machine, trees)
        audit.asked(machine, _asked(wish, still, budgets, stop))
        targets = [
            replace(target, drain=drain_for(tree.engine, tree.url, token))
            for tree, target in zip(still, targets_of(still, stop), strict=True)
        ]
        baseline = take_late_baseline(machine, targets)
        clearance = clear(machine, targets, baseline, budgets=budgets, observer=audit, terminated=before)
        audit.cleared(clearance)
    return clearance


def expect_willing(trees: Sequence[Tree]) -> None:
    """Raises TreeRefused for a tree that must not be taken, whoever says so."""
    refused = [f"{tree.name}: {tree.refusal}" for tree in trees if tree.refusal]
    if refused:
        raise TreeRefused(
            expected="servers that may be taken", seen="; ".join(refused), todo="Nothing was signalled."
        )


def _asked(wish: Wish, trees: Sequence[Tree], budgets: Budgets, stop: StopPolicy) -> dict[str, Any]:
    return {
        "wish": wish.to_json(),
        "trees": [tree.to_json() for tree in trees],
        "budgets": vars(budgets),
        "stop": stop.value,
    }
