"""How long ``changeover --help`` and ``changeover check`` take, beside a Python that does nothing.

    python benchmarks/startup.py [--repeats 20]

Claim: both answer in under 0.3 s. Best of N, because everything else on the machine only ever adds; the
median is given too. The result goes to ``benchmarks/results/startup.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from changeover import __version__

RESULT = Path(__file__).parent / "results" / "startup.json"
CLAIM_S = 0.3
# compiled modules are written and used, as for every user
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "changeover --help": [sys.executable, "-m", "changeover", "--help"],
    "changeover check": [sys.executable, "-m", "changeover", "check"],
}


def seconds(argv: list[str]) -> float:
    """One run, from start to exit; 0 and 4 to 6 (``check`` on a machine in use) count as an answer."""
    begin = time.perf_counter()
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=ENVIRONMENT)
    took = time.perf_counter() - begin
    if done.returncode not in (0, 4, 5, 6):
        raise SystemExit(f"{argv}: expected an answer; saw exit code {done.returncode}: {done.stderr}")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats

    for argv in COMMANDS.values():
        seconds(argv)  # compiles what is not compiled yet
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(repeats):
        for name, argv in COMMANDS.items():  # interleaved, so that a busy moment hits all alike
            times[name].append(seconds(argv))

    result = {
        "what": __doc__.splitlines()[0],
        "claim": f"changeover --help and changeover check: best of {repeats} under {CLAIM_S} s",
        "date": datetime.now(UTC).date().isoformat(),
        "changeover": __version__,
        "machine": {
            "python": platform.python_version(),
            "system": platform.platform(terse=True),
            "cores": os.cpu_count(),
            "load_average_1min": round(os.getloadavg()[0], 2),
        },
        "seconds": {
            name: {"best": round(min(took), 4), "median": round(statistics.median(took), 4), "n": len(took)}
            for name, took in times.items()
        },
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result["seconds"], indent=2))


if __name__ == "__main__":
    main()
