"""Where a decode batch's LoRA branch of down runs on a second stream, beside the GEMM."""

# Devices on which that was measured to be faster, by name. None yet: `--lora-overlap` tries it.
FASTER_BESIDE: frozenset[str] = frozenset()


def runs_beside(device: str, wanted: bool | None) -> bool:
    """What was asked for, or else what was measured on such a device."""
    return device in FASTER_BESIDE if wanted is None else wanted
