"""What is wrong with an upload, collected so that one refusal names all of it, cut to a readable length."""

from collections.abc import Iterable
from enum import StrEnum

from adapter_manager.domain.errors import (
    AmbiguousAdapterError,
    InvalidAdapterError,
    UnsupportedAdapterError,
)
from adapter_manager.domain.shown_text import shown_list

_MAX_SHOWN = 8


class Problem(StrEnum):
    """Kinds of problems, as the error's metadata names them."""

    UNMATCHED_TENSORS = "UNMATCHED_TENSORS"
    MISSING_PAIR = "MISSING_PAIR"
    REPEATED = "REPEATED"
    SHAPE = "SHAPE"
    RANK = "RANK"
    EXPERT_INDEX = "EXPERT_INDEX"
    DTYPE = "DTYPE"
    AMBIGUOUS = "AMBIGUOUS"
    UNSUPPORTED = "UNSUPPORTED"


class Problems:
    """Problems found so far."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._kinds: dict[Problem, None] = {}
        self._unmatched: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._texts or self._unmatched)

    def add(self, kind: Problem, text: str) -> None:
        """Note one problem; `text` shows nothing of the upload raw."""
        self._kinds[kind] = None
        self._texts.append(text)

    def add_unmatched(self, names: Iterable[str]) -> None:
        """Note tensors that mean nothing to the base model."""
        self._kinds[Problem.UNMATCHED_TENSORS] = None
        self._unmatched.extend(names)

    def raise_if_any(self, other_base: str = "") -> None:
        """Raise one InvalidAdapterError (or a subclass, where that is all that is wrong) for everything.

        `other_base` is said first: that the adapter names another base model, which may be why.
        """
        if not self:
            return
        texts = self._texts[:_MAX_SHOWN]
        if more := len(self._texts) - len(texts):
            texts.append(f"and {more} more of the kind")
        if self._unmatched:
            unmatched = sorted(self._unmatched)
            match = "tensors match" if len(unmatched) > 1 else "tensor matches"
            names = shown_list(unmatched, _MAX_SHOWN)
            texts.append(f"{len(unmatched)} {match} nothing in the base model: {names}")
        if len(self._texts) > _MAX_SHOWN and Problem.SHAPE in self._kinds:
            texts.append("was the adapter made for another base model?")
        kinds = set(self._kinds)
        error = InvalidAdapterError
        if kinds == {Problem.AMBIGUOUS}:
            error = AmbiguousAdapterError
        elif Problem.UNSUPPORTED in kinds:
            error = UnsupportedAdapterError
        raise error(
            "the adapter cannot be served on this base model: "
            + "; ".join(filter(None, (other_base, *texts))),
            metadata={
                "problem": ",".join(self._kinds),
                "problems": str(len(self._texts)),
                "unmatched_tensors": str(len(self._unmatched)),
            },
        )
