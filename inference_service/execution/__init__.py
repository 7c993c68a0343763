"""The device: model runner, key-value cache, host pool and adapter arena.

Nothing is imported here: `execution.config` is for processes that do without torch, `execution.backend` builds.
"""
