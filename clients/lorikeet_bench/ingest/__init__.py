"""Pushes of an adapter of gpt-oss-20b's shapes to a real manager: the time of each stage, and memory."""

from lorikeet_bench.ingest.gpt_oss_adapter import (
    AdapterLayout,
    GptOssShape,
    gpt_oss_schema,
    write_gpt_oss_adapter,
)
from lorikeet_bench.ingest.measure import IngestPlan, ManagerUnderTest, measure_ingest
from lorikeet_bench.ingest.peak_memory import PeakMemoryError
from lorikeet_bench.ingest.result import IngestResult, LayoutFigures, PushFigures
from lorikeet_bench.ingest.stand_in_node import StandInNode

__all__ = [
    "AdapterLayout",
    "GptOssShape",
    "IngestPlan",
    "IngestResult",
    "LayoutFigures",
    "ManagerUnderTest",
    "PeakMemoryError",
    "PushFigures",
    "StandInNode",
    "gpt_oss_schema",
    "measure_ingest",
    "write_gpt_oss_adapter",
]
