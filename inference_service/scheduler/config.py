"""The scheduler's own settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes and limits, fixed for the engine's life."""

    block_tokens: int
    num_blocks: int
    max_step_tokens: int
    max_running_requests: int
    max_waiting_requests: int
    max_context_tokens: int
    prefix_cache: bool = True
