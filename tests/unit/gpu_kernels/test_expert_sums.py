"""What experts made of a token, added up in the kernel of the next norm: the bits of two kernels. On a GPU where there
is one, else in Triton's interpreter, which has no bfloat16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import last_line
from family_checkpoints import write_family
from native import leave_to_torch
from paged import PagedModel
from pipelines import prompt_of

from parallel.transports.solo import SoloCommunicator
from trtrun.kernels import chooser
from trtrun.kernels.arguments import Activations, Delta, ExpertSums
from trtrun.kernels.torch.experts import Choice, Experts, choose_experts
from trtrun.layers import decoder_layer, experts
from trtrun.layers.decoder_layer import DecoderLayer, RMSNorm, RowParallelLinear, add_to
from trtrun.layers.experts import ExpertsMLP, SharedExpert, SummedExperts

pytest.importorskip("triton", reason="needs triton: pip install triton")
HAS_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if HAS_GPU else ("cpu", torch.float16)
SHAPES = [(1, 3, 40), (5, 8, 96), (2, 9, 130), (3, 1, 257)]
"""Tokens, experts of each, and hidden."""
if HAS_GPU:
    SHAPES += [(1, 8, 2048), (160, 8, 2048), (33, 9, 2048), (7, 4, 2880), (40, 9, 7168), (512, 6, 4096)]


def made(tokens: int, chosen: int, hidden: int) -> tuple[torch.Tensor, ExpertSums, torch.Tensor]:
    """A residual stream, what experts made, of which the first two cancel out, and the weight of a norm."""
    torch.manual_seed(tokens * hidden)
    sums = ExpertSums(
        torch.randn(tokens, chosen, hidden, device=DEVICE).to(DTYPE), torch.rand(tokens, chosen, device=DEVICE)
    )
    if chosen > 2:
        sums.made[:, 0] *= 1e4
        sums.made[:, 1] = -sums.made[:, 0]
        sums.made[:, 2:] *= 0.01
        sums.shares[:, 1] = sums.shares[:, 0]
    return torch.randn(tokens, hidden, device=DEVICE).to(DTYPE), sums, torch.randn(hidden, device=DEVICE).to(DTYPE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_norm_adds_up_as_a_kernel_of_its_own_does(shape: tuple[int, int, int]) -> None:
    from trtrun.kernels.triton.expert_sums import add_up
    from trtrun.kernels.triton.fused import add_and_normalise, add_and_normalise_rounded

    hidden, sums, weight = made(*shape)
    added = add_up(sums)
    total = torch.zeros_like(hidden, dtype=torch.float32)
    for part, share in zip(sums.made.double().unbind(1), sums.shares.double().unbind(1), strict=True):
        total = (part * share.unsqueeze(1) + total).float()
    assert torch.equal(added, total.to(DTYPE)), "in the order of places"
    streams = [hidden.clone() for _ in range(6)]
    for scale in (weight, weight.float()):
        expected = add_and_normalise(streams[0].copy_(hidden), added, scale, 1e-6)
        found = add_and_normalise(streams[1].copy_(hidden), sums, scale, 1e-6)
        assert torch.equal(found, expected) and torch.equal(streams[0], streams[1])
        assert not torch.equal(streams[1], hidden)
    for place, rounding in ((2, "row"), (4, "group")):
        codes = [
            add_and_normalise_rounded(streams[place + it], delta, weight, 1e-6, rounding)  # type: ignore[arg-type]
            for it, delta in enumerate((added, sums))
        ]
        assert torch.equal(*(it.codes[:, : shape[2]].float() for it in codes))
        assert torch.equal(codes[0].scale, codes[1].scale) and torch.equal(*streams[place : place + 2])
    last = ExpertSums(sums.made[-1:].clone(), sums.shares[-1:].clone())
    alone = add_and_normalise(hidden[-1:].clone(), last, weight, 1e-6)
    assert torch.equal(alone, add_and_normalise(hidden, sums, weight, 1e-6)[-1:])


class _Half:
    """In place of a linear layer."""

    def leave(self, attended: torch.Tensor) -> torch.Tensor:
        return attended * 0.5

    __call__ = leave


class _Mixer:
    """In place of attention: the norm as it is."""

    output = _Half()

    takes_rounded_rows = None
    output = RowParallelLinear(lambda attended: attended * 0.5, None, SoloCommunicator())  # type: ignore[arg-type]

    def __call__(self, x: Activations, *others: Any) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return x


class _Pair:
    """A communicator of two ranks which make the same."""

    peer_rows = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_of_what_has_no_share_nothing_is_added() -> None:
    """As of padding, for which experts make nothing, so that any number may stand there."""
    from trtrun.kernels.triton.expert_sums import add_up
    from trtrun.kernels.triton.fused import add_and_normalise

    hidden, sums, weight = made(6, 3, 40)
    expected, stream = add_up(sums), hidden.clone()
    normed = add_and_normalise(stream, sums, weight, 1e-6)
    for token, number in ((1, "nan"), (4, "inf")):
        sums.made[token], sums.shares[token] = float(number), 0.0
        expected[token] = 0.0
        own = hidden[token : token + 1].clone()
        normed[token] = add_and_normalise(own, torch.zeros_like(own), weight, 1e-6)[0]
    assert torch.equal(add_up(sums), expected)
    assert torch.equal(add_and_normalise(hidden, sums, weight, 1e-6), normed)


def layer_of(kind: str, count: int = 6, hidden: int = 64, features: int = 32) -> DecoderLayer:
    """A layer with experts by Triton's kernels."""
    from trtrun.kernels.triton.experts import TritonExperts

    gate_up = torch.randn(count, 2 * features, hidden, device=DEVICE).mul_(hidden**-0.5).to(DTYPE)
    down = torch.randn(count, hidden, features, device=DEVICE).mul_(features**-0.5).to(DTYPE)
    router = torch.randn(count, hidden, device=DEVICE).to(DTYPE)
    norms = [RMSNorm(torch.rand(hidden, device=DEVICE).to(DTYPE), 1e-6) for _ in range(3)]
    held = TritonExperts((gate_up, down), (None, None), "silu", 1.0)

    def choose(logits: torch.Tensor, *, positions: torch.Tensor | None = None) -> Choice:
        return choose_experts(logits, 3, renormalises=True, positions=positions)

    mlp = ExpertsMLP(
        lambda x: x @ router.T, choose,
        SummedExperts(held, _Pair()) if kind == "of two ranks" else held,  # type: ignore[arg-type]
        SharedExpert(_Mixer(), None) if kind == "beside one of all tokens" else None,  # type: ignore[arg-type]
    )  # fmt: skip
    behind = norms[2] if kind == "in front of a norm" else None
    factor = 0.5 if kind == "with a factor" else 1.0
    return DecoderLayer(norms[0], _Mixer(), norms[1], mlp, None, behind, factor)  # type: ignore[arg-type]


