"""Page sizes and opaque page tokens: where a list goes on, and of which list it is the continuation."""

import base64
import binascii
import json
from typing import Any

from adapter_manager.domain.errors import InvalidRequestError

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000


def page_size(asked: int) -> int:
    """The size to use: the default for 0, never more than the maximum."""
    return min(asked or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


def encode_token(listing: str, after: str) -> str:
    """A token for the page that begins behind `after` in `listing`."""
    return base64.urlsafe_b64encode(json.dumps([listing, after]).encode()).decode().rstrip("=")


def decode_token(token: str, listing: str) -> str:
    """The key that the page begins behind; "" for an empty token.

    Raises:
        InvalidRequestError: the token is not one of ours, or of another listing.
    """
    if not token:
        return ""
    try:
        raw: Any = json.loads(base64.b64decode(token + "=" * (-len(token) % 4), b"-_", validate=True))
    except (binascii.Error, ValueError):
        raw = None
    match raw:
        case [str(of), str(after)] if of == listing:
            return after
        case _:
            raise InvalidRequestError(
                "page_token is not one that this list returned; start again without it",
                metadata={"field": "page_token"},
            )
