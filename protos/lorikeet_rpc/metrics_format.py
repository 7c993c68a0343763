"""Which exposition format a scraper gets, from its Accept header (RFC 9110, 12.5.1).

prometheus_client's own negotiation knows neither quotes nor q, fails on versions that are no numbers, claims
any newer version, and without UTF-8 names writes `vllm_x` for `vllm:x` in OpenMetrics, though the colon is as
legal there as in the text format. No name of ours needs any escaping.
"""

import re

TEXT_0 = ""  # nothing negotiated is text 0.0.4
TEXT_1 = "text/plain; version=1.0.0; escaping=allow-utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; escaping=allow-utf-8"

_FORMATS = {
    ("application/openmetrics-text", ""): OPENMETRICS,
    ("application/openmetrics-text", "1.0.0"): OPENMETRICS,
    ("text/plain", "1.0.0"): TEXT_1,
    ("text/plain", "0.0.4"): TEXT_0,
    ("text/plain", ""): TEXT_0,
    ("text/*", ""): TEXT_0,
    ("*/*", ""): TEXT_0,
}
# Commas inside quotes part nothing.
_RANGES = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')
_PARAMETER = re.compile(r';\s*([^\s=;"]+)=("(?:[^"\\]|\\.)*"?|[^\s;"]*)')
_QUALITY = re.compile(r"(?:0(?:\.\d{0,3})?|1(?:\.0{0,3})?)", re.ASCII)


def negotiated(accept: str) -> str:
    """An Accept header that prometheus_client understands, for the format liked best of those that we have.

    TEXT_0 where there is none of them, or nothing that can be read: a scrape is never refused.
    """
    best, best_quality = TEXT_0, 0.0
    for asked in _RANGES.findall(accept):
        found, quality = _read(asked)
        if found is not None and quality > best_quality:
            best, best_quality = found, quality
    return best


def _read(asked: str) -> tuple[str | None, float]:
    """The format of one media range, if it is one of ours, and its quality."""
    media_type = asked.partition(";")[0].strip().lower()
    parameters = {name.lower(): _unquoted(value) for name, value in _PARAMETER.findall(asked)}
    quality = parameters.get("q", "1")
    if not _QUALITY.fullmatch(quality):
        return None, 0.0
    return _FORMATS.get((media_type, parameters.get("version", ""))), float(quality)


def _unquoted(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith('"') else value
