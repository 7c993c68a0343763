"""What both services and their clients agree on beside the protos: names, schema, manifest, status codes.

Standard library only; anybody may import it.
"""
