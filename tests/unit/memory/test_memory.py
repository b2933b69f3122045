"""Memory: loading reads a rank's shard straight to where it stays; no rank ever holds the whole model.

A fresh process for each measurement, because a peak never falls. The baseline is that of a process which has imported
everything and run a tiny model, so that what is measured is the model's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from pipelines import make_llm

from trtrun import SamplingParams
from trtrun.engine.rows import RowState

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, sys
from pathlib import Path
import torch
from pipelines import configuration, make_llm, prompt_of
from trtrun import LLM, SamplingParams

def peak():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024

tiny, target, draft, dtype, quantization, kv_tokens = sys.argv[1:]
torch.set_num_threads(1)
with make_llm(Path(tiny), Path(tiny), dtype=dtype, quantization=quantization) as llm:
    llm.generate([prompt_of(200)], SamplingParams(max_tokens=8))
before = peak()
peaks = []
config = configuration(
    Path(target),
    Path(draft) if draft else None,
    dtype=dtype,
    quantization=quantization,
    kv_cache={"max_tokens": int(kv_tokens)},
    scheduler={"max_batch_size": 32, "max_num_tokens": 192},
)
with LLM(config=config, on_load_progress=lambda done, total: peaks.append(peak())) as llm:
    loaded = peaks[-1]
    (report,) = llm.report.ranks
    llm.generate([prompt_of(300)], SamplingParams(max_tokens=8))
    ran = peak()
print(json.dumps([before, loaded, ran, report.shard_bytes, report.bytes_read, report.kv_bytes, report.kv_tokens]))
"""
MIB = 2**20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target` with about 90 MiB of bfloat16 in three files, of which the largest tensor is a tenth; and `tiny`, with
    heads of the same size, so that it compiles what the others run on."""
    folder = tmp_path_factory.mktemp("memory")
    sizes = {"num_key_value_heads": 8, "num_attention_heads": 8, "max_position_embeddings": 2048}
    make_checkpoint(folder / "tiny", dtype=torch.bfloat16, head_dim=64, **sizes)
    make_checkpoint(
        folder / "target",
        dtype=torch.bfloat16,
        num_shards=3,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=10,
        vocab_size=6000,
        **sizes,
    )
    make_checkpoint(
        folder / "draft",
        dtype=torch.bfloat16,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=2,
        vocab_size=6000,
        **sizes,
    )
    return folder


@cache
def measure(models: Path, draft: str, dtype: str, *, quantization: str, kv_tokens: int) -> list[int]:
    """The numbers that the program prints; tests that ask the same share one process."""
    path = os.pathsep.join([str(ROOT / "tests" / "helpers"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    draft = str(models / draft) if draft else ""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            *map(str, (models / "tiny", models / "target", draft, dtype, quantization, kv_tokens)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    numbers: list[int] = json.loads(done.stdout.splitlines()[-1])
    return numbers


@pytest.mark.parametrize(
    ("draft", "dtype", "quantization"),
    [
        ("", "bfloat16", "none"),
        ("draft", "bfloat16", "none"),
        ("", "float32", "none"),
        ("draft", "bfloat16", "int8"),
        ("target", "bfloat16", "fp8"),
    ],
)
def test_peak_memory_stays_within_1_2_times_the_shard_and_the_kv_store(
    models: Path, draft: str, dtype: str, quantization: str
) -> None:
    """While loading within 1.2 times the shard, and ever after within that and the KV store."""
    before, loaded, ran, shard_bytes, bytes_read, kv_bytes, _ = measure(
        models, draft, dtype, quantization=quantization, kv_tokens=4096
    )
    assert shard_bytes > 80 * MIB
    if quantization == "none":
        assert bytes_read == shard_bytes // (2 if dtype == "float32" else 1)
    else:
        assert 1.02 < bytes_read / shard_bytes < 2
    print(
        f"shard {shard_bytes / MIB:.0f} MiB, KV store {kv_bytes / MIB:.0f}; "
        f"loading took {(loaded - before) / MIB:.0f}, all of it {(ran - before) / MIB:.0f}"
    )
    assert loaded - before <= 1.2 * shard_bytes
    assert ran - before <= 1.2 * shard_bytes + kv_bytes


def test_a_kv_store_takes_memory_only_where_it_was_written(models: Path) -> None:
    """A store ten times the size costs nothing until rows fill it."""
    small, large = (measure(models, "", "bfloat16", quantization="none", kv_tokens=count) for count in (4096, 65536))
    assert large[5] > 10 * small[5]
    assert large[2] - large[0] < small[2] - small[0] + (large[5] - small[5]) // 10


def is_resident(tensor: torch.Tensor) -> bool:
    """Whether the system has given memory to the first page of a tensor on the host."""
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(tensor.data_ptr() // os.sysconf("SC_PAGE_SIZE") * 8)
        return bool(int.from_bytes(pagemap.read(8), sys.byteorder) >> 63)


def test_a_host_store_has_memory_for_one_forward_from_the_start_and_no_more(models: Path) -> None:
    """First requests do not wait for pages, and a store that may take half of the machine's memory takes none of it."""
    settings: dict[str, Any] = {
        "kv_cache": {"max_tokens": 160_000},
        "scheduler": {"max_batch_size": 128, "max_num_tokens": 640},
    }
    with make_llm(models / "tiny", models / "tiny", **settings) as llm:
        worker = llm.engine.orchestrator._ranks._worker
        for engine in (worker.target, worker.drafter._engine):
            data = next(engine._store.parts())[0]  # [layers, 2, blocks, kv_heads, block, head]
            assert data.shape[2] == 1 + 160_000 // 16
            assert data.nbytes > 32 * MIB  # less may be memory that malloc has had before
            parts = data.flatten(0, 1)
            assert all(is_resident(part[block]) for part in parts for block in (1, 20, 40))
            # The middle is farther from the blocks with memory, in this part and the next, than a huge page is long.
            assert parts[0].nbytes > 5_000_000
            assert not any(is_resident(part[data.shape[2] // 2]) for part in parts)
            assert not data[:, :, 1:].any()  # block 0 takes what warming up writes


def test_tables_are_no_longer_than_a_row_can_come_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever context config.json speaks of: tables of rows and angles for 2**24 positions took gigabytes."""
    path = make_checkpoint(tmp_path / "target", seed=1, max_position_embeddings=2048)
    prompts, sampling = [[5, 6, 7]], SamplingParams(max_tokens=100, ignore_eos=True)
    texts, made, make = [], [], RowState.__init__

    def watched(rows: RowState, *args: Any, **options: Any) -> None:
        make(rows, *args, **options)
        made.append(rows.token_ids.shape[1])

    monkeypatch.setattr(RowState, "__init__", watched)
    for context in (2048, 1_000_000_000):
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
        (path / "config.json").write_text(json.dumps(values | {"max_position_embeddings": context}), encoding="utf-8")
        settings = {"kv_cache": {"max_tokens": 90}, "scheduler": {"max_num_tokens": 64, "max_batch_size": 2}}
        with make_llm(path, path, speculation={"draft_len": 3, "pacing": "measured"}, **settings) as llm:
            (output,) = llm.generate(prompts, sampling)
            texts.append(output.completions[0])
    assert made == [96 + 5] * 4  # six blocks, and room behind them for a draft
    assert texts[0].token_ids == texts[1].token_ids and len(texts[0].token_ids) == 96 - 3
