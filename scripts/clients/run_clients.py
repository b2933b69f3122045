"""Runs clients that nobody here wrote against `trtrun serve`, and prints what became of each. The server has the
shipped pair; for clients that call tools it has the made-up chat model of real_clients/chat_model.py.

    scripts/clients.sh [--only NAME]… [--backend DIR] [--folder DIR]

Each client is installed into an environment of its own below --folder, which is kept for the next time; that takes a
network, some gigabytes and minutes. --backend names a checkout of tensorrtllm_backend at v0.18.0 for its scripts. Where
there is no Node, its client is skipped. The last line is JSON. Exit status: 0 all did what they should, 1 some did not.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.clients import real_clients
from scripts.clients.real_clients.calls import Call, Client, Place
from scripts.clients.real_clients.table import CLIENTS
from scripts.harness.announcements import Addresses
from scripts.harness.processes import server_environment
from scripts.harness.server import write_tokenizer
from scripts.harness.serving import serve_words, serving
from scripts.harness.trials import exiting_clearly

INSTALL_SECONDS, MODEL_SECONDS, CALL_SECONDS, START_SECONDS = 1800, 1800, 600, 120
CHAT_CONTEXT = 4096
"""Tokens that the chat model's context has, unless a call wants more: what is too long is refused soon."""

QUIET = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
}  # fmt: skip
"""Of every client's environment: nothing is looked for on a hub, and nothing is reported."""


def main() -> int:
    """Read the command line, run what is asked for, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="calls whose name, behind their client's, has this in it"
    )
    parser.add_argument("--backend", type=Path, metavar="DIR", help="checkout of tensorrtllm_backend")
    parser.add_argument("--folder", type=Path, default=Path("build/clients"), help="for environments and what is said")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory(prefix="trtrun-clients-") as work:
        tokenizer = write_tokenizer(Path(work) / "tokenizer")
        config = _write_config(Path(work) / "serve.yaml", {"target": "asset:target", "draft": "asset:draft"}, tokenizer)
        for client in CLIENTS:
            calls = [
                call
                for call in client.calls
                if not options.only
                or any(part.lower() in f"{client.name} {call.name}".lower() for part in options.only)
            ]
            if not calls:
                continue
            named = {"client": client.name, "version": client.version}
            if client.packages and not (shutil.which("node") and shutil.which("npm")):
                results += [{**named, "call": call.name, "problem": "", "skipped": "needs node, npm"} for call in calls]
                print(*map(_row, results[-len(calls) :]), sep="\n", flush=True)
                continue
            if client.calls_tools:
                pair = _chat_pair(folder)
                models = {role: str(pair / role) for role in ("target", "draft")}
                context = {"scheduler": {"max_seq_len": CHAT_CONTEXT}}
                own_config = _write_config(Path(work) / "chat.yaml", models, pair / "target", context)
            else:
                own_config = config
            for call, problem in _run_calls(client, calls, own_config, tokenizer, folder, options.backend):
                results.append({**named, "call": call, "problem": problem})
                print(_row(results[-1]), flush=True)
    failed = [result for result in results if result["problem"]]
    print(json.dumps({"calls": len(results), "failed": len(failed), "results": results}))
    return 1 if failed or not results else 0


def _row(result: dict[str, str]) -> str:
    """A line of the table."""
    state = "✓" if not result["problem"] else f"✗ {result['problem']}"
    if "skipped" in result:
        state = f"skipped: {result['skipped']}"
    return f"| {result['client']} {result['version']} | `{result['call']}` | {state} |"


def _write_config(
    path: Path, models: Mapping[str, str], tokenizer: Path, others: Mapping[str, object] | None = None
) -> Path:
    """A pair in one process, with a tokenizer that has a chat template. It drafts on a busy machine, too, where that
    does not pay: some clients look for drafts."""
    pair = {role: {"model": model, "devices": ["cpu:0"]} for role, model in models.items()}
    settings = {"tokenizer": str(tokenizer), "threads": 1, "speculation": {"pacing": "fixed"}}
    path.write_text(json.dumps({**pair, **settings, **(others or {})}), encoding="utf-8")
    return path


def _chat_pair(folder: Path) -> Path:
    """Where the chat model is; it is made unless it is there, as the program has it now."""
    here = Path(real_clients.__file__).parent
    written = b"".join((here / name).read_bytes() for name in ("chat_model.py", "task.py"))
    pair = folder / f"chat-model-{hashlib.sha256(written).hexdigest()[:12]}"
    if not pair.exists():
        print("the chat model is made, which takes some minutes", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=folder) as part:
            words = [sys.executable, "-m", "scripts.clients.real_clients.chat_model", part]
            subprocess.run(words, check=True, timeout=MODEL_SECONDS, env=server_environment(), cwd=here.parent)
            shutil.copytree(part, pair)
    return pair


def _run_calls(
    client: Client, calls: Sequence[Call], config: Path, tokenizer: Path, folder: Path, backend: Path | None
) -> Iterator[tuple[str, str]]:
    """Each call's name, and what was wrong with it."""
    home = folder / "".join(letter if letter.isalnum() else "-" for letter in client.name)
    problem = ""
    if client.needs_backend and backend is None:
        problem = "not run: name a checkout of v0.18.0 with --backend"
    else:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(home / "calls")
        try:
            _install(client, home)
        except (subprocess.SubprocessError, OSError) as error:
            problem = f"not run: it could not be installed: {error}"
    if problem:
        yield from ((call.name, problem) for call in calls)
        return
    python = str(home / "bin" / "python")
    shared = contextlib.ExitStack()
    at: Addresses | None = None
    for number, call in enumerate(calls):
        with contextlib.ExitStack() as own:
            if call.options or call.own_server:
                where = own.enter_context(_serving(config, call.options))
            else:
                where = at = at or shared.enter_context(_serving(config))
            work = home / "calls" / str(number)
            work.mkdir(parents=True)
            host, _, port = where.url.removeprefix("http://").rpartition(":")
            place = Place(
                python, host, int(port), where.grpc_address, where.metrics_url, where.model, tokenizer,
                home / "unpacked", backend.resolve() if backend else Path(), work,
            )  # fmt: skip
            yield call.name, _run_call(call, place)
    shared.close()


