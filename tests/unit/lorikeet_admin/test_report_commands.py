"""What pushes, reports and probes show, and what they exit with."""

from pathlib import Path

import pytest

from lorikeet.adapters.v1 import adapter_pb2 as pb_adapters
from lorikeet_contract.status import StatusCode
from tests.support.command_line import Run, documents
from tests.support.fake_services import FakeServices, service_error


def test_push_prints_a_line_for_each_kind_of_site(run: Run, adapter_dir: Path) -> None:
    """With what is left out and what has no effect; --verbose names every tensor."""
    push = ("adapters", "push", str(adapter_dir), "--name", "demo/a")
    plain = run(*push).stdout
    (line,) = [line.split() for line in plain.splitlines() if line.startswith(" q ")]
    assert line == ["q", "0-1", "2", "4", "2", "linear", "4", "128", "B"]
    assert "no adapter on: router" in plain
    assert "without effect: lm_head.base_layer.weight: equal to the base model's own weight" in plain
    assert "4 of 5 tensors used, 1 without effect; 1.2 KiB in the files" in plain
    assert "q_proj" not in plain
    verbose = run(*push, "--verbose").stdout
    (line,) = [line.split() for line in verbose.splitlines() if "lora_A" in line]
    assert line == [
        *("layers.{0-1}.q_proj.lora_A.weight", "2", "4", "x", "8", "BF16", "q", "linear", "4"),
        *("2", "=", "8/4", "128", "B"),
    ]
    assert run("adapters", "report", "demo/a0", "--verbose").stdout.count("lora_") == 2
    assert "lora_" in run("adapters", "show", "demo/a0", "--verbose").stdout


def test_tensors_that_are_placed_and_change_nothing_are_counted(
    run: Run, fakes: FakeServices, adapter_dir: Path
) -> None:
    """The counts must not contradict the lines above them."""
    report = fakes.adapters.adapters[0].revisions[0].report
    for group in report.tensors:
        if group.site:
            group.neutral = "lora_B is zero"
    plain = run("adapters", "report", "demo/a0").stdout
    assert "without effect: layers.{0-1}.q_proj.lora_A.weight: lora_B is zero" in plain
    assert (
        "4 of 5 tensors used, 4 of them without effect; 1 more, without effect too, left out; 1.2 KiB in"
        in plain
    )
    report.tensors_neutral, report.tensors_total, report.tensors_not_listed = 0, 4, 2
    plain = run("adapters", "report", "demo/a0").stdout
    assert "4 of 4 tensors used, at least 4 of them without effect; 1.2 KiB in the files" in plain


def test_push_may_ask_for_proof(run: Run, fakes: FakeServices, adapter_dir: Path) -> None:
    """The revision that was pushed is probed; the result has what came of it."""
    push = ("adapters", "push", str(adapter_dir), "--name", "demo/a")
    assert "not probed" in run(*push).stdout
    proven = run(*push, "--probe")
    assert proven.exit_code == 0
    assert "probe on n:1 at 2023-11-14 22:13:20 UTC: changes log-probabilities by up to 1.25" in proven.stdout
    assert fakes.adapters.requests[-1].name.startswith("tenants/demo/adapters/up/revisions/")
    (document,) = documents(run(*push, "--probe", "--json"))
    assert (document["created"], document["revision"]["probe"]["verdict"]) == (True, "changes")
    assert document["revision"]["report"]["tensors"][0]["indices"] == ["0-1"]
    assert run(*push, "--probe", "--validate-only").exit_code == 2


@pytest.mark.parametrize(
    ("verdict", "words"), [("CHANGES_NOTHING", "CHANGES NOTHING"), ("NOT_FINITE", "NOT FINITE")]
)
def test_an_adapter_without_proof_fails_who_asked(
    run: Run, fakes: FakeServices, adapter_dir: Path, verdict: str, words: str
) -> None:
    """Exit code 1, with the report all the same; JSON stays one document."""
    fakes.adapters.verdict = pb_adapters.ProbeVerdict.Value(f"PROBE_VERDICT_{verdict}")
    for command in (("push", str(adapter_dir), "--name", "demo/a", "--probe"), ("probe", "demo/a0")):
        result = run("adapters", *command)
        assert result.exit_code == 1
        assert words in result.stdout
        assert words in result.stderr
        (document,) = documents(run("adapters", *command, "--json"))
        assert document.get("revision", document)["probe"]["verdict"] == verdict.lower()


def test_an_upload_is_told_though_its_probe_fails(run: Run, fakes: FakeServices, adapter_dir: Path) -> None:
    """Its revision is registered: that comes first, then why there is no proof."""
    fakes.faults.add("ProbeAdapter", service_error(StatusCode.FAILED_PRECONDITION, "no node of that base"))
    result = run("adapters", "push", str(adapter_dir), "--name", "demo/a", "--probe")
    assert result.exit_code == 1
    assert "demo/a registered" in result.stdout
    assert "no node of that base" in result.stderr


def test_lists_show_what_probes_found(run: Run, fakes: FakeServices) -> None:
    """A word in the list, a line where one adapter is shown; nothing where no node has looked."""
    probe = pb_adapters.Probe(verdict=pb_adapters.PROBE_VERDICT_CHANGES_NOTHING, positions=64, node="n:1")
    fakes.adapters.adapters[0].revisions[0].probe.MergeFrom(probe)
    lines = {line.split()[0]: line for line in run("adapters", "list").stdout.splitlines() if "demo/" in line}
    assert lines["demo/a0"].rstrip().endswith("changes nothing")
    assert "changes" not in lines["demo/a1"]
    assert "CHANGES NOTHING: no log-probability at 64 places" in run("adapters", "show", "demo/a0").stdout
    documented = documents(run("adapters", "list", "--json"))[0]["adapters"]
    assert [a["revisions"][0]["probe"] is None for a in documented] == [False, True, True, True, True]


def test_a_report_that_is_not_kept_is_no_crash(run: Run, fakes: FakeServices) -> None:
    """A registry that was restored has none."""
    fakes.adapters.adapters[0].revisions[0].ClearField("report")
    result = run("adapters", "report", "demo/a0")
    assert result.exit_code == 1
    assert "no report of demo/a0 is kept" in result.stderr
