"""A feed-forward layer of experts: a router chooses some of them for each token, and their results are added up by its
shares. An expert that all tokens go through may stand beside, or a feed-forward layer between norms of its own.

Ranks share out the features of each expert, or the experts. It knows activations and the communicator. It does not know
which layer it is, or how experts are held.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional
from typing_extensions import override

from parallel.communicator import Communicator
from parallel.sharding import expert_range
from trtrun.environment import CPU_LIMIT
from trtrun.errors import ConfigError
from trtrun.kernels.arguments import Activations, Delta, Rounding
from trtrun.kernels.chooser import operations_of
from trtrun.kernels.torch.experts import Choice, Choose, Experts
from trtrun.layers.decoder_layer import MLP, RMSNorm, sum_of_ranks


class SharedExpert:
    """An expert of all tokens.

    Args:
        mlp: it, with all that its ranks have to do.
        gate: hidden to one number, whose sigmoid its result is multiplied by; None for none.
    """

    def __init__(self, mlp: MLP, gate: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        self._mlp, self._gate = mlp, gate

    def add_to(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`output`, to which is added what comes of x; both [tokens, hidden], equal on all ranks."""
        result = self._mlp(x)
        if self._gate is None:
            return output.add_(result)
        return operations_of(x.device.type).add_gated(output, result, self._gate(x))