def _install(client: Client, home: Path) -> None:
    """Make the client's environment, unless it is there."""
    done = home / f"installed-{client.version.replace(' ', '')}"
    if done.exists():
        return
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    # Isolated: pip would count trtrun, which it sees from here, as installed there, without what it needs.
    pip = [str(home / "bin" / "python"), "-I", "-m", "pip", "-qq", "--disable-pip-version-check"]
    if client.install:
        subprocess.run([*pip, "install", *client.install], check=True, timeout=INSTALL_SECONDS)
    if client.unpack:
        wheels = home / "wheels"
        words = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels), client.unpack]
        subprocess.run(words, check=True, timeout=INSTALL_SECONDS)
        (wheel,) = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py") and ".data/" not in name]
            archive.extractall(home / "unpacked", names)
        shutil.rmtree(wheels)
    if client.packages:
        words = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(home), *client.packages]
        subprocess.run(words, check=True, timeout=INSTALL_SECONDS)
    done.touch()


def _run_call(call: Call, place: Place) -> str:
    """Call the client; returns what was wrong, or nothing. What it said is beside its files."""
    try:
        first, *others = map(str, call.words(place))
        words = (
            [first, *others]
            if os.access(first, os.X_OK) and not first.endswith(".py")
            else [place.python, first, *others]
        )
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            words, cwd=place.folder, env=environment | QUIET | call.variables(place), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=CALL_SECONDS, check=False,
        )  # fmt: skip
        output, status = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        output, status = error.output or b"", 0
        if not call.last_words or call.last_words not in output.decode(errors="replace"):
            return f"not done after {CALL_SECONDS} s"
    except OSError as error:
        return str(error)
    said = output.decode(errors="replace")
    (place.folder / "said").write_text(said, encoding="utf-8")
    if status != 0:
        last = said.strip().splitlines()[-1:] or [""]
        return f"status {status}: {last[0][:200]} ({place.folder / 'said'})"
    try:
        found = call.check(said, place)
    except (OSError, ValueError, KeyError, IndexError) as error:
        found = f"what it wrote cannot be read: {error!r}"
    return f"{found} ({place.folder / 'said'})" if found else ""


@contextlib.contextmanager
def _serving(config: Path, options: Sequence[str] = ()) -> Iterator[Addresses]:
    """A server; yields where it is."""
    with exiting_clearly(), serving(serve_words(config, *options), server_environment(), START_SECONDS) as server:
        yield server.addresses


if __name__ == "__main__":
    sys.exit(main())
