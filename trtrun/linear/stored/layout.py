"""Linear layers of quantized checkpoints: read in the files' layout, brought into one of a few forms, and held.

A layout (byte_layouts.py and others here) says which tensors a matrix is stored in and which form they make. What that
form is held in is the same for all: on GPUs E4M3 codes with a scale for each output feature go as they are to the
products of trtrun.linear.quantization.quantizations, those with a scale for each block to that of fp8_block there, and
codes of 4 bits in groups to that of int4; everything else becomes dense as it is read. It does not know configurations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from typing_extensions import override

from trtrun.errors import CheckpointError
from trtrun.linear.quantization.base import (
    QUANTIZATIONS,
    LinearWeight,
    Product,
    Quantization,
    Tensors,
    TensorSlice,
    TensorSpec,
    WeightSource,
)
from trtrun.linear.quantization.quantizations import (
    BLOCK,
    FEATURES,
    INPUTS,
    Fp4,
    Int4,
    has_expert_codes,
    has_fp8_products,
    has_int4_products,
    int4_group,
)
from trtrun.linear.stored.pieces import Piece, pieces_of

if TYPE_CHECKING:
    import torch

    from trtrun.linear.stored.forms import StoredForm

Codes = Literal["fp8", "fp8_block", "mxfp4", "nvfp4"] | int
"""What GPUs hold as it is: an Fp8Weight without blocks, or in blocks of 128 by 128; experts' Fp4Weight with powers of
two, or with scales in E4M3; or a PackedWeight of 4 bits, then how many columns have a scale of their own."""

_FP4_BLOCKS = {"mxfp4": 32, "nvfp4": 16}


class Layout(Protocol):
    """How one matrix is stored. Hashable; layouts that are equal make layers that can be multiplied with as one.

    Attributes:
        name: of the format, for messages.
        rounds_activations: whether the checkpoint was made for activations that are rounded to E4M3, too.
    """

    @property
    def name(self) -> str: ...

    @property
    def rounds_activations(self) -> bool: ...

    def codes(self, part: TensorSlice) -> Codes | None:
        """What the form of a slice of a matrix is, of what GPUs hold as it is; None where it becomes dense."""
        ...

    def slices(self, part: TensorSlice) -> Mapping[str, TensorSlice]:
        """What is read for a slice of the matrix that the architecture knows as `part`.name, whose name ends in
        ".weight": by the end of the stored tensor's name.

        Raises:
            CheckpointError: the tensors cannot be cut there.
        """
        ...

    def form(self, part: TensorSlice, tensors: Mapping[str, torch.Tensor]) -> StoredForm:
        """The slice, of what was read for it: `slices`, but for what is optional and not there.

        Raises:
            CheckpointError: the tensors contradict each other.
        """
        ...


@dataclass(frozen=True)
class StoredLinear(Quantization):
    """Linear layers whose weights are stored in a layout; see `Quantization`.

    Attributes:
        layout: of the files.
        becomes_dense: whether ranks hold them dense in any case.
    """

    layout: Layout
    becomes_dense: bool = False

    takes_head = True
    fits_targets = True
    fits_experts = True

    @property
    def rounds_activations(self) -> bool:
        return self.layout.rounds_activations

    def check(self, dtype: str, device_type: str) -> None:
        """Any dtype on any device."""

    def can_keep(self, dtype: torch.dtype, device_type: str) -> bool:
        """Whether codes are multiplied as they are with activations of `dtype` on a type of device."""
        return device_type == "cuda" and dtype.itemsize == 2 and not self.becomes_dense

    def codes(self, weight: LinearWeight, dtype: torch.dtype, device_type: str) -> Codes | None:
        """What a layer holds as the files do; None where its weight becomes dense."""
        if not self.can_keep(dtype, device_type):
            return None
        pieces = [piece for piece in pieces_of(weight.parts) if piece.rows]
        found = {self.layout.codes(piece.part) for piece in pieces}
        (codes,) = found if len(found) == 1 else (None,)
        if weight.use == "expert":
            is_kept = has_fp8_products(device_type) if codes in ("fp8", "fp8_block") else has_expert_codes(device_type)
            return codes if is_kept and (codes != "fp8_block" or _why_cut(pieces) is None) else None
        if isinstance(codes, int) and (
            any(piece.rows % FEATURES for piece in pieces)
            or weight.shape[0] % FEATURES
            or not has_int4_products(device_type)
        ):
            return None
        if codes in _FP4_BLOCKS:
            return None
        if codes == "fp8_block" and not (has_fp8_products(device_type) and _why_cut(pieces) is None):
            return None
        return codes

    def why_dense(self, weight: LinearWeight, dtype: torch.dtype, device_type: str) -> str | None:
        """Say in words what keeps a rank from holding a weight as others of its format; None where it is nothing of the
        weight's own."""
        pieces = [piece for piece in pieces_of(weight.parts) if piece.rows]
        is_kept = self.can_keep(dtype, device_type) and {self.layout.codes(it.part) for it in pieces} == {"fp8_block"}
        return _why_cut(pieces) if is_kept else None

    def _held(self, weight: LinearWeight, dtype: torch.dtype, device_type: str) -> Quantization:
        codes = self.codes(weight, dtype, device_type)
        if codes is None:
            return QUANTIZATIONS.get("none")
        if isinstance(codes, int):
            return Int4(codes, is_expert=weight.use == "expert")
        if codes in _FP4_BLOCKS:
            return Fp4(_FP4_BLOCKS[codes])
        return self._held_codes(in_blocks=codes == "fp8_block")

    def _held_codes(self, *, in_blocks: bool) -> Quantization:
        if in_blocks:
            return QUANTIZATIONS.get("fp8_block")
        return QUANTIZATIONS.get("fp8" if self.layout.rounds_activations else "fp8_weight_only")

    @override
    def keeps_dense(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Answer for weights that become dense, as some may."""
        return QUANTIZATIONS.get("none").keeps_dense(dtype, device)

    @override
    def stored(self, weight: LinearWeight) -> Sequence[TensorSlice]:
        return [stored for piece in pieces_of(weight.parts) for stored in self.layout.slices(piece.part).values()]

    @override
    def create(self, weight: LinearWeight, dtype: torch.dtype, device_type: str) -> Mapping[str, TensorSpec]:
        return self._held(weight, dtype, device_type).create(weight, dtype, device_type)

    @override
    def working_bytes(self, weight: LinearWeight, rows: int, dtype: torch.dtype, device_type: str) -> int:
        return self._held(weight, dtype, device_type).working_bytes(weight, rows, dtype, device_type)

    @override
    def load(self, source: WeightSource) -> Tensors:
        if source.is_dummy:
            return self._held(source.weight, source.dtype, source.device_type).load(source)
        codes = self.codes(source.weight, source.dtype, source.device_type)
        if codes is None:
            return self._load_dense(source)
        if isinstance(codes, int):
            return self._load_groups(source, codes)
        if codes in _FP4_BLOCKS:
            return self._load_fp4(source, _FP4_BLOCKS[codes])
        return self._load_blocks(source) if codes == "fp8_block" else self._load_codes(source)

    @override
    def apply(self, tensors: Tensors, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        held = QUANTIZATIONS.get("none")
        if "words" in tensors:
            held = Int4(INPUTS)
        elif "codes" in tensors:
            held = self._held_codes(in_blocks="block_scale" in tensors)
        return held.apply(tensors, bias, batch_invariant=batch_invariant)

    def _read(self, source: WeightSource, part: TensorSlice) -> StoredForm:
        slices = self.layout.slices(part)
        found = {end: source.read(it) for end, it in slices.items() if not it.is_optional or source.has(it)}
        form = self.layout.form(part, found)
        if form.shape != tuple(map(len, part.ranges)):
            raise CheckpointError(f"'{part.name}' has {list(form.shape)} numbers, not {list(map(len, part.ranges))}")
        return form

    def _read_all(self, source: WeightSource) -> Iterator[tuple[Piece, StoredForm, torch.Tensor | None]]:
        """What is read together, in the order of the rank, and the places in it of the rows that the rank holds."""
        for piece in pieces_of(source.weight.parts):
            if piece.rows:
                yield piece, self._read(source, piece.part), piece.index(source.device)

    def _load_dense(self, source: WeightSource) -> Tensors:
        """Piece by piece, each with its own scales."""
        from trtrun.tensors import numbers_at_a_time

        destination, row = source.allocate(), 0
        step = max(1, numbers_at_a_time(destination.device) // source.weight.shape[1])
        for piece, form, order in self._read_all(source):
            for start in range(0, piece.rows, step):
                stop = min(start + step, piece.rows)
                picked = form.dequantize(_some(order, start, stop))
                source.put(piece.part.name, destination[row + start : row + stop], picked)
            row += piece.rows
        destination[row:].zero_()  # vocabulary padding
        return {"weight": destination}

    def _load_fp4(self, source: WeightSource, size: int) -> Tensors:
        """Each part has a factor of its own; what is multiplied as one lies in the order that kernels read it in."""
        import torch

        from trtrun.kernels.torch import fp4
        from trtrun.linear.stored.forms import Fp4Weight

        codes, blocks, factors = [], [], []
        for piece, form, order in self._read_all(source):
            assert isinstance(form, Fp4Weight)
            if not bool(form.scale.isfinite().all()):
                raise CheckpointError(f"'{piece.part.name}' has scales that stand for no number")
            rows = _some(order, 0, piece.rows)
            codes.append(form.unpacked(rows))
            blocks.append(form.blocks[rows])
            factors.append(torch.ones_like(form.scale[rows, 0]) * (1.0 if form.whole is None else form.whole))
        return fp4.pack(torch.cat(codes), torch.cat(blocks), torch.cat(factors), size)

    def _load_codes(self, source: WeightSource) -> Tensors:
        """Load codes as they are; the scale of a whole tensor becomes that of each of its output features."""
        import torch

        from trtrun.linear.stored.forms import Fp8Weight

        features, inputs = source.weight.shape
        codes = torch.zeros((features, inputs), dtype=torch.float8_e4m3fn, device=source.device)
        scale = torch.ones(features, dtype=torch.float32, device=source.device)
        row = 0
        for piece, form, order in self._read_all(source):
            assert isinstance(form, Fp8Weight)
            rows, held = _some(order, 0, piece.rows), slice(row, row + piece.rows)
            codes[held], scale[held] = form.codes[rows], form.channel_scale()[rows]
            row += piece.rows
        return {"codes": codes, "scale": scale}

    def _load_blocks(self, source: WeightSource) -> Tensors:
        """Load codes as they are, with the parts' blocks one behind the other."""
        import torch

        from trtrun.linear.stored.forms import Fp8Weight

        held = QUANTIZATIONS.get("fp8_block").create(source.weight, source.dtype, source.device_type)
        codes = torch.zeros(held["codes"].shape, dtype=torch.float8_e4m3fn, device=source.device)
        scale = torch.ones(held["block_scale"].shape, dtype=torch.float32, device=source.device)
        row = 0
        for piece, form, order in self._read_all(source):
            assert isinstance(form, Fp8Weight)
            codes[row : row + piece.rows] = form.codes[_some(order, 0, piece.rows)]
            scales = form.scale if order is None else form.scale[order[::BLOCK] // BLOCK]
            scale[row // BLOCK : row // BLOCK + len(scales)] = scales
            row += piece.rows
        return {"codes": codes, "block_scale": scale}

    def _load_groups(self, source: WeightSource, size: int) -> Tensors:
        """Some features at a time, in the order that kernels read them. Scales become the dtype of activations."""
        import torch

        from trtrun.kernels.torch.integers import pack
        from trtrun.linear.stored.forms import PackedWeight
        from trtrun.tensors import numbers_at_a_time

        form_of_words = Int4(size, is_expert=source.weight.use == "expert")
        held = form_of_words.create(source.weight, source.dtype, source.device_type)
        made = {name: torch.zeros(it.shape, dtype=it.dtype, device=source.device) for name, it in held.items()}
        step = max(FEATURES, numbers_at_a_time(source.device) // source.weight.shape[1] // FEATURES * FEATURES)
        row = 0
        for piece, form, order in self._read_all(source):
            assert isinstance(form, PackedWeight)
            for start in range(0, piece.rows, step):
                codes, scale, zero = form.grouped(_some(order, start, min(start + step, piece.rows)), size)
                tile = (row + start) // FEATURES
                held_scale = torch.empty(scale.shape, dtype=source.dtype, device=source.device)
                source.put(piece.part.name, held_scale, scale)
                for name, values in pack(codes, held_scale, zero, form_of_words.step).items():
                    made[name][tile : tile + len(values)] = values
            row += piece.rows
        return made


def _some(order: torch.Tensor | None, start: int, stop: int) -> slice | torch.Tensor:
    """Where rows `start` to `stop` of a rank lie in what was read."""
    return slice(start, stop) if order is None else order[start:stop]


def _why_cut(pieces: Sequence[Piece]) -> str | None:
    """Say in words why an output feature of what is multiplied with as one would share its blocks with features of
    other scales; None where none does."""
    if any(piece.moves_parts_of_blocks for piece in pieces):
        return f"heads are held in another order than in the files, in parts that are not whole blocks of {BLOCK}"
    rows = next((piece.rows for piece in pieces[:-1] if piece.rows % BLOCK), None)
    return None if rows is None else f"{rows} output features beside others are not whole blocks of {BLOCK}"


def codes_of_groups(part: TensorSlice, bits: int, group_size: int | None) -> Codes | None:
    """`Layout.codes` of codes in groups of so many columns, one behind the other; None where all are one group."""
    features, inputs = map(len, part.ranges)
    fits = bits == 4 and not features % FEATURES and not inputs % INPUTS
    return int4_group(group_size or inputs) if fits else None


def stored_as(part: TensorSlice, end: str) -> str:
    """Name of a stored tensor of a matrix: "…down_proj.weight", "qweight" → "…down_proj.qweight"."""
    return part.name.removesuffix("weight") + end


class CutError(CheckpointError):
    """A rank's slice of a matrix ends within what shares a scale or a word."""


def cut_groups(part: TensorSlice, axis: int, size: int) -> range:
    """Groups of `size` numbers that a slice takes of an axis of a matrix, 0 for `out` and 1 for `in`: whole ones, or a
    piece of one.

    Raises:
        CutError: it ends within one.
    """
    whole, held = part.shape[axis], part.ranges[axis]
    share = len(held)
    are_whole = not held.start % size and (held.stop == whole or not held.stop % size)
    if not are_whole and (size % share or held.start % share):
        raise _cannot_be_cut(part, axis, f"groups of {size} share a scale")
    return range(held.start // size, -(-held.stop // size))


def cut_words(part: TensorSlice, axis: int, places: int) -> range:
    """Cut as `cut_groups` does, but words that hold `places` numbers each and are never cut.

    Raises:
        CutError: the slice ends within one.
        CheckpointError: the axis does.
    """
    whole, held = part.shape[axis], part.ranges[axis]
    if whole % places:
        raise CheckpointError(
            f"{part.name}: {whole} {_FEATURES[axis]} are not a multiple of {places}, as {places} lie in one word"
        )
    if held.start % places or held.stop % places:
        raise _cannot_be_cut(part, axis, f"{places} lie in one word")
    return range(held.start // places, held.stop // places)


_FEATURES = ("output features", "input features")


def _cannot_be_cut(part: TensorSlice, axis: int, reason: str) -> CutError:
    whole, share = part.shape[axis], len(part.ranges[axis])
    return CutError(
        f"tensor parallelism: {share} of {whole} {_FEATURES[axis]} of {part.name} would lie on a device, but {reason}: "
        "use fewer devices"
    )
