"""Exit codes, which scripts may rely on, and what to do about each kind of failure."""

from enum import IntEnum

from lorikeet_client import (
    AuthError,
    CallError,
    DeadlineError,
    LorikeetError,
    NotFoundError,
    UnavailableError,
)


class ExitCode(IntEnum):
    """What the command ended with."""

    OK = 0
    # The service, or this command before sending, refused; or the work failed.
    FAILED = 1
    # The command line itself is wrong (typer's own code).
    USAGE = 2
    NOT_FOUND = 3
    # No answer from a service: not running, draining, or the wrong address.
    UNAVAILABLE = 4
    # The token is missing, unknown, or not allowed to do this.
    DENIED = 5
    # The time given with --timeout was up.
    TIMEOUT = 6
    # Ctrl-C.
    INTERRUPTED = 130


_UNAVAILABLE_ADVICE = (
    "is the service running, and is the address right? LORIKEET_INFERENCE and LORIKEET_MANAGER, or "
    "--inference and --manager, name it; `lorikeet up --model-dir DIR` starts a local stack"
)
_AUTH_ADVICE = (
    "set LORIKEET_TOKEN or --token to a token that may do this; `lorikeet up` prints one, and an admin makes "
    "others with `lorikeet tenants token TENANT`"
)
_BY_ERROR: tuple[tuple[type[LorikeetError], ExitCode, str], ...] = (
    (
        NotFoundError,
        ExitCode.NOT_FOUND,
        "`lorikeet adapters list` shows what there is",
    ),
    (
        UnavailableError,
        ExitCode.UNAVAILABLE,
        _UNAVAILABLE_ADVICE,
    ),
    (
        AuthError,
        ExitCode.DENIED,
        _AUTH_ADVICE,
    ),
    (DeadlineError, ExitCode.TIMEOUT, "give it more time with --timeout SECONDS"),
)


def exit_code(error: LorikeetError) -> ExitCode:
    """The code that stands for an error."""
    return next((code for kind, code, _ in _BY_ERROR if isinstance(error, kind)), ExitCode.FAILED)


# Where a class of errors has more than one thing to say.
_BY_REASON = {
    "TENANT_NOT_FOUND": (
        "`lorikeet tenants list` shows what there is, `lorikeet tenants create` makes one (admins only)"
    ),
}


def advice(error: LorikeetError) -> str:
    """What to do about it; empty where there is nothing to say or the service's message says it."""
    if "`lorikeet " in str(error):
        return ""
    if isinstance(error, CallError) and error.retry_after_s is not None:
        return f"try again in {error.retry_after_s:g} s"
    if isinstance(error, CallError) and error.reason in _BY_REASON:
        return _BY_REASON[error.reason]
    return next((words for kind, _, words in _BY_ERROR if isinstance(error, kind)), "")
