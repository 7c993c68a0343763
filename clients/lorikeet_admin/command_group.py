"""The root of the command tree: a wrong command line with --json is reported as JSON too."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from lorikeet_admin.exits import ExitCode
from lorikeet_admin.output import Output

# Unknown commands and options, missing and bad values. typer shows only this subclass of it.
_UsageError: Any = typer.BadParameter.__base__


class CommandGroup(TyperGroup):
    """What programs read on stdout is a JSON document even if they called wrongly; stderr has the words."""

    _wants_json = False

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the options before the command's name."""
        self._wants_json = "--json" in args
        with self._reported():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Parse the rest and run the command."""
        with self._reported():
            return super().invoke(ctx)

    @contextmanager
    def _reported(self) -> Generator[None]:
        try:
            yield
        except _UsageError as error:
            if self._wants_json and _has_json_flag(error.ctx):
                message: str = error.format_message()
                fields = {"message": message, "advice": "see --help", "exit_code": int(ExitCode.USAGE)}
                Output(as_json=True).json_line({"error": fields})
            raise


def _has_json_flag(context: Any) -> bool:
    """False for a command whose --json takes a file."""
    parameters: Sequence[Any] = context.command.params if context is not None else ()
    return not any("--json" in parameter.opts and not parameter.is_flag for parameter in parameters)
