"""Scratch memory of the LoRA ops: allocated once, kept for the process's life, owned by one stream of ops."""

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class LoraWorkspace:
    """Named int32 buffers that start as zeros. Ops that run at the same time need a workspace each.

    A buffer never moves, so captured CUDA graphs may keep its address; asking again with the same key returns
    the same memory. Call each op once before capturing, so that the zeroing is not captured.
    """

    device: torch.device
    buffers: dict[tuple[int | str, ...], torch.Tensor] = field(
        default_factory=dict[tuple[int | str, ...], torch.Tensor]
    )

    def zeroed(self, key: tuple[int | str, ...], num_words: int) -> torch.Tensor:
        """The buffer under `key`, of `num_words` int32, zero when first asked for."""
        buffer = self.buffers.get(key)
        if buffer is None:
            buffer = torch.zeros(num_words, dtype=torch.int32, device=self.device)
            self.buffers[key] = buffer
        if buffer.numel() < num_words:
            raise ValueError(
                f"workspace buffer {key} has {buffer.numel()} words, not {num_words}: a key's size is fixed"
            )
        return buffer
