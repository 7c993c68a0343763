"""The ops of Lorikeet's models, one a file: what is computed, as a reference, and kernels that do it fast."""
