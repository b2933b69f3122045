"""A whole checkpoint, quantized layer by layer: one layer's weights are in memory at a time, and the texts' hidden
states go from layer to layer.

Calibration texts go through the plain model. Held-out texts go through the plain model and the quantized one side by
side, so that perplexity before and after comes of one pass over the weights. It knows how a run goes, and that it may
go on where another one was killed. It does not know the command line.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trtrun.errors import CheckpointError
from trtrun.linear.quantization import QUANTIZATIONS
from trtrun.loading.weight_check import check_split
from trtrun.models.config import ModelConfig, read_model_config
from trtrun.models.decoder_plan import DecoderPlan
from trtrun.tensors import DTYPES, dtype_name, inference
from trtrun.tools.conversion.source import open_source
from trtrun.tools.conversion.writers import write_ranks
from trtrun.tools.quantizing.activations import Devices, Flow, lies_on_host, make_batches
from trtrun.tools.quantizing.directory import IDENTITY, QuantizedDirectory
from trtrun.tools.quantizing.layer_quantizer import LayerQuantizer, relative_error, round_figure
from trtrun.tools.quantizing.plain_layer import PlainLayer, known_plans, rms_norm
from trtrun.tools.quantizing.settings import QuantizingSettings
from trtrun.tools.quantizing.texts import CalibrationTexts
from trtrun.weights.model_files import hash_model_files
from trtrun.weights.rank_files import open_checkpoint, read_hugging_face_config
from trtrun.weights.weight import Share, StoredTensor

Progress = Callable[[int, int], None]

_MOST_NATS = 700.0
"""The largest loss of a token, so that perplexity is a number."""


@dataclass
class Flows:
    """Hidden states on their way.

    Attributes:
        samples: calibration texts in the plain model.
        plain: held-out texts in the plain model.
        quantized: the same with quantized weights.
        rounded: with rounded activations, too; None where the format does not round them.
    """

    samples: Flow
    plain: Flow
    quantized: Flow
    rounded: Flow | None


def identify(source: Path, settings: QuantizingSettings, texts: CalibrationTexts) -> dict[str, Any]:
    """What tells a run from others: settings, model and texts."""
    return {**asdict(settings), "model": hash_model_files(source), "texts": texts.digest}


class CheckpointQuantizer:
    """One run.

    Args:
        source: the model.
        output: the directory to make.
        settings: what it is quantized to.
        texts: to calibrate and to measure with.
        slots: devices, of one kind.

    Raises:
        TrtrunError: the model cannot be quantized so.
    """

    def __init__(
        self,
        source: Path,
        output: Path,
        settings: QuantizingSettings,
        texts: CalibrationTexts,
        slots: Sequence[torch.device],
    ) -> None:
        self._source, self._settings, self._texts = source, settings, texts
        self._config: ModelConfig = read_model_config(source)
        if self._config.quant_method is not None:
            raise CheckpointError(f"{source} is quantized already ({self._config.quant_method}): name the plain model")
        self._files = open_checkpoint(source)
        self._dtype = DTYPES[settings.dtype or self._config.checkpoint_dtype]
        of_activations = DTYPES[self._config.checkpoint_dtype] if slots[0].type == "cuda" else torch.float32
        numbers = self._config.hidden_size * of_activations.itemsize * sum(map(len, texts.samples))
        self._devices = Devices(tuple(slots), of_activations, lies_on_host(slots, numbers))
        longest = max((len(text) for text in (*texts.samples, *texts.held_out)), default=1)
        self._layers = LayerQuantizer(self._config, settings, self._devices, self._dtype, longest)
        of_layers = [weight.parts for plan in known_plans(self._config) for weight in plan.weights()]
        for part in (part for parts in (*self._ends(), *of_layers) for part in parts):
            self._files.check(part.name, part.shape)  # by the headers alone, before anything is computed
        self._output, self._is_converted = output, settings.layout == "trtllm"
        quantized = replace(self._config, quant_method=self._layers.config["quant_method"], stored=self._layers.stored)
        for rank in range(settings.tp_size):  # refused before anything is computed
            share = Share(rank, settings.tp_size)
            check_split(quantized, share, self._config.checkpoint_dtype, "cpu", QUANTIZATIONS.get("none"))
        self._identity = identify(source, settings, texts)
        self._directory = QuantizedDirectory(output, self.num_layers + 1, self._is_converted)

    @property
    def num_layers(self) -> int:
        """Number of the model's layers."""
        return len(self._config.layers)

    def begin(self, is_forced: bool) -> int:
        """Look at what is there already, and make the directory; returns the layers that are done.

        Args:
            is_forced: whether a checkpoint, or another run, may be lost.

        Raises:
            ConfigError: one would be.
        """
        self._directory.begin(self._identity, is_forced)
        return max(0, len(self._directory.read_lines()) - 1)

    @inference
    def run(self, progress: Progress, is_stopped: Callable[[], bool]) -> Mapping[str, Any] | None:
        """Do what is left.

        Args:
            progress: called with layers that are done, and all.
            is_stopped: asked before each layer.

        Returns:
            The summary; None where it was stopped.
        """
        started = time.monotonic()
        ends = self._read([part for weight in self._ends() for part in weight], self._dtype)
        if not self._directory.has_shard(0):
            line = {"part": "embedding, norm and head", "seconds": round(time.monotonic() - started, 3)}
            self._directory.write_shard(0, ends, line)
        flows = self._enter(ends[self._config.embedding.parts[0].name])
        for index, plan in enumerate(known_plans(self._config)):
            progress(index, self.num_layers)
            if is_stopped():
                return None
            self._do_layer(index, plan, flows)
        progress(self.num_layers, self.num_layers)
        summary = self._summarize(flows, ends)
        values = read_hugging_face_config(self._source)
        name = "torch_dtype" if "torch_dtype" in values else "dtype"
        values |= {name: dtype_name(self._dtype), "quantization_config": self._layers.config}
        num_bytes = self._directory.finish(self._source, values)
        if self._is_converted:
            source = open_source(self._directory.path, None)
            num_bytes = write_ranks(source, self._output, self._settings.tp_size, lambda done, total: None)
        summary["bytes_after"] = num_bytes
        self._directory.close(summary)
        return summary

    def _ends(self) -> list[tuple[StoredTensor, ...]]:
        """What is not in layers."""
        head = () if self._config.tie_word_embeddings else (self._config.head,)
        return [weight.parts for weight in (self._config.embedding, self._config.final_norm, *head)]

    def _read(self, parts: Sequence[StoredTensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Whole tensors of the source, in the first slot.

        Raises:
            CheckpointError: one is not finite.
        """
        found = {}
        for part in parts:
            place = torch.empty(part.shape, dtype=dtype, device=self._devices.slots[0])
            for row, piece in self._files.pieces(part.name, tuple(map(range, part.shape))):
                place[row : row + len(piece)] = piece.to(place.device)
            if not bool(place.isfinite().all()):
                raise CheckpointError(f"{self._files.file(part.name)}: '{part.name}' has numbers that are not finite")
            found[part.name] = place
        self._files.close()
        return found

    def _enter(self, embedding: Tensor) -> Flows:
        """Hidden states of all texts in front of the first layer."""

        def embed(texts: Sequence[tuple[int, ...]]) -> Flow:
            found = Flow(self._devices)
            for index, batch in enumerate(make_batches(texts)):
                slot = self._devices.slots[self._devices.slot(index)]
                rows = F.embedding(batch.to(embedding.device), embedding)
                found.append(rows.to(slot, self._devices.dtype))
            return found

        samples, plain = embed(self._texts.samples), embed(self._texts.held_out)
        return Flows(samples, plain, plain, plain if self._layers.rounds_activations else None)

    def _do_layer(self, index: int, plan: DecoderPlan, flows: Flows) -> None:
        """Quantize a layer, or read what an earlier run made of it, and move all texts behind it."""
        started = time.monotonic()
        is_done = self._directory.has_shard(index + 1)
        weights = self._read([part for weight in plan.weights() for part in weight.parts], torch.float32)
        if is_done:
            if len(flows.plain):
                self._pass(plan, weights, self._directory.read_shard(index + 1), flows)
            flows.samples = self._move(flows.samples, self._layers.plain(plan, weights))
            return
        made, flows.samples = self._layers.quantize(plan, weights, flows.samples)
        notes: dict[str, Any] = {"layer": index, **made.notes}
        if len(flows.plain):
            self._pass(plan, weights, made.tensors, flows)
            none = Flow(self._devices, [torch.zeros_like(flows.plain[at]) for at in range(len(flows.plain))])
            notes["held_out_error"] = relative_error(none, flows.plain, flows.quantized)
        notes["seconds"] = round(time.monotonic() - started, 3)
        self._directory.write_shard(index + 1, made.tensors, notes)

    def _pass(
        self, plan: DecoderPlan, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], flows: Flows
    ) -> None:
        """Held-out texts through the plain layer and the quantized one."""
        quantized = self._layers.quantized(plan, tensors)
        flows.plain = self._move(flows.plain, self._layers.plain(plan, weights))
        flows.quantized = self._move(flows.quantized, quantized)
        if flows.rounded is not None:
            flows.rounded = self._move(flows.rounded, self._layers.rounding(quantized, tensors))

    def _move(self, flow: Flow, layers: Sequence[PlainLayer]) -> Flow:
        return flow.map(lambda slot, x: layers[slot].forward(x))

    def _summarize(self, flows: Flows, ends: Mapping[str, Tensor]) -> dict[str, Any]:
        """The last line of the report."""
        lines = self._directory.read_lines()
        summary: dict[str, Any] = {
            "format": self._settings.format,
            "kv_cache": self._settings.kv_cache,
            "samples": len(self._texts.samples),
            "tokens": sum(map(len, self._texts.samples)),
            "held_out_texts": len(self._texts.held_out),
            "held_out_tokens": sum(map(len, self._texts.held_out)),
            IDENTITY: self._identity,
        }
        few = sum(len(line.get("rounded_to_nearest", ())) for line in lines)
        summary |= {"rounded_to_nearest": few} if few else {}
        if len(flows.plain):
            summary["perplexity_before"] = self._perplexity(flows.plain, ends)
            summary["perplexity_after"] = self._perplexity(flows.quantized, ends)
            if flows.rounded is not None:
                summary["perplexity_with_rounded_activations"] = self._perplexity(flows.rounded, ends)
        summary["bytes_before"] = sum(file.stat().st_size for file in self._files.list_files())
        summary["seconds"] = round(sum(line["seconds"] for line in lines), 3)
        return summary

    def _perplexity(self, flow: Flow, ends: Mapping[str, Tensor]) -> float:
        """exp of the mean negative log likelihood of each token but the first of each held-out text."""
        names = (self._config.final_norm.parts[0].name, self._config.head.parts[0].name)
        norm, head = (ends[name].to(self._devices.dtype) for name in names)
        total, count = 0.0, 0
        for index, tokens in enumerate(make_batches(self._texts.held_out)):
            hidden = rms_norm(flow[index].to(norm.device), norm, self._config.rms_norm_eps)
            for row, text in zip(hidden, tokens.to(norm.device), strict=True):
                logits = F.linear(row[:-1], head).float()
                total += float(F.cross_entropy(logits, text[1:], reduction="sum"))
                count += len(text) - 1
        return round_figure(math.exp(min(total / count, _MOST_NATS)))
