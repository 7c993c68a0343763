"""Loads that judge themselves: exact rigs, and runs against a live stack.

The `lorikeet bench` commands and the tests use them; nothing here is needed to serve.
"""
