"""Every command line of published_commands.py in its order, as it was published, on the shipped pair; the servers'
clients are run by tests/e2e/serve/test_published_clients.py.

What is not as published: texts are short, of which there are few to calibrate with, and models' names stand for the
shipped pair.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import MPIRUN, ROOT, command_environment
from forked_commands import ForkedCommands, forked_words
from published_commands import DOCUMENTS, Document

from trtrun.configuration.model_paths import ASSETS

MODELS = {
    "Llama-3.2-1B-Instruct": "draft",
    "Llama-3.2-3B-Instruct": "draft",
    "Llama-3.1-8B-Instruct": "draft",
    "Meta-Llama-3.3-70B-Instruct": "target",
    "Meta-Llama-3-8B-Instruct": "target",
    "meta-llama/Llama-2-7b-chat-hf": "target",
    "llama-7B": "draft",
    "llama-13B": "target",
}
SCRIPTS = {
    "trtllm-build": "trtllm_build.py",
    "build.py": "trtllm_build.py",
    "convert_checkpoint.py": "convert_checkpoint.py",
    "quantize.py": "quantize.py",
    "run.py": "run.py",
}
INSTEAD = (
    *("docker", "/bin/bash", "nvcr.io/nvidia/tritonserver:24.-trtllm-python-py3", "tritonserver", "pkill"),
    *("apt-get", "sudo", "libopenmpi-dev", "pip", "pip3", "git", "cd", "-c"),
    *("rm", "cp", "sed", "mkdir", "fill_template.py", "launch_triton_server.py"),
)
"""What docs/migrate-from-triton.md has something, or nothing, in place of."""
CLIENTS = ("curl", "e2e_grpc_speculative_decoding_client.py", "speculative_decoding_test.py")


@pytest.mark.parametrize("name", sorted(path.name for path in DOCUMENTS.iterdir()))
def test_every_command_ends_well_and_the_last_in_text(
    name: str, forked_commands: ForkedCommands, tmp_path: Path
) -> None:
    prepare_folder(tmp_path)
    paths = {"DRAFT_MODEL_PATH": "llama-7B", "TARGET_MODEL_PATH": "llama-13B"}
    document = Document(name, paths, {"/workspace/": "", "/data/": "", " /ckpt-draft": " ckpt-draft"})
    ran: list[str] = []
    for words in document.commands():
        launcher = words[: words.index("python3")] if words[0] == "mpirun" else []
        program, *rest = [word for word in words[len(launcher) :] if word != "python3"]
        program = Path(program).name if program not in INSTEAD else program
        if program in INSTEAD or program in CLIENTS:
            continue
        rest = [re.sub(r"(max_output_len=?)\d+$", r"\g<1>12", word) for word in rest]
        if "max_output_len" in rest:
            rest[rest.index("max_output_len") + 1] = "12"
        script = [sys.executable, str(ROOT / "scripts" / SCRIPTS[program])]
        if launcher:
            line = [*MPIRUN, *launcher[1:], *forked_words(), *script, *rest]
            done = subprocess.run(
                line, capture_output=True, text=True, cwd=tmp_path, env=command_environment(), timeout=120, check=False
            )
        else:
            done = forked_commands.run(rest, command_environment(), tmp_path, 120, script)
        assert done.returncode == 0, (words, done.stderr)
        ran.append(program)
        if program == "run.py":
            found = re.search(r'^Output \[Text 0 Beam 0\]: "(.+)"', done.stdout, re.M | re.S)
            assert found is not None and found[1].strip(), done.stdout
            logprobs = [line for line in done.stdout.splitlines() if line.startswith("Log probabilities [Text 0]: ")]
            assert len(logprobs) == ("--output_generation_logits" in rest)
    assert ran[-1] == "run.py" and len(ran) == {"boost": 5, "draft": 5, "llama": 3, "slide": 2}[name[:5]]


def prepare_folder(folder: Path) -> None:
    """Models by the names that the documents clone, and texts to calibrate with."""
    for name, model in MODELS.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(ASSETS / model)
    engine = folder / "examples" / "llama" / "L40"
    engine.parent.mkdir(parents=True)
    engine.symlink_to("out")  # the slides build into one and run the other
    prompts = json.loads((ASSETS / "heldout.json").read_text(encoding="utf-8"))["prompts"]
    texts = [json.dumps({"article": prompt["text"]}) for prompt in prompts[:3]]
    (folder / "cnn_dailymail.jsonl").write_text("\n".join(texts), encoding="utf-8")
