"""What the manager does: upload, register, place, reconcile. No gRPC, no Redis, no protobuf."""
