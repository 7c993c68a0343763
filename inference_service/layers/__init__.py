"""Layers shared by all model families. They take ready tensors and know no checkpoint names."""
