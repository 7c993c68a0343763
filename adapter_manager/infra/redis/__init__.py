"""The registry on Redis or Valkey, and an embedded server for the local stack."""
