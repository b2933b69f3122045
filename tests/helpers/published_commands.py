"""Command lines of documents that TensorRT-LLM's users follow, as they were published, read as words. They lie beside
this file, in a folder of its name:

- boost_llama_70b.txt: NVIDIA's "Boost Llama 3.3 70B Inference Throughput 3x", as a web page reprints it, whose dashes
  and quotes are typographic and which has lost what stood in angle brackets;
- draft_target_model.txt: TensorRT-LLM 0.18's page on draft-target models, and its Triton backend's;
- llama_3_with_triton.txt: "Running Llama 3 with Triton and TensorRT-LLM", without backslashes at ends of lines;
- slides.txt: slides of October 2023, whose lines are broken within options.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

DOCUMENTS = Path(__file__).parent / "published_commands"
LOST = {
    "\u2013model_dir \u2013dtype": "\u2013model_dir Llama-3.2-1B-Instruct \u2013dtype",
    "\u2013model_dir= \\": "\u2013model_dir=Meta-Llama-3.3-70B-Instruct \\",
    "\u2013tokenizer_dir \\": "\u2013tokenizer_dir Meta-Llama-3.3-70B-Instruct \\",
    "python3./run.py": "python3 ./run.py",
    "mpirun -n 1 \u2013allow": "mpirun -n 1 --allow",
}
"""What stood in angle brackets, a space, and a dash that mpirun itself has to understand."""


@dataclass
class Document:
    """A document's command lines, read in order.

    Attributes:
        name: of its file.
        variables: what `${…}` stands for; grows with `export` and with assignments as the commands are read.
        places: what absolute paths stand for.
    """

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def commands(self) -> Iterator[list[str]]:
        """The words of each, as a shell would take them."""
        text = (DOCUMENTS / self.name).read_text(encoding="utf-8")
        for found, meant in (LOST | self.places).items():
            text = text.replace(found, meant)
        for line in _join_lines(text):
            words = shlex.split(re.sub(r"\$\{(\w+)\}", lambda found: self.variables[found[1]], line))
            assigned = words[1:] if words[0] == "export" else words[:1]
            if all(re.match(r"\w+=", word) for word in assigned):
                self.variables |= dict(word.split("=", 1) for word in assigned)
                continue
            yield words


def _join_lines(text: str) -> Iterator[str]:
    """Command lines, each with the lines that belong to it."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    while lines:
        command = lines.pop(0).removeprefix("$ ")
        while lines and (_is_open(command) or lines[0].lstrip().startswith(("-", "\u2013", "'"))):
            command = command.removesuffix("\\") + ("\n" if _is_quoted(command) else " ") + lines.pop(0).lstrip()
        yield command


def _is_open(command: str) -> bool:
    return command.endswith(("\\", " --")) or _is_quoted(command)


def _is_quoted(command: str) -> bool:
    try:
        shlex.split(command.removesuffix("\\"))
    except ValueError:
        return True
    return False
