"""What the pieces of one generation add up to; shared by the blocking and the asyncio stream."""

from lorikeet.inference.v1 import generation_pb2 as pb
from lorikeet_client import generation_messages as messages
from lorikeet_client.errors import BrokenReplyError
from lorikeet_client.generation import Completion, Delta, Finish, PartialSample, Sample, Token


class _SampleFold:
    """One sample's pieces."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens: list[Token] = []
        self.finish: Finish | None = None


class StreamFold:
    """Adds pieces up, in order. After an error or a close, what was added stays readable.

    `text`, `tokens` and `finish` are sample 0's; `samples` has all.

    Args:
        num_samples: how many the request asks for.
    """

    def __init__(self, num_samples: int = 1) -> None:
        self._request_id = ""
        self._num_pieces = 0
        self._folds = [_SampleFold() for _ in range(max(1, num_samples))]
        self._prompt_tokens: tuple[Token, ...] = ()

    @property
    def request_id(self) -> str:
        """The request's id; empty until the first piece."""
        return self._request_id

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._folds[0].texts)

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The output tokens so far."""
        return tuple(self._folds[0].tokens)

    @property
    def finish(self) -> Finish | None:
        """How it ended; None until its last piece."""
        return self._folds[0].finish

    @property
    def samples(self) -> tuple[PartialSample, ...]:
        """All samples so far, by index."""
        return tuple(
            PartialSample(index, "".join(fold.texts), tuple(fold.tokens), fold.finish)
            for index, fold in enumerate(self._folds)
        )

    def add(self, message: pb.GenerateResponse) -> Delta:
        """Take the next piece; raises BrokenReplyError if one is missing before it, or it is of no sample."""
        if message.sequence != self._num_pieces:
            raise BrokenReplyError(
                f"request {message.request_id}: piece {message.sequence} came instead of {self._num_pieces}"
            )
        if message.index >= len(self._folds):
            raise BrokenReplyError(
                f"request {message.request_id}: a piece of sample {message.index} of {len(self._folds)} came"
            )
        piece = messages.delta(message)
        fold = self._folds[piece.index]
        self._num_pieces += 1
        self._request_id = piece.request_id
        fold.texts.append(piece.text)
        fold.tokens.extend(piece.tokens)
        fold.finish = piece.finish
        self._prompt_tokens += piece.prompt_tokens
        return piece

    def check_finished(self) -> None:
        """Raise BrokenReplyError if the stream ended before a sample's last piece."""
        for index, fold in enumerate(self._folds):
            if fold.finish is None:
                whose = f" of sample {index}" if index else ""
                raise BrokenReplyError(
                    f"request {self._request_id}: the stream ended without its finish{whose}"
                )

    def whole(self) -> Completion:
        """All pieces as one answer; the stream must have ended."""
        wholes = [
            Sample(part.index, part.text, part.tokens, part.finish)
            for part in self.samples
            if part.finish is not None
        ]
        if len(wholes) < len(self._folds):
            raise BrokenReplyError(f"request {self._request_id}: the stream has not ended")
        first = wholes[0]
        return Completion(
            self.request_id, first.text, first.tokens, self._prompt_tokens, first.finish, tuple(wholes[1:])
        )
