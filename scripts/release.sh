#!/usr/bin/env bash
# Builds what is released, and tries it: the source archive, the wheel made of it, and the wheel's `trtrun` in an empty
# environment, where it runs the shipped pair. Nothing is uploaded.
#
#   scripts/release.sh [FOLDER]     FOLDER: of the two files, default dist
#
# The version stands in trtrun/__init__.py alone, and is the newest heading of CHANGELOG.md.
# TRTRUN_PYTHON: a Python that has everything already, trtrun's dependencies too; default .venv's, with the extra release.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="$(realpath -m "${1:-$root/dist}")"
python="${TRTRUN_PYTHON:-$root/.venv/bin/python}"
[[ -n "${TRTRUN_PYTHON:-}" ]] || bash "$root/scripts/install.sh" release

fail() {
    echo "release.sh: $*" >&2
    exit 1
}

version="$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$root/trtrun/__init__.py")"
newest="$(sed -n 's/^## \([^ ]*\).*/\1/p' "$root/CHANGELOG.md" | head -n 1)"
[[ "$version" == "$newest" ]] || fail "trtrun/__init__.py says $version, and CHANGELOG.md begins with $newest"

"$python" -m build --no-isolation --outdir "$folder" "$root" >&2
wheel="$folder/trtrun-$version-py3-none-any.whl"
"$python" -m twine check --strict "$wheel" "$folder/trtrun-$version.tar.gz" >&2

# The environment has the wheel, and sees the dependencies that are installed beside $python: a path in a .pth file
# comes last, and what is installed there as editable stays unseen.
unset PYTHONPATH
trial="$(mktemp -d)"
trap 'rm -rf "$trial"' EXIT
"$python" -m venv --without-pip "$trial/venv"
"$python" -m pip --python "$trial/venv/bin/python" install --quiet --disable-pip-version-check --no-deps --no-compile "$wheel" >&2
packages="$("$trial/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$packages/dependencies.pth"
cd "$trial"
said="$(venv/bin/trtrun --version)"
[[ "$said" == *" $version" ]] || fail "the wheel's trtrun --version says $said"
venv/bin/trtrun run --config "$packages/launch/configs/one_process_cpu.yaml" --prompt "def main(" --max-tokens 8 >&2

if ! grep -q "^## $version ([0-9-]*)\$" "$root/CHANGELOG.md"; then
    echo "release.sh: before it is released, the heading of $version in CHANGELOG.md has its date" >&2
fi
echo "$wheel"
echo "$folder/trtrun-$version.tar.gz"
