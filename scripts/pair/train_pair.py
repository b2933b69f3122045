"""Train the small target and draft models that ship in ``trtrun/assets``.

The corpus is the Python source of the standard library of the running interpreter (PSF-2.0),
without its tests. Stages, each resumable after a kill: ``data`` (split, tokenizer, token cache),
``target`` (next-token loss), ``generate`` (target continuations of training prompts), ``draft``
(distillation on corpus and continuations) and ``export``. ``--evaluate`` measures what was saved.

    python scripts/pair/train_pair.py --work-dir build/train_pair --out trtrun/assets
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.pair.pair_corpus import POSITIONS, VOCABULARY, prepare_data
from scripts.pair.pair_evaluation import evaluate

TOKENS_PER_STEP, MICRO_BATCH_TOKENS = 4096, 2048
GENERATED_LENGTH = 256
MATRIX_RATE, VECTOR_RATE = 5e-3, 3e-3
WARMUP_STEPS, CHECKPOINT_STEPS, LOG_STEPS = 40, 50, 10
SHAPES = {
    "target": {"hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4},
    "draft": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
}
INTERMEDIATE = {"target": 688, "draft": 344}
BatchLoss = Callable[[torch.Tensor], torch.Tensor]


def new_model(name: str, seed: int) -> LlamaForCausalLM:
    """Create an untrained model; eager attention is the faster one to train on a CPU."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=INTERMEDIATE[name],
        max_position_embeddings=POSITIONS,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
        **SHAPES[name],
    )
    return LlamaForCausalLM(config)


@functools.lru_cache(maxsize=4)
def epoch_order(windows: int, length: int, epoch: int, seed: int) -> tuple[int, numpy.ndarray]:
    """Give one epoch's random offset and order of windows."""
    generator = numpy.random.default_rng([seed, length, epoch])
    return int(generator.integers(length)), generator.permutation(windows)


def corpus_batch(tokens: numpy.ndarray, step: int, length: int, rows: int, seed: int) -> torch.Tensor:
    """Give the windows of one step: every epoch sees each window once, at shifted offsets."""
    windows = len(tokens) // length - 1
    batch = []
    for index in range(step * rows, (step + 1) * rows):
        epoch, position = divmod(index, windows)
        offset, order = epoch_order(windows, length, epoch, seed)
        start = offset + int(order[position]) * length
        batch.append(tokens[start : start + length])
    return torch.from_numpy(numpy.stack(batch).astype(numpy.int64))


def sequence_length(step: int, steps: int) -> int:
    """Train on short windows, which are cheaper; the last phase makes all positions work."""
    return 256 if step < 0.88 * steps else POSITIONS


def rate_factor(step: int, steps: int) -> float:
    """Warm up, hold, then decay linearly over the last 45 % of the steps."""
    return min(1.0, (step + 1) / WARMUP_STEPS, max(0.0, (steps - step) / (0.45 * steps)))


