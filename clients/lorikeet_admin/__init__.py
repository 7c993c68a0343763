"""The `lorikeet` command: a local stack, adapters, tenants, residency and text from a shell."""