class SummedExperts:
    """Experts of which each rank holds some features: ranks add up what they make.

    Args:
        experts: this rank's features of all experts.
        communicator: of the tensor-parallel group.
    """

    def __init__(self, experts: Experts, communicator: Communicator) -> None:
        self._experts, self._communicator = experts, communicator

    def __call__(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        """x [tokens, hidden] → [tokens, hidden], equal on all ranks."""
        return self._communicator.all_reduce(self._experts(x, choice))

    def leave(self, x: torch.Tensor, choice: Choice) -> Delta:
        """x [tokens, hidden] → what is left to add to the residual stream, which the next norm may sum itself."""
        return sum_of_ranks(self._experts(x, choice), self._communicator)


class ExchangedExperts:
    """Experts of which each rank holds some, whole.

    All ranks have all tokens, so that each computes those that chose its experts. Rank r then gets column share r of
    what was made, adds up each token's experts in the order in which it chose them, as one rank alone does, and the
    shares are gathered. So the result has the bits of experts that are not cut.

    On CPUs the host knows the choice, and only what was made travels. On GPUs nothing is read back: there is room for
    all pairs of a token and an expert from each rank.

    Args:
        experts: those of this rank, as `expert_range` has them.
        num_experts: on all ranks.
        communicator: of the tensor-parallel group.
    """

    def __init__(self, experts: Experts, num_experts: int, communicator: Communicator) -> None:
        self._experts, self._communicator = experts, communicator
        experts.num_holders = communicator.size
        ranges = [expert_range(num_experts, rank, communicator.size) for rank in range(communicator.size)]
        owners = [rank for rank, held in enumerate(ranges) for _ in held]
        self._owners = torch.tensor(owners, device=communicator.device)
        self._first = ranges[communicator.rank].start
        self._packs = communicator.device.type == "cpu"
        self._is_checked = not self._packs

    def __call__(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        """x [tokens, hidden] → [tokens, hidden], equal on all ranks.

        Raises:
            ConfigError: ranks on CPUs compute with different kernels.
        """
        if not self._is_checked:
            self._check_processors(x.dtype)
        (tokens, hidden), communicator = x.shape, self._communicator
        owners = self._owners[choice.experts]
        is_own = owners == communicator.rank
        own = Choice(torch.where(is_own, choice.experts - self._first, -1), choice.shares)
        made = self._experts.make(x, own).view(-1, hidden)
        if self._packs:
            made, source = _pack(made, is_own.flatten(), owners.flatten(), communicator.size)
        else:
            source = owners.flatten() * len(made) + torch.arange(len(made), device=made.device)
        size, width = communicator.size, -(-hidden // communicator.size)
        padded = functional.pad(made, (0, width * size - hidden)) if hidden % size else made
        columns = padded.view(len(made), size, width)
        received = communicator.all_to_all(columns.transpose(0, 1).contiguous())
        parts = received.view(-1, width).index_select(0, source).view(*choice.experts.shape, width)
        shares = communicator.all_gather(self._experts.add_up(parts, choice.shares))
        return shares.transpose(0, 1).reshape(tokens, width * size)[:, :hidden].contiguous()

    def _check_processors(self, dtype: torch.dtype) -> None:
        """Raise ConfigError where ranks may choose other experts for a token: messages would not meet."""
        name = operations_of("cpu").name(dtype)
        found = self._communicator.all_gather(torch.tensor(zlib.crc32(name.encode())))
        if len(set(found.tolist())) > 1:
            raise ConfigError(
                f"expert_parallel: ranks compute with different kernels (here {name}) and might choose other experts: "
                f"set {CPU_LIMIT} to what the processors of all hosts have, or leave expert_parallel out"
            )
        self._is_checked = True


def _pack(
    made: torch.Tensor, is_own: torch.Tensor, owners: torch.Tensor, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave out what other ranks make.

    Args:
        made: [pairs, hidden].
        is_own: [pairs] bool: what this rank made.
        owners: [pairs] int64: the rank that made each.
        num_ranks: of the group.

    Returns:
        [most pairs of a rank, hidden], the last of which may have no meaning; and [pairs] int64: where each lies among
        as many of each rank, one behind the other.
    """
    counts = functional.one_hot(owners, num_ranks).cumsum(0)
    most = int(counts[-1].max()) if len(counts) else 0
    places = counts.gather(1, owners.unsqueeze(1))[:, 0] - 1
    packed = made.new_zeros((most, made.shape[1]))
    own = is_own.nonzero()[:, 0]
    torch.index_select(made, 0, own, out=packed[: len(own)])
    return packed, owners * most + places


class Padding:
    """Which tokens of a forward are none, as all layers of a model with experts ask: these choose no expert, whose
    weights would be read for them.

    Attributes:
        positions: [tokens] int64 on the device, -1 for padding; None where it is not said.
    """

    def __init__(self) -> None:
        self.positions: torch.Tensor | None = None


class ExpertsMLP(MLP):
    """Experts of which each token chooses some.

    Args:
        router: hidden to a logit of each expert.
        choose: logits [tokens, experts] → the experts of each token.
        experts: x [tokens, hidden] and what was chosen → [tokens, hidden], equal on all ranks.
        shared: an expert of all tokens; None without.
        padding: of the model's forwards; None where all tokens choose.
    """

    takes_rounded_rows: Rounding | None = None

    def __init__(
        self,
        router: Callable[[torch.Tensor], torch.Tensor],
        choose: Choose,
        experts: Callable[[torch.Tensor, Choice], torch.Tensor],
        shared: SharedExpert | None = None,
        padding: Padding | None = None,
    ) -> None:
        self._router, self._choose, self._experts = router, choose, experts
        self._shared, self._padding = shared, padding or Padding()

    def __call__(self, x: Activations, for_router: torch.Tensor | None = None) -> torch.Tensor:
        """x [tokens, hidden] → [tokens, hidden], equal on all ranks. The router reads `for_router` [tokens, hidden], or
        x."""
        assert isinstance(x, torch.Tensor), "norms round for none that does not say that it takes such rows"
        output = self._experts(x, self._choice_of(x if for_router is None else for_router))
        return output if self._shared is None else self._shared.add_to(output, x)

    @override
    def leave(self, x: Activations) -> Delta:
        """What experts made, if nothing stands between them and the residual stream: no exchange between ranks, and no
        expert of all tokens that is apart."""
        if self._shared is not None or not isinstance(self._experts, (Experts, SummedExperts)):
            return self(x)
        assert isinstance(x, torch.Tensor)
        return self._experts.leave(x, self._choice_of(x))

    def _choice_of(self, x: torch.Tensor) -> Choice:
        return self._choose(self._router(x), positions=self._padding.positions)


@dataclass
class ExpertsBesideMLP(MLP):
    """norm(mlp(norm(x))) + norm(experts(norm(x))), with all norms of their own; and one of what the router reads.

    Attributes:
        mlp: of all tokens.
        experts: of which each token chooses some.
        router_norm: of what the router reads.
        input_norm, output_norm: around `mlp`.
        experts_input_norm, experts_output_norm: around `experts`.
    """

    mlp: MLP
    experts: ExpertsMLP
    router_norm: RMSNorm
    input_norm: RMSNorm
    output_norm: RMSNorm
    experts_input_norm: RMSNorm
    experts_output_norm: RMSNorm

    takes_rounded_rows: ClassVar[Rounding | None] = None

    def __call__(self, x: Activations) -> torch.Tensor:
        """x [tokens, hidden], the residual stream → [tokens, hidden], equal on all ranks."""
        assert isinstance(x, torch.Tensor), "what rounds asks before"
        of_all = self.output_norm(self.mlp(self.input_norm(x)))
        chosen = self.experts(self.experts_input_norm(x), self.router_norm(x))
        return of_all.add_(self.experts_output_norm(chosen))
