"""Loads on a node over gRPC, as any client would send them."""
