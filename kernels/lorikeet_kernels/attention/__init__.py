"""From the fused projection to attention's output: heads' norm, rotation, cache write, paged attention."""