KINDS = ["alone", "of two ranks", "beside one of all tokens", "in front of a norm", "with a factor", "of many tokens"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_leaves_what_experts_made_to_the_next_norm(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing stands between, and with the bits of a layer that adds it up."""
    from trtrun.kernels.triton import experts as kernels
    from trtrun.kernels.triton.operations import TritonOperations

    for module in (decoder_layer, chooser, experts):
        monkeypatch.setattr(module, "operations_of", lambda device_type: TritonOperations())
    torch.manual_seed(3)
    layers = [layer_of(kind) for _ in range(2)]
    stream = torch.randn(5, 64, device=DEVICE).to(DTYPE)

    def run() -> tuple[list[torch.Tensor], list[bool]]:
        hidden, delta, seen, left = stream.clone(), None, [], []
        for layer in layers:
            attended = layer.attend(hidden, delta, None, None)  # type: ignore[arg-type]
            delta: Delta = layer.feed_forward(hidden, attended)
            left.append(isinstance(delta, ExpertSums))
            seen += [attended, hidden.clone()]
        normed = layers[0].input_norm.add(hidden.clone(), delta)  # type: ignore[union-attr]
        return [*seen, normed, add_to(hidden, delta)], left

    monkeypatch.setattr(kernels, "_MOST_LEFT", 4 if kind == "of many tokens" else 5)
    found, left = run()
    assert left == [kind == "alone"] * 2
    monkeypatch.setattr(kernels, "_MOST_LEFT", 0)
    expected, left = run()
    assert left == [False] * 2
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all() and torch.equal(one, other)


@pytest.mark.skipif(HAS_GPU, reason="needs a machine without a GPU")
@pytest.mark.usefixtures("sums_without_order")
def test_a_model_whose_norms_add_up_is_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to its final norm, in any chunks, and with all that lies at a layer's end."""
    from trtrun.kernels.triton import experts as kernels
    from trtrun.kernels.triton.operations import TritonOperations

    class Operations(TritonOperations):
        """With GPUs' experts on the CPU; a product of units is its weight."""

        def host_experts(self, gate_up: Any, down: Any, activate: Any) -> Experts:
            def weights(products: Any, inputs: int) -> torch.Tensor:
                return torch.stack([one(torch.eye(inputs, dtype=DTYPE)).T for one in products]).contiguous()

            both = weights(gate_up, 64), weights(down, 32)
            return kernels.TritonExperts(both, (None, None), "silu", 1.0)

    leave_to_torch(monkeypatch)
    for module in (decoder_layer, chooser, experts):
        monkeypatch.setattr(module, "operations_of", lambda device_type: Operations())
    added, add_up = [], kernels.add_up
    monkeypatch.setattr(kernels, "add_up", lambda sums: (added.append(len(sums.made)), add_up(sums))[1])
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "mlp_only_layers": []}
    model = PagedModel(write_family(tmp_path, "qwen3_moe", **sizes), DTYPE)
    text = prompt_of(9, seed=1)
    found = model.forward([[(0, 0, text)]])
    assert found.isfinite().all() and not added
    parts = [model.forward([[(1, at, text[at : at + 4])]]) for at in range(0, 9, 4)]
    assert torch.equal(torch.cat(parts), found)
    monkeypatch.setattr(kernels, "_MOST_LEFT", 0)
    assert torch.equal(model.forward([[(2, 0, text)]]), found)
    assert added == [9, 9]


COMPILE = """
import json, re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from trtrun.kernels.triton import expert_choice, experts, fused

def compiled(kernel, constants, kinds, num_warps):
    names = list(kernel.arg_names)
    source = ASTSource(
        fn=kernel,
        signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name, kind in kinds.items() if kind != "fp32"},
    )
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, "launch_pdl": True}).asm

def norm(size, chosen, rounds):
    kinds = dict.fromkeys(("hidden", "delta", "weight"), "*bf16")
    kinds |= {"shares": "*fp32", "output": "*fp8e4nv" if rounds else "*bf16", "scales": "*fp32", "epsilon": "fp32"}
    kinds |= dict.fromkeys(("hidden_stride", "output_stride", "scale_stride"), "i32")
    padded = 1 << (size - 1).bit_length()
    sizes = {"SIZE": size, "PADDED": padded, "ADDS": True, "CHOSEN": chosen, "ROUNDS": rounds, "EARLY": True}
    asm = compiled(fused._add_and_normalise_kernel, sizes, kinds, 4 if size <= 4096 else 8)
    layouts = dict(re.findall(r"(#blocked\\d*) = (.*)", asm["ttgir"]))
    operand = re.findall(r"\\}\\) : \\(tensor<\\d+xf32, (#\\w+)>\\)", asm["ttgir"])
    operations = {name: len(re.findall(rf"\\b{name}(?:\\.rn)?\\.f32\\b", asm["ptx"])) for name in ("fma", "add", "mul")}
    instructions = asm["ptx"].replace("\\n", " ")
    waits = instructions.index("griddepcontrol.wait")
    early = [len(re.findall(r"ld\\.global", part)) for part in (instructions[:waits], instructions[waits:])]
    return {"layouts": [layouts[it] for it in operand], "operations": operations, "loads": early}

def choice(count, chosen, kind, packed, sigmoid):
    kinds = {"logits": kind, "bias": "*fp32", "experts": "*i64", "shares": "*fp32", "factor": "fp32"}
    kinds |= {"num_experts": "i32", "stride": "i32"}
    sizes = {"CHOSEN": chosen, "SHARED": 0, "IS_GATED": False, "PLACES": chosen, "RENORMALISES": True, "PADDED": count}
    sizes |= {"IS_SIGMOID": sigmoid, "HAS_BIAS": sigmoid, "OF_GROUP": count, "GROUPS": 1, "CHOSEN_GROUPS": 1}
    sizes |= {"SUMMED": 1, "PADDED_GROUPS": 1, "LEAST": 1e-20, "IS_PACKED": packed, "EARLY": True}
    asm = compiled(expert_choice._choose_kernel, sizes, kinds, 1)
    return [asm["ptx"].count(name) for name in ("redux.sync", "shfl.sync", "bar.sync")]

def product(kernel, more):
    tile = experts.TILES[16][1]
    kinds = dict.fromkeys(("x", "weight", "bias", "output"), "*bf16") | {"pairs": "*i64", "experts": "*i64"}
    kinds |= dict.fromkeys(("features", "inputs", "num_experts") if "LINES" in more else ("features", "inputs"), "i32")
    sizes = {"CHOSEN": 1, "ROWS": 16, "FEATURES": tile.features, "INPUTS": tile.inputs, "IS_EVEN": True}
    sizes |= {"HAS_BIAS": False, "STAGES": tile.num_stages, "EARLY": True} | more
    asm = compiled(kernel, sizes, kinds, tile.num_warps)
    return re.findall(r"griddepcontrol\\.\\w+|prefetch\\.global\\.L2|ld\\.global\\.cg|mma", asm["ptx"])

print(json.dumps({
    "gates": product(experts._gate_up_kernel, {"GATE": 0, "LIMIT": 1.0}),
    "product": product(experts._product_kernel, {"LINES": 4}),
    "norms": [[norm(size, chosen, rounds) for chosen in (0, 8)]
              for size, rounds in ((2048, 0), (2880, 0), (7168, 0), (2048, 1), (7168, 2))],
    "choices": [choice(128, 8, "*bf16", True, False), choice(256, 8, "*fp32", False, True)],
}))
"""


def test_it_compiles_for_hopper_with_the_same_order_of_sums(tmp_path: Path) -> None:
    """The mean of squares is added up in the layout of the norm without sums, by as many operations; of what is added
    up each number is one that rounds once. Weights are asked for before the kernel waits, and a choice is found by
    instructions of a warp, but for the sum of softmax and its largest number. The product behind gates asks for
    weights before it waits; both let the next kernel begin when they have waited."""
    line = last_line(COMPILE, tmp_path)
    found = json.loads(line)
    for (plain, summing), size in zip(found["norms"], (2048, 4096, 8192, 2048, 8192), strict=True):
        assert plain["layouts"] and plain["layouts"] == summing["layouts"]
        of_thread = size // (32 * (4 if size <= 4096 else 8))
        assert summing["operations"] == plain["operations"] | {"fma": plain["operations"]["fma"] + 8 * of_thread}
        assert plain["loads"][0] == summing["loads"][0] == of_thread // 8
    asked, until = found["product"], found["product"].index("griddepcontrol.wait")
    assert asked[0] == "ld.global.cg" and set(asked[1:until]) == {"prefetch.global.L2"}
    for behind in (found["gates"], asked[until:]):
        assert behind[0] == "griddepcontrol.wait" and set(behind[1:]) == {"mma", "griddepcontrol.launch_dependents"}
        assert behind.count("griddepcontrol.launch_dependents") == 1
    assert found["choices"] == [[16, 10, 0], [24, 0, 0]]
