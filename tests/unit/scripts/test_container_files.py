"""containers/: the files of all runtimes say the same, and what they name is there. None is built here."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "containers"
CHECKOUT = "/opt/trtrun/checkout"
EDF_KEYS = {"base_environment", "image", "mounts", "workdir", "writable", "entrypoint", "env", "annotations"}


def docker_steps() -> list[tuple[str, str]]:
    """Instructions and what stands behind them."""
    lines = (FOLDER / "Dockerfile").read_text(encoding="utf-8").splitlines()
    steps = [tuple(line.split(" ", 1)) for line in lines if line and not line.startswith("#")]
    known = {"ARG", "FROM", "COPY", "RUN", "ENV", "USER", "WORKDIR", "CMD"}
    assert {step[0] for step in steps} <= known and all(len(step) == 2 for step in steps)
    return [(step[0], step[1]) for step in steps]


def apptainer_sections() -> dict[str, list[str]]:
    """Lines of each section; those of the header under an empty name."""
    found: dict[str, list[str]] = {"": []}
    for line in (FOLDER / "trtrun.def").read_text(encoding="utf-8").splitlines():
        if line.startswith("%"):
            found[line[1:]] = current = []
        elif line and not line.startswith("#"):
            (current if len(found) > 1 else found[""]).append(line.strip())
    return found


def copied() -> dict[str, str]:
    """Where the Dockerfile puts each file and folder of the checkout."""
    found = {}
    for _, words in (step for step in docker_steps() if step[0] == "COPY"):
        *sources, target = words.split()
        found |= {source: target + source if target.endswith("/") else target for source in sources}
    return found


def test_all_that_is_copied_is_there_and_is_what_setup_installs() -> None:
    files = copied()
    assert all((ROOT / name).exists() for name in files)
    assert all(target == f"{CHECKOUT}/{name}" for name, target in files.items())
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    packages = set(re.findall(r'"(\w+)\.\*"', setup))
    assert packages and packages <= set(files) and {"setup.py", "pyproject.toml", "LICENSE"} <= set(files)
    assert dict(line.split() for line in apptainer_sections()["files"]) == files


def test_both_images_are_made_alike() -> None:
    steps, sections = docker_steps(), apptainer_sections()
    values = dict(line.split("=", 1) for line in sections["arguments"])
    assert [words for name, words in steps if name == "ARG" and "=" in words] == [
        f"{name}={value}" for name, value in values.items()
    ]
    (run,) = (words for name, words in steps if name == "RUN")
    assert sections["post"] == [run.replace("${EXTRAS}", "{{ EXTRAS }}")]
    variables = [f"export {words}" for name, words in steps if name == "ENV"]
    assert sections["environment"] == variables and any("libmpi.so.12" in line for line in variables)
    assert [words for name, words in steps if name == "USER"] == ["1000:1000"]


def test_versions_and_extras_are_those_of_setup() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    values = dict(line.split("=", 1) for line in apptainer_sections()["arguments"])
    least = re.search(r'python_requires=">=3\.(\d+)"', setup)
    python = re.fullmatch(r"python:3\.(\d+)-slim", values["BASE"])
    assert least and python and int(python[1]) >= int(least[1])
    texts = "\n".join(path.read_text(encoding="utf-8") for path in FOLDER.iterdir())
    used = {extra for found in re.findall(r"EXTRAS=([\w,]+)", texts) for extra in found.split(",")}
    assert used and all(f'"{extra}": ' in setup for extra in used)


def test_the_installation_names_what_is_there_and_is_a_script() -> None:
    path = FOLDER / "install.sh"
    assert path.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"\$checkout/([\w./]+)", text)
    assert named and all((ROOT / name).is_file() for name in named)
    # Where trtrun looks for an image's kernels (trtrun/kernels/cpu/object_cache.py), and Python for MPICH.
    assert '"$python/share/trtrun/kernels"' in text and "--prefix /opt/trtrun/mpich mpich" in text


def test_the_edf_file_is_one() -> None:
    values = tomllib.loads((FOLDER / "trtrun.toml").read_text(encoding="utf-8"))
    assert set(values) <= EDF_KEYS and values["image"].endswith(".sqsh")
    assert all(isinstance(value, str) for value in values["env"].values())
    assert values["annotations"]["com"]["hooks"]["cxi"]["enabled"] == "true"
