"""Log events with structlog, one line each, on stderr: JSON for machines or a console form for people.

Only `configure_logging` changes global state, and only a process's `__main__`/`server` calls it.
"""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog
from structlog.typing import Processor

# A value from outside must neither forge a line nor flood the log.
_MAX_VALUE_CHARACTERS = 2000
# Control characters, line and paragraph separators, and the marks that reorder text on a terminal.
_ESCAPED = {
    code: f"\\u{code:04x}"
    for code in (
        *range(0x20),
        *range(0x7F, 0xA0),
        *range(0x200B, 0x2010),
        *range(0x2028, 0x202F),
        *range(0x2066, 0x206A),
        0xFEFF,
    )
}


def escape_controls(text: str) -> str:
    r"""`text` on one line, with control characters shown as \uXXXX, cut to a bounded length."""
    if len(text) > _MAX_VALUE_CHARACTERS:
        text = text[:_MAX_VALUE_CHARACTERS] + "..."
    return text.translate(_ESCAPED)


def configure_logging(*, json: bool, level: str = "info") -> None:
    """Send structlog events and stdlib records (grpc's, asyncio's) to stderr in one format.

    Args:
        json: one JSON object a line; otherwise a readable console line.
        level: "debug", "info", "warning" or "error".
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _escape_values,
    ]
    # No local variables in tracebacks: they hold prompts.
    renderer: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json
        else [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    )
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # A line and its end in one write: the engine process writes to the same file.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    handler.addFilter(_tells_no_vanished_client)
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.INFO))  # third parties' debug lines are not ours to print


def _tells_no_vanished_client(record: logging.LogRecord) -> bool:
    """Whether to keep a record: grpc tells with a traceback of a client that went away while we sent.

    Clients may do that; the call's own `request.finished` line says so.
    """
    return not (isinstance(record.msg, str) and record.msg.startswith("ExecuteBatchError raised in core"))


def _escape_values(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = escape_controls(value)
    return event
