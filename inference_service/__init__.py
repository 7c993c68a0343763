"""The inference service: a continuous-batching engine for one MoE model and many LoRA adapters."""
