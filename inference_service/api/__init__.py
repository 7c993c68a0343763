"""The gRPC surface of a node: servicers, conversion, the catalog, and a request's path to the engine."""
