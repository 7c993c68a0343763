"""The GPU's name, without making a context on it."""

from lorikeet_bench.machine import command_output


def gpu_name() -> str:
    """Name and driver of the first GPU, as NVIDIA's tool says; empty where there is none."""
    return command_output(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    )
