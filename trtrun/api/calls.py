"""The prompts of one call, from where they begin to where their outputs are whole.

It puts deltas of the engine core (`llm_engine`), which calls share, together to outputs, and makes tokens of chats. It
does not know rounds or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from trtrun.api.prompts import Prompt
from trtrun.api.shared_engine import PendingRequest, SharedEngine
from trtrun.chats.chat import Chat, ChatEncoder
from trtrun.core.outputs import RequestId, RequestOutput
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import InvalidRequestError, QueueFullError


class Call:
    """One call of an `LLM`. Its prompts are one group: those of another thread's call wait for none of them but in
    turn.

    Attributes:
        pending: prompts that wait or run.
    """

    def __init__(self, shared: SharedEngine, chats: ChatEncoder) -> None:
        """Begin without any prompt.

        Args:
            shared: the engine core, and the inboxes of its requests.
            chats: makes tokens of chats.
        """
        self.pending: dict[RequestId, PendingRequest] = {}
        self._shared = shared
        self._chats = chats

    def complete(
        self,
        prompts: Iterable[tuple[Prompt | Chat, SamplingParams]],
        most_waiting: int,
        seconds_left: Callable[[], float | None] | None,
    ) -> Iterator[RequestOutput]:
        """Complete prompts as `LLM.generate_as_completed` says; at most `most_waiting` of them wait."""
        source = enumerate(prompts)
        held: tuple[int, tuple[Prompt | Chat, SamplingParams]] | None = None
        left: float | None = None
        try:
            while True:
                left = seconds_left() if seconds_left is not None else None
                while left is None and self.has_room(most_waiting):
                    item, held = held or next(source, None), None
                    if item is None:
                        break
                    try:
                        refused = self.begin(item[0], *item[1])
                    except QueueFullError:
                        held = item  # others fill the queue: it is taken up again after a round
                        break
                    if refused is not None:
                        yield refused
                if left is not None:
                    self.wind_down(left)
                if not self.pending and (held is None or left is not None):
                    break
                self._shared.step()
                yield from self.finished()
            self._shared.settle()
        finally:
            self.give_up()

    def has_room(self, most_waiting: int) -> bool:
        """Whether another prompt may wait, of so many; what others have waiting takes none of its turns."""
        return not self.pending or self._shared.num_waiting_of(self) < most_waiting

    def begin(self, index: int, prompt: Prompt | Chat, sampling: SamplingParams) -> RequestOutput | None:
        """Queue a prompt and enter it in `pending`; returns the output of one that is refused.

        Args:
            index: place of the prompt in the call.
            prompt: a text, token ids or a chat.
            sampling: its parameters.

        Raises:
            QueueFullError: there is no room now, but there will be.
            CheckpointError: the model's chat template is none.
        """
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, Chat):  # outside of the turn: rounds do not wait for a template
            try:
                text, prompt = self._chats.read(prompt)
            except InvalidRequestError as error:
                return RequestOutput(index, None, (), (), str(error))
        with self._shared.turn() as engine:  # one turn for all of it: an interrupt would lose the request
            try:
                request_id = engine.add_request(prompt, sampling, group=self)
            except QueueFullError:
                raise
            except InvalidRequestError as error:
                return RequestOutput(index, text, (), (), str(error))
            self._shared.open_inbox(request_id)
            self.pending[request_id] = PendingRequest(index, text, engine.prompt_token_ids(request_id), sampling)
        return None

    def finished(self) -> Iterator[RequestOutput]:
        """The outputs that are whole after a round."""
        inboxes = self._shared.inboxes
        for request_id in [key for key in self.pending if inboxes[key]]:
            output = self.pending[request_id].take(inboxes[request_id])
            if output is not None:
                self.forget(request_id)
                yield output

    def wind_down(self, seconds_left: float) -> None:
        """Give up the prompts that have not begun, and the others too once no time is left.

        A prompt of several completions has begun when one of them has: the others may still be admitted.
        """
        with self._shared.turn() as engine:
            for request_id in list(self.pending):
                if seconds_left <= 0 or not engine.has_begun(request_id):
                    engine.abort_request(request_id)
                    self.forget(request_id)

    def forget(self, request_id: RequestId) -> None:
        """Throw away what is kept of a request that has ended."""
        self._shared.forget(request_id)
        self.pending.pop(request_id, None)

    def give_up(self) -> None:
        """Have all that still goes on aborted. It may be called anywhere, and takes no turn."""
        self._shared.give_up(self.pending)
