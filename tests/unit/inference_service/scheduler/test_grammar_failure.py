"""A request whose structured output cannot go on."""

from dataclasses import replace

from inference_service.domain.request import FinishReason
from inference_service.domain.step import ModelRunnerOutput, SchedulerOutput
from tests.support.engine_builders import Rig, make_request
from tests.support.fake_device import expected_tokens


def test_it_fails_alone_and_keeps_what_it_had() -> None:
    """The runner's words are the error's; its token of that step counts for nothing; all comes back."""
    rig = Rig()
    execute = rig.runner.execute

    def failing(step: SchedulerOutput) -> ModelRunnerOutput:
        output = execute(step)
        is_later = rig.tokens("a") != []
        return ModelRunnerOutput(
            output.step,
            tuple(
                replace(result, token_ids=(-1,), failure="nothing is left")
                if result.request_id == "a" and is_later
                else result
                for result in output.results
            ),
        )

    rig.runner.execute = failing  # type: ignore[method-assign]
    rig.add(make_request("a", (1, 2), max_tokens=9))
    rig.add(make_request("b", (1, 2), max_tokens=4))
    rig.run()
    end = rig.finish("a")
    assert end.error_metadata == (("field", "sampling.structured_output"),)
    assert (end.reason, end.error_reason, end.error_message) == (
        FinishReason.FAILED,
        "GRAMMAR_FAILED",
        "nothing is left",
    )
    assert rig.tokens("a") == expected_tokens(None, (1, 2), 1)
    assert rig.tokens("b") == expected_tokens(None, (1, 2), 4)
    assert rig.scheduler.stats().running_requests == 0
    assert rig.scheduler.stats().blocks_available == rig.config.num_blocks
