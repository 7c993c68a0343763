"""Who finds whose blocks. The fake runner checks the contents of every block that a request reads."""

from inference_service.scheduler.prefix_cache import BlockKeys
from tests.support.engine_builders import Rig, desire, make_request
from tests.support.fake_device import expected_tokens


def run_one(rig: Rig, request_id: str, prompt: tuple[int, ...], **changes: object) -> int:
    """Run a request to its end; returns how many of its tokens came from the cache."""
    rig.add(make_request(request_id, prompt, **changes))  # type: ignore[arg-type]
    rig.run()
    digest = changes.get("digest")
    assert rig.tokens(request_id) == expected_tokens(digest, prompt, 4)  # type: ignore[arg-type]
    return rig.finish(request_id).cached_tokens


def test_same_prompt_is_found_but_its_last_token_is_computed() -> None:
    """A prompt of whole blocks keeps its last block to compute; one token more and all whole blocks hit."""
    rig = Rig()
    assert run_one(rig, "a", tuple(range(16))) == 0
    assert run_one(rig, "b", tuple(range(16))) == 12
    assert run_one(rig, "c", tuple(range(17))) == 16
    assert rig.scheduler.stats().prefix_hit_tokens == 28


def test_output_tokens_are_found_by_the_next_turn_of_a_conversation() -> None:
    """Prompt and answer of the first request are the second one's prefix."""
    rig = Rig()
    prompt = tuple(range(10))
    run_one(rig, "a", prompt, max_tokens=4)
    longer = (*prompt, *expected_tokens(None, prompt, 4), 1, 2, 3)
    assert run_one(rig, "b", longer) == 12


def test_a_block_is_found_only_after_all_before_it() -> None:
    """Equal tokens at another place, or after other tokens, are no hit."""
    rig = Rig()
    run_one(rig, "a", tuple(range(16)))
    assert run_one(rig, "b", (99, *range(1, 16))) == 0
    assert run_one(rig, "c", tuple(range(4, 20))) == 0


def test_adapters_and_base_never_share() -> None:
    """The same prompt under base, two revisions, and base again: each finds only its own."""
    rig = Rig()
    old, new = rig.source.add("old"), rig.source.add("new")
    rig.residency.set_desired([desire(old), desire(new)])
    prompt = tuple(range(20))
    for digest in (None, old, new):
        assert run_one(rig, f"first {digest}", prompt, digest=digest) == 0
    for digest in (new, None, old):
        assert run_one(rig, f"again {digest}", prompt, digest=digest) == 16


def test_reused_slot_does_not_revive_blocks() -> None:
    """One slot, two revisions in turn: the cache follows the digest, not the slot."""
    rig = Rig(num_slots=1)
    one, two = rig.source.add("one"), rig.source.add("two")
    rig.residency.set_desired([desire(one), desire(two)])
    prompt = tuple(range(20))
    assert run_one(rig, "a", prompt, digest=one) == 0
    assert run_one(rig, "b", prompt, digest=two) == 0
    assert run_one(rig, "c", prompt, digest=one) == 16


def test_prompt_logprobs_compute_every_position() -> None:
    """Such a request skips the cache, and fills it for others."""
    rig = Rig()
    assert run_one(rig, "a", tuple(range(20)), prompt_logprobs=0) == 0
    assert run_one(rig, "b", tuple(range(20)), prompt_logprobs=0) == 0
    assert len(rig.outputs["b"][0].prompt_logprobs) == 20
    assert run_one(rig, "c", tuple(range(20))) == 16


def test_switched_off() -> None:
    """Nothing is kept."""
    rig = Rig(prefix_cache=False)
    assert run_one(rig, "a", tuple(range(20))) == 0
    assert run_one(rig, "b", tuple(range(20))) == 0


def test_running_request_shares_blocks_it_has_computed() -> None:
    """A second request joins while the first still decodes, and the first's end does not harm it."""
    rig = Rig()
    prompt = tuple(range(20))
    rig.add(make_request("a", prompt, max_tokens=6))
    rig.turn()
    rig.add(make_request("b", prompt, max_tokens=20))
    rig.run()
    assert rig.finish("b").cached_tokens == 16
    assert rig.tokens("b") == expected_tokens(None, prompt, 20)


def test_keys_differ_by_seed_and_by_every_token() -> None:
    """The chain is a function of digest and tokens; growing it in pieces changes nothing."""
    tokens = list(range(12))
    whole = BlockKeys("d", 4).upto(tokens, 3)
    pieces = BlockKeys("d", 4)
    assert [pieces.upto(tokens, n)[-1] for n in (1, 2, 3)] == whole
    assert len({BlockKeys(seed, 4).upto(tokens, 1)[0] for seed in (None, "", "base", "d")}) == 4
    assert BlockKeys("d", 4).upto([0, 1, 2, 4, *tokens[4:]], 3)[2] != whole[2]
