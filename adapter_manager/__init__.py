"""The adapter manager: tenants' adapters from upload to residency on the inference services."""
