"""What a monitor sees of the manager. Only server.py builds it; no other room knows Prometheus."""

from adapter_manager.metrics.manager_metrics import ManagerMetrics
from adapter_manager.metrics.observed_artifacts import ObservedArtifacts
from adapter_manager.metrics.observed_node import ObservedNode

__all__ = ["ManagerMetrics", "ObservedArtifacts", "ObservedNode"]
