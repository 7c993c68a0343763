"""The GPU's name, without making a context on it."""

import subprocess


def gpu_name() -> str:
    """Name and driver of the first GPU, as NVIDIA's tool says; empty where there is none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"],  # noqa: S607
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
