"""The soak: many streams over adapters that churn, every token judged against a journal of who may answer."""

from lorikeet_bench.soak.cut_short import CutShortError
from lorikeet_bench.soak.exchange import Fault, FaultKind
from lorikeet_bench.soak.plan import SoakPlan, SoakTarget, write_soak_base
from lorikeet_bench.soak.result import SoakResult
from lorikeet_bench.soak.run import SoakProgress, run_soak
from lorikeet_bench.soak.target_check import WrongTargetError

__all__ = [
    "CutShortError",
    "Fault",
    "FaultKind",
    "SoakPlan",
    "SoakProgress",
    "SoakResult",
    "SoakTarget",
    "WrongTargetError",
    "run_soak",
    "write_soak_base",
]
