"""The order of schedule, launch, collect and update, with overlap and without."""

from inference_service.domain.step import ModelRunnerOutput, SchedulerOutput
from tests.support.engine_builders import Rig, make_request
from tests.support.fake_device import FakeRunner


def journal_of(rig: Rig) -> list[str]:
    """Calls of the runner from now on, in their order."""
    calls: list[str] = []
    runner: FakeRunner = rig.runner
    launch, collect = runner.launch, runner.collect

    def launched(step: SchedulerOutput) -> None:
        calls.append(f"launch {step.step}")
        launch(step)

    def collected() -> ModelRunnerOutput:
        output = collect()
        calls.append(f"collect {output.step}")
        return output

    runner.launch = launched  # type: ignore[method-assign]
    runner.collect = collected  # type: ignore[method-assign]
    return calls


def run(*, overlaps: bool) -> list[str]:
    """A request of three tokens."""
    rig = Rig(overlaps=overlaps)
    calls = journal_of(rig)
    rig.add(make_request("a", max_tokens=3))
    rig.run()
    assert not rig.pipeline.turn()
    assert rig.pipeline.durations.counts().num == 3
    return calls


def test_one_step_after_the_other() -> None:
    """A result before the next launch."""
    assert run(overlaps=False) == [
        f"{call} {step}" for step in range(3) for call in ("launch", "collect")
    ]  # fmt: skip


def test_one_step_ahead() -> None:
    """The next launch before a result; the last result when nothing is left to launch."""
    assert run(overlaps=True) == [
        "launch 0", "launch 1", "collect 0", "launch 2", "collect 1", "collect 2"
    ]  # fmt: skip


def test_a_stop_token_costs_one_step_that_belongs_to_nobody() -> None:
    """Its tokens reach no consumer, and its blocks come back at once."""
    plain = Rig()
    plain.add(make_request("a", max_tokens=9))
    plain.run()
    stop = plain.tokens("a")[2]
    rig = Rig(overlaps=True)
    calls = journal_of(rig)
    rig.add(make_request("a", max_tokens=9, stop_token_ids=(stop,)))
    rig.run()
    assert rig.tokens("a") == plain.tokens("a")[:3]
    while rig.pipeline.turn():
        pass
    assert [call for call in calls if call.startswith("launch")] == [f"launch {n}" for n in range(4)]
    assert rig.scheduler.stats().blocks_available == rig.config.num_blocks


def test_an_abort_between_launch_and_result() -> None:
    """The request's output ends at once; the step's others get theirs."""
    rig = Rig(overlaps=True)
    for name in ("a", "b"):
        rig.add(make_request(name, max_tokens=6))
    rig.turn()
    rig.abort("a")
    rig.run()
    assert rig.tokens("a") == []
    assert len(rig.tokens("b")) == 6
    # The id may come again while the runner still hears of the first one's end.
    rig.add(make_request("a", max_tokens=2))
    rig.run()
    assert len(rig.tokens("a")) == 2
