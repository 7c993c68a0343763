"""What a monitor and a router see of this node. Only server.py builds it; no other room knows Prometheus."""

from inference_service.metrics.node_metrics import NodeMetrics

__all__ = ["NodeMetrics"]
