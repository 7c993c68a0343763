"""The hand-written runtime that all speakers of the protos share: errors, server, channel, logs, metrics.

Import the file you need; nothing is re-exported, so that a client never loads the server's half.
"""
