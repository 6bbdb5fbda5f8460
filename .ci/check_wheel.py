"""Build the wheel; see that it holds what the source tree holds and that it starts without the source tree.

Usage: python .ci/check_wheel.py FOLDER
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(folder: Path) -> int:
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT], check=True)
    (wheel,) = folder.glob("changeover-*.whl")

    tracked = subprocess.run(
        ["git", "ls-files", "src/changeover"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    expected = {path.removeprefix("src/") for path in tracked if (ROOT / path).is_file()}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    missing, foreign = sorted(expected - names), sorted(names - expected)
    if missing:
        print(f"{wheel.name}: expected every tracked file of src/changeover; missing {', '.join(missing)}")
    if foreign:
        print(f"{wheel.name}: expected tracked files only; also holds {', '.join(foreign)}")

    site = folder / "site"
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", site, wheel], check=True)
    where = subprocess.run(
        [sys.executable, "-c", "import changeover; print(changeover.__file__)"],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    if not where.startswith(str(site)):
        print(f"expected changeover from {site}; it was imported from {where}")
        return 1
    subprocess.run(
        [sys.executable, "-m", "changeover", "--help"],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1024:.0f} KiB")
    return 1 if missing or foreign else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
