"""Page tokens and the pauses between attempts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter_manager.domain.errors import InvalidRequestError
from adapter_manager.domain.page import MAX_PAGE_SIZE, decode_token, encode_token, page_size
from adapter_manager.domain.retries import MAX_ATTEMPTS, Failure, failed_again


@given(st.text(), st.text())
def test_page_tokens_round_trip(listing: str, after: str) -> None:
    """Whatever the key holds."""
    assert decode_token(encode_token(listing, after), listing) == after


@given(st.text(min_size=1))
def test_foreign_page_tokens_are_refused(token: str) -> None:
    """Any text that we did not make."""
    with pytest.raises(InvalidRequestError, match="page_token"):
        decode_token(token, "adapters:demo")


def test_a_token_of_another_list_is_refused() -> None:
    """A tenant's token does not page through all tenants."""
    with pytest.raises(InvalidRequestError):
        decode_token(encode_token("adapters:demo", "demo/a"), "adapters:*")


def test_page_sizes() -> None:
    """0 means the default, and nobody gets more than the maximum."""
    assert (page_size(0), page_size(7), page_size(10**6)) == (100, 7, MAX_PAGE_SIZE)


def test_pauses_grow_and_attempts_end() -> None:
    """The first retry comes soon, later ones later, and there is a last one."""
    failure, now_s = None, 0.0
    pauses: list[float] = []
    for _ in range(MAX_ATTEMPTS):
        failure = failed_again(failure, "no", now_s, is_final=False)
        began_s = now_s
        while not failure.may_retry(now_s) and now_s - began_s < 1000:
            now_s += 0.25
        pauses.append(now_s - began_s)
    assert pauses[:3] == [0.5, 1.0, 2.0]
    assert pauses[-1] == 1000


def test_a_final_failure_is_never_retried() -> None:
    """However long one waits."""
    assert not Failure("bad", 1, 0.0, is_final=True).may_retry(1e9)
