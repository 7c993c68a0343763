"""LoRA's ops on dense and expert projections: who has which adapter, shrink, expand, and both in one."""
