"""The device: model runner, key-value cache, host pool and adapter arena.

Nothing is imported here: `config` is for processes that do without torch, `backend` builds everything.
"""
