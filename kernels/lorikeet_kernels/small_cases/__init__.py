"""One or few small launches of every kernel, with what they should give."""
