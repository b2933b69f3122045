"""Plants faults, one line each, all over the product, and says which of them the tests find.

    python scripts/dev/plant_faults.py [--only WORD]… [--processes N] [--report FILE]

Each fault is planted in a copy of the checkout, and the tests that are to find it run there until one fails. Where
tests are made fewer or cheaper, run this before and after: what was found must be found still. Ends non-zero where a
fault is not found, or where the line that it changes is not there any more. The last line is JSON.

It takes a quarter of an hour on two cores. tests/unit/scripts/test_plant_faults.py holds the list to the code.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("launch", "trtrun", "parallel", "tests", "scripts", "docs", "setup.py", "pyproject.toml", "README.md")
MOST_SECONDS = 600


@dataclass(frozen=True)
class Fault:
    """A line of the product, what becomes of a part of it, and the tests that are to find that.

    Attributes:
        path: of the file, below the checkout.
        was, becomes: the part, which is in the file once, and what it becomes.
        tests: files or folders below `tests`; "mpirun N FILE" runs one on that many ranks.
    """

    path: str
    was: str
    becomes: str
    tests: tuple[str, ...]


def read_faults() -> list[Fault]:
    """All of planted_faults.toml."""
    tables = tomllib.loads((ROOT / "scripts/dev/planted_faults.toml").read_text(encoding="utf-8"))["fault"]
    return [Fault(**{**table, "tests": tuple(table["tests"])}) for table in tables]


def main() -> int:
    """Plant them one after the other, or several side by side; 1 where one is not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="those in files whose path holds this word")
    parser.add_argument("--processes", type=int, default=2, help="faults that are planted side by side")
    parser.add_argument("--report", type=Path, help="a JSON file for what was found")
    options = parser.parse_args()
    faults = [fault for fault in read_faults() if not options.only or any(word in fault.path for word in options.only)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, ThreadPoolExecutor(options.processes) as pool:
        found = list(pool.map(lambda place: try_fault(Path(folder), place[0], place[1]), enumerate(faults)))
    rows = [
        {"path": fault.path, "becomes": fault.becomes.strip(), "found": words}
        for fault, words in zip(faults, found, strict=True)
    ]
    if options.report is not None:
        options.report.write_text(json.dumps(rows, indent=1) + "\n")
    missed = [row["path"] for row in rows if not row["found"]]
    summary = {"planted": len(rows), "found": len(rows) - len(missed), "not_found": missed}
    print(json.dumps(summary | {"seconds": round(time.monotonic() - started)}))
    return 1 if missed else 0


def try_fault(folder: Path, number: int, fault: Fault) -> str:
    """Plant it in a copy, run its tests; returns which of them failed first, or nothing."""
    checkout = folder / f"{number}"
    checkout.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, checkout / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, checkout / name)
    plant(checkout, fault)
    words = next(filter(None, (run_tests(checkout, name) for name in fault.tests)), "")
    print(f"{'found' if words else 'NOT FOUND'}: {fault.path}: {fault.becomes.strip()}  {words}", flush=True)
    shutil.rmtree(checkout)
    return words


def plant(checkout: Path, fault: Fault) -> None:
    """Change the line.

    Raises:
        ValueError: what is to be changed is not in the file, or not once.
    """
    file = checkout / fault.path
    text = file.read_text()
    if text.count(fault.was) != 1 or fault.was == fault.becomes:
        raise ValueError(f"{fault.path} does not hold {fault.was!r} once: bring this fault up to date")
    file.write_text(text.replace(fault.was, fault.becomes))


def run_tests(checkout: Path, name: str) -> str:
    """What failed, or in which way the tests did not end; nothing where they pass."""
    *ranks, path = name.split()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    if ranks:
        environment |= {"OMPI_MCA_mpi_yield_when_idle": "1"}
        if os.geteuid() == 0:
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
        command = [mpirun, "--oversubscribe", "--bind-to", "none", "-n", ranks[1], *command, "--with-mpi", "-m", "mpi"]
    else:
        command += ["-m", "not mpi"]
    process = subprocess.Popen(
        [*command, f"tests/{path}"], cwd=checkout, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output = process.communicate(timeout=MOST_SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return f"{path} does not end"
    if process.returncode in (0, 5):  # 5: no test is for so many ranks
        return ""
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "===== rank"))]
    return next(iter(failed), f"{path} ends with {process.returncode}").partition(" - ")[0]


if __name__ == "__main__":
    sys.exit(main())
