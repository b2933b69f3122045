"""A feed-forward layer of experts: a router chooses some of them for each token, and their results are added up by its
shares; an expert that all tokens go through may stand beside.

It knows activations and the communicator. It does not know which layer it is, or how experts are held.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from parallel.communicator import Communicator
from trtrun.kernels.arguments import Activations, Rounding
from trtrun.kernels.torch.experts import Choice, Experts
from trtrun.layers.decoder_layer import MLP


class SharedExpert:
    """An expert of all tokens.

    Args:
        mlp: it, with all that its ranks have to do.
        gate: hidden to one number, whose sigmoid its result is multiplied by; None for none.
    """

    def __init__(self, mlp: MLP, gate: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        self._mlp, self._gate = mlp, gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] → [tokens, hidden], equal on all ranks."""
        result = self._mlp(x)
        if self._gate is None:
            return result
        logits = self._gate(x).float()
        # The sigmoid as a softmax beside 0, whose rows have the same bits in any company.
        share = torch.softmax(torch.cat((logits, torch.zeros_like(logits)), dim=1), dim=1)[:, :1]
        return result.mul_(share.to(result.dtype))


class ExpertsMLP:
    """Experts of which each token chooses some, cut by features over the ranks of a group.

    Args:
        router: hidden to a logit of each expert.
        choose: logits [tokens, experts] → the experts of each token.
        experts: this rank's features of all experts.
        communicator: of the tensor-parallel group.
        shared: an expert of all tokens; None without.
    """

    takes_rounded_rows: Rounding | None = None

    def __init__(
        self,
        router: Callable[[torch.Tensor], torch.Tensor],
        choose: Callable[[torch.Tensor], Choice],
        experts: Experts,
        communicator: Communicator,
        shared: SharedExpert | None = None,
    ) -> None:
        self._router, self._choose, self._experts = router, choose, experts
        self._communicator = communicator
        self._shared = shared

    def __call__(self, x: Activations, for_router: torch.Tensor | None = None) -> torch.Tensor:
        """x [tokens, hidden] → [tokens, hidden], equal on all ranks. The router reads `for_router` [tokens, hidden], or
        x."""
        assert isinstance(x, torch.Tensor), "norms round for none that does not say that it takes such rows"
        output = self._experts(x, self._choose(self._router(x if for_router is None else for_router)))
        if self._communicator.size > 1:
            output = self._communicator.all_reduce(output)
        return output if self._shared is None else output.add_(self._shared(x))
