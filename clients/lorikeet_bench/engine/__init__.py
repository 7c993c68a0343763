"""Loads on the engine inside this process: no gRPC and no text, the boundary at which vLLM was measured.

The one room of this package that imports the inference service.
"""
