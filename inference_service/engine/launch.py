"""What the parent hands the engine process on its command line."""

import msgspec

from inference_service.engine.channel import Endpoints
from inference_service.engine.config import EngineConfig


class Launch(msgspec.Struct, frozen=True):
    """`import_path` is the parent's, so that an out-of-tree backend is importable in the child too.

    `spawned_s` is the moment of spawning, on `time.monotonic`'s clock, which all processes share.
    """

    config: EngineConfig
    endpoints: Endpoints
    parent_pid: int
    import_path: tuple[str, ...]
    spawned_s: float
