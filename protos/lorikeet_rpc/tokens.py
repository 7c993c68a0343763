"""Bearer tokens: made once, shown once, kept only as sha256.

Tokens are 256 random bits, so a plain hash is as strong as the token; a look-up by hash takes no time that
depends on the token's prefix.
"""

import hashlib
import hmac
import secrets
from typing import NamedTuple

_PREFIX = "lk_"  # lets secret scanners and people recognise one
_ID_LENGTH = 12


class NewToken(NamedTuple):
    """A fresh token with the two things that may be kept of it."""

    token: str
    token_id: str
    sha256: str


def new_token() -> NewToken:
    """A token that nobody can guess, its public id and its hash."""
    token = _PREFIX + secrets.token_urlsafe(32)
    sha256 = hash_token(token)
    return NewToken(token, token_id_of(sha256), sha256)


def hash_token(token: str) -> str:
    """Lower-case hex sha256: what catalogs hold and look tokens up by."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def token_id_of(sha256: str) -> str:
    """The token's public name, safe in logs and lists."""
    return sha256[:_ID_LENGTH]


def same_token(given: str | None, expected: str) -> bool:
    """Compare with a shared secret in constant time; an empty `expected` matches nothing."""
    return (
        bool(expected) and given is not None and hmac.compare_digest(hash_token(given), hash_token(expected))
    )
