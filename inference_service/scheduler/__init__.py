"""Which requests run in the next step, and in which key-value blocks. Pure."""
