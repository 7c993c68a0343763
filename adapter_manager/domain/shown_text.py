"""How text from an upload may appear in messages, reports and logs: escaped and cut short, never raw."""

from collections.abc import Iterable, Sequence

_MAX_SHOWN = 96


def shown(text: object) -> str:
    """`text` in quotes, in ASCII without control characters, at most about 100 characters long."""
    if isinstance(text, str):
        if len(text) > _MAX_SHOWN:
            half = _MAX_SHOWN // 2
            return f"{text[:half] + '...' + text[-half:]!a} ({len(text)} characters)"
        return ascii(text)
    if isinstance(text, int) and not isinstance(text, bool) and abs(text) >= 10**30:
        return f"an integer of {text.bit_length()} bits"
    if text is None or isinstance(text, bool | int | float):
        return repr(text)
    # Containers are not walked: their size is the uploader's to choose.
    return f"a {'list' if isinstance(text, list) else 'JSON object'}"


def shown_list(texts: Iterable[str], limit: int = 8) -> str:
    """The first `limit` texts, each as `shown`, and how many more there are."""
    items: Sequence[str] = texts if isinstance(texts, Sequence) else list(texts)
    head = ", ".join(shown(t) for t in items[:limit])
    more = len(items) - limit
    return f"{head} and {more} more" if more > 0 else head
