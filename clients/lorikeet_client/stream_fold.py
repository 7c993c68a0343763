"""What the pieces of one generation add up to; shared by the blocking and the asyncio stream."""

from lorikeet.inference.v1 import generation_pb2 as pb
from lorikeet_client import generation_messages as messages
from lorikeet_client.errors import BrokenReplyError
from lorikeet_client.generation import Completion, Delta, Finish, Token


class StreamFold:
    """Adds pieces up, in order. After an error or a close, what was added stays readable."""

    def __init__(self) -> None:
        self._request_id = ""
        self._num_pieces = 0
        self._texts: list[str] = []
        self._tokens: list[Token] = []
        self._prompt_tokens: tuple[Token, ...] = ()
        self._finish: Finish | None = None

    @property
    def request_id(self) -> str:
        """The request's id; empty until the first piece."""
        return self._request_id

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The output tokens so far."""
        return tuple(self._tokens)

    @property
    def finish(self) -> Finish | None:
        """How it ended; None until the last piece."""
        return self._finish

    def add(self, message: pb.GenerateResponse) -> Delta:
        """Take the next piece; raises BrokenReplyError if one is missing before it."""
        if message.sequence != self._num_pieces:
            raise BrokenReplyError(
                f"request {message.request_id}: piece {message.sequence} came instead of {self._num_pieces}"
            )
        piece = messages.delta(message)
        self._num_pieces += 1
        self._request_id = piece.request_id
        self._texts.append(piece.text)
        self._tokens.extend(piece.tokens)
        self._prompt_tokens = self._prompt_tokens or piece.prompt_tokens
        self._finish = piece.finish
        return piece

    def check_finished(self) -> None:
        """Raise BrokenReplyError if the stream ended before its last piece."""
        if self._finish is None:
            raise BrokenReplyError(f"request {self._request_id}: the stream ended without its finish")

    def whole(self) -> Completion:
        """All pieces as one answer; the stream must have ended."""
        if self._finish is None:
            raise BrokenReplyError(f"request {self._request_id}: the stream has not ended")
        return Completion(self.request_id, self.text, self.tokens, self._prompt_tokens, self._finish)
