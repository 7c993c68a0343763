"""Uploads: what each came to, what was received, how long its stages took."""

from contextlib import AbstractContextManager

from prometheus_client import CollectorRegistry, Counter, Histogram

from adapter_manager.ports import IngestStage
from lorikeet_rpc.metrics import CallEnd, RpcMetrics

_UPLOAD = "/lorikeet.adapters.v1.AdapterService/Upload"
_STAGE_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_RESULTS = ("created", "existing", "mended", "validated", "rejected", "interrupted")


class UploadMetrics:
    """Implements `lorikeet_rpc.metrics.CallObserver` and `ports.UploadObserver`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rpc = RpcMetrics(registry)
        self._uploads = Counter("lorikeet_uploads", "Uploads by result.", ("result",), registry=registry)
        for result in _RESULTS:
            self._uploads.labels(result)
        self._rejected = Counter(
            "lorikeet_uploads_rejected",
            "Uploads that ended in an error, by the reason in its ErrorInfo.",
            ("reason",),
            registry=registry,
        )
        self._bytes = Counter("lorikeet_upload_bytes", "Bytes of files received.", registry=registry)
        self._stages = Histogram(
            "lorikeet_ingest_duration_seconds",
            "Stages of whole uploads, failed ones included: verify (sha256), build (checks "
            "and the canonical payload), register (into the artifact store and the registry).",
            ("stage",),
            buckets=_STAGE_BUCKETS_S,
            registry=registry,
        )
        for stage in IngestStage:
            self._stages.labels(stage.value)

    def received(self, num_bytes: int) -> None:
        """See ports.UploadObserver."""
        self._bytes.inc(num_bytes)

    def timed(self, stage: IngestStage) -> AbstractContextManager[object]:
        """See ports.UploadObserver."""
        return self._stages.labels(stage.value).time()

    def finished(self, end: CallEnd) -> None:
        """See lorikeet_rpc.metrics.CallObserver."""
        self._rpc.finished(end)
        if end.method != _UPLOAD:
            return
        if outcome := end.facts.get("upload"):
            self._uploads.labels(outcome).inc()
        elif end.reason:
            self._uploads.labels("rejected").inc()
            self._rejected.labels(end.reason).inc()
        else:
            self._uploads.labels("interrupted").inc()
