"""The experts' base ops: routing, the cut into blocks, matrices in bf16 and MXFP4, the sum over top-k."""