def optimizers_of(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Use Muon for the layers' matrices, AdamW for embeddings and norms."""
    named = list(model.named_parameters())
    matrices = [value for name, value in named if value.ndim == 2 and "embed" not in name]
    vectors = [value for name, value in named if value.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, lr=VECTOR_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def run_training(
    model: LlamaForCausalLM,
    checkpoint: Path,
    steps: int,
    batches: Callable[[int], list[torch.Tensor]],
    batch_loss: BatchLoss,
) -> None:
    """Train up to ``steps``, continuing from ``checkpoint`` where it exists."""
    optimizers, start = optimizers_of(model), 0
    base = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        start = state["step"]
    model.train()
    losses: list[float] = []
    for step in range(start, steps):
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, base, strict=True):
            group["lr"] = rate * rate_factor(step, steps)
        parts = batches(step)
        for part in parts:
            loss = batch_loss(part) / len(parts)
            loss.backward()
            losses.append(loss.item() * len(parts))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % LOG_STEPS == 0:
            print(f"{time.strftime('%H:%M:%S')} step {step + 1} loss {numpy.mean(losses):.4f}", flush=True)
            losses = []
        if (step + 1) % CHECKPOINT_STEPS == 0 or step + 1 == steps:
            saved_states = [optimizer.state_dict() for optimizer in optimizers]
            state = {"model": model.state_dict(), "optimizers": saved_states, "step": step + 1}
            torch.save(state, checkpoint.with_suffix(".partial"))
            os.replace(checkpoint.with_suffix(".partial"), checkpoint)


def train_target(work: Path, steps: int, seed: int, compiled: bool) -> None:
    """Train the target on the next token of the corpus."""
    tokens = numpy.load(work / "train.npy")
    model = new_model("target", seed)

    def batch_loss(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
        return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def batches(step: int) -> list[torch.Tensor]:
        length = sequence_length(step, steps)
        batch = corpus_batch(tokens, step, length, TOKENS_PER_STEP // length, seed)
        return list(batch.split(MICRO_BATCH_TOKENS // length))

    loss = torch.compile(batch_loss, dynamic=False) if compiled else batch_loss
    run_training(model, work / "target.pt", steps, batches, loss)


def trained_model(work: Path, name: str) -> LlamaForCausalLM:
    """Load a model's checkpoint, rounded to the bf16 values that are shipped, frozen."""
    model = new_model(name, 0)
    model.load_state_dict(torch.load(work / f"{name}.pt")["model"])
    return model.to(torch.bfloat16).eval().requires_grad_(False)


def generate(work: Path, rows: int, seed: int, batch_rows: int = 128) -> None:
    """Continue training prompts with the target: half the rows greedy, half sampled."""
    finished = [numpy.load(work / "generated.npy")] if (work / "generated.npy").exists() else []
    done = sum(map(len, finished)) // batch_rows
    tokens = numpy.load(work / "train.npy").astype(numpy.int64)
    model = trained_model(work, "target")
    model.set_attn_implementation("sdpa")
    temperature = torch.where(torch.arange(batch_rows) % 2 == 0, 0.0, 0.8)[:, None]
    for batch_index in range(done, -(-rows // batch_rows)):
        generator = numpy.random.default_rng([seed, 1, batch_index])
        torch.manual_seed(seed + batch_index)
        prompt_length = int(generator.integers(32, 97))
        starts = generator.integers(0, len(tokens) - prompt_length, batch_rows)
        output = torch.tensor(numpy.stack([tokens[s : s + prompt_length] for s in starts]))
        fresh, cache = output, None
        while output.shape[1] < GENERATED_LENGTH:
            with torch.no_grad():
                result = model(fresh, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, logits = result.past_key_values, result.logits[:, -1].float()
            noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
            fresh = (logits + temperature * noise).argmax(-1, keepdim=True)
            output = torch.cat((output, fresh), dim=1)
        finished.append(output.numpy().astype(numpy.uint16))
        numpy.save(work / "generated.partial.npy", numpy.concatenate(finished))
        os.replace(work / "generated.partial.npy", work / "generated.npy")
        print(f"{time.strftime('%H:%M:%S')} generated {(batch_index + 1) * batch_rows} rows", flush=True)


def train_draft(work: Path, steps: int, seed: int, compiled: bool) -> None:
    """Distil the target into the draft, half on the corpus and half on generated text."""
    tokens, generated = numpy.load(work / "train.npy"), numpy.load(work / "generated.npy")
    draft, target = new_model("draft", seed + 1), trained_model(work, "target")

    def batch_loss(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                wanted = target(input_ids=batch, use_cache=False).logits.float().flatten(0, 1)
            given = draft(input_ids=batch, use_cache=False).logits.float().flatten(0, 1)
        divergence = functional.kl_div(
            given.log_softmax(-1), wanted.log_softmax(-1), reduction="batchmean", log_target=True
        )
        return divergence + 0.25 * functional.cross_entropy(given, wanted.argmax(-1))

    def batches(step: int) -> list[torch.Tensor]:
        length, half = sequence_length(step, steps), TOKENS_PER_STEP // 2
        text = corpus_batch(tokens, step, length, half // length, seed)
        picked = corpus_batch(generated.reshape(-1), step, GENERATED_LENGTH, half // GENERATED_LENGTH, seed)
        parts = [*text.split(MICRO_BATCH_TOKENS // length)]
        return [*parts, *picked.split(MICRO_BATCH_TOKENS // GENERATED_LENGTH)]

    loss = torch.compile(batch_loss, dynamic=False) if compiled else batch_loss
    run_training(draft, work / "draft.pt", steps, batches, loss)


def export(work: Path, out: Path) -> None:
    """Write both model directories and the held-out record; each appears complete by a rename."""
    out.mkdir(parents=True, exist_ok=True)
    for name in SHAPES:
        incoming, retired = out / f".{name}.incoming", out / f".{name}.retired"
        shutil.rmtree(incoming, ignore_errors=True)
        trained_model(work, name).save_pretrained(incoming, max_shard_size="8MB")
        for part in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(work / "tokenizer" / part, incoming / part)
        for path in incoming.iterdir():
            path.chmod(0o644)
        if (out / name).exists():
            os.rename(out / name, retired)
        os.rename(incoming, out / name)
        shutil.rmtree(retired, ignore_errors=True)
    shutil.copyfile(work / "heldout.json", out / ".heldout.incoming")
    os.replace(out / ".heldout.incoming", out / "heldout.json")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--work-dir", type=Path, default=Path("build/train_pair"), help="checkpoints and caches")
    parser.add_argument("--out", type=Path, default=Path("trtrun/assets"), help="where the models are written")
    parser.add_argument("--stages", nargs="+", default=["data", "target", "generate", "draft", "export"])
    parser.add_argument("--evaluate", action="store_true", help="only measure the exported models")
    parser.add_argument("--prompts", type=int, default=40, help="held-out prompts to evaluate")
    parser.add_argument("--target-steps", type=int, default=880)
    parser.add_argument("--draft-steps", type=int, default=1400)
    parser.add_argument("--generated-rows", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> None:
    """Run the stages asked for, in order."""
    arguments = parse_arguments()
    work, seed = arguments.work_dir, arguments.seed
    torch.set_num_threads(arguments.threads)
    work.mkdir(parents=True, exist_ok=True)
    if arguments.evaluate:
        with torch.no_grad():
            evaluate(work, arguments.out, arguments.prompts)
        return
    stages: dict[str, Callable[[], None]] = {
        "data": lambda: prepare_data(work, seed),
        "target": lambda: train_target(work, arguments.target_steps, seed, arguments.compile),
        "generate": lambda: generate(work, arguments.generated_rows, seed),
        "draft": lambda: train_draft(work, arguments.draft_steps, seed, arguments.compile),
        "export": lambda: export(work, arguments.out),
    }
    for name in arguments.stages:
        stages[name]()


if __name__ == "__main__":
    main()
