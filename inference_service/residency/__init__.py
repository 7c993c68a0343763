"""Where each adapter is on this node, and who holds a lease on it. Pure."""
