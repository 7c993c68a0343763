"""Factors by which queries grow with their position (Llama 4), made once per model."""

import torch


def temperature_factors(
    strength: float, interval: int, num_positions: int, device: torch.device
) -> torch.Tensor:
    """1 + strength * log(1 + floor((position + 1) / interval)) of every position, [P] float32."""
    steps = torch.floor((torch.arange(num_positions, dtype=torch.float32) + 1.0) / interval)
    return (torch.log1p(steps) * strength + 1.0).to(device)
