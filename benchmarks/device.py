"""The device that a script's benches run on."""

import argparse

import torch


def check_device(parser: argparse.ArgumentParser, device: str) -> None:
    """End with exit code 2 where the benches could not run: nothing is measured or written."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no NVIDIA GPU here, and these figures are of one; --tiny runs a toy on a CPU")
