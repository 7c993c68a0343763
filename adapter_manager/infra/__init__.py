"""Implementations of the ports: Redis, artifact stores, nodes."""
