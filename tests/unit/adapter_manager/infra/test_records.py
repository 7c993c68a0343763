"""Records of this release read back whole, and those of earlier ones with what they had."""

import json

from adapter_manager.domain.adapter import DigestUse
from adapter_manager.domain.probe import Probe, ProbeFindings, ProbeVerdict
from adapter_manager.domain.report import (
    MatchedSite,
    ReportedRole,
    SiteCoverage,
    TensorGroup,
    UploadReport,
)
from adapter_manager.domain.revision_report import RevisionReport
from adapter_manager.infra.redis import records

SITE = MatchedSite("layers.0.q", 0, 4, (0.5,), "linear", 2, 77)
GROUP = TensorGroup("layers.*.q_proj.lora_A.weight", ("0-3",), 4, ReportedRole.LORA_A, (4, 8), "BF16", 256)
COVERAGE = SiteCoverage("q", "0-3", "", 8, (4,), (0.5,), ("linear",))


def test_a_probe_is_read_back_with_its_content() -> None:
    """Floats to the last bit."""
    probe = Probe(ProbeFindings(ProbeVerdict.CHANGES, 0.1 + 0.2, 1e-300, 3, 64), "node:1", 1.25)
    use = DigestUse("d" * 64, ("t/a",), probe=probe)
    assert records.decode(records.encode(use), DigestUse).value == use


def test_a_report_is_read_back_whole() -> None:
    """Every group and kind of site."""
    report = UploadReport(4, 4, 0, (SITE,), ("mind",), (GROUP,), 5, (COVERAGE,), 99)
    record = RevisionReport("t", "a", "d" * 64, report)
    assert records.decode(records.encode(record), RevisionReport).value == record


def test_records_of_a_release_without_probes_and_tensors_are_read() -> None:
    """What they did not have is empty."""
    use = {"digest": "d" * 64, "holders": ["t/a"], "purge_owner": "", "purge_time_s": 0.0}
    found = records.decode(envelope(use), DigestUse).value
    assert found == DigestUse("d" * 64, ("t/a",))
    assert found.probe is None
    site = {
        "site": "layers.0.q", "layer": 0, "rank": 4, "scales": [0.5], "layout": "linear", "tensors": 2,
        "bytes": 77,
    }  # fmt: skip
    report = {
        "tensors_total": 2, "tensors_used": 2, "tensors_neutral": 0, "sites": [site], "warnings": [],
    }  # fmt: skip
    old = {"tenant": "t", "adapter": "a", "digest": "d" * 64, "report": report}
    assert records.decode(envelope(old), RevisionReport).value.report == UploadReport(2, 2, 0, (SITE,), ())


def envelope(record: object) -> bytes:
    """As the registry keeps it."""
    return json.dumps({"etag": "0" * 16, "schema": 1, "record": record}).encode()
