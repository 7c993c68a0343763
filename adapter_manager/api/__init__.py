"""The gRPC face: servicers, conversion, authentication."""
