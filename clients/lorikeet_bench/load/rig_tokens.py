"""Which tokens say what on an exact rig: adapters force low ones, prompts hold high ones."""

from lorikeet_bench.load.lengths import LoadError
from lorikeet_bench.load.prompts import TokenPrompts
from lorikeet_bench.rigs import RigShape


class RigTokens:
    """The two halves of a rig's vocabulary never meet, so that no answer can be right by accident.

    Raises:
        LoadError: more adapters than the lower half has tokens.
    """

    def __init__(self, shape: RigShape, num_adapters: int) -> None:
        self.shape = shape
        half = shape.vocab // 2
        if num_adapters >= half:
            raise LoadError(
                f"a rig of {shape.vocab} tokens has room for {half - 1} adapters, not {num_adapters}"
            )
        self.forced = tuple(range(1, 1 + num_adapters))

    def prompts(self) -> TokenPrompts:
        """Prompts whose last token, which the base model repeats, no adapter forces."""
        return TokenPrompts(self.shape.vocab // 2, self.shape.vocab)


def rig_shape(num_adapters: int) -> RigShape:
    """The smallest rig that has room for so many adapters."""
    vocab = 64
    while num_adapters >= vocab // 2:
        vocab *= 2
    return RigShape(vocab=vocab)
