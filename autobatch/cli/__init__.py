"""The command `autobatch`: one module a command; each parses, calls one function, and prints."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import click

from autobatch.cli.config import pyproject_defaults
from autobatch.cli.options import debug_asked, debug_option
from autobatch.errors import AutobatchError, Stopped, UserCodeError

if TYPE_CHECKING:
    from typing import NoReturn

COMMANDS = ("tune", "probe", "emit", "doctor")


class Commands(click.Group):
    """Commands that are imported when they are asked for, and errors that are one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 -- click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"autobatch.cli.{cmd_name}").command
        return command

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        """Run, and leave with the exit code; click's own complaints are one line as ours are."""
        try:
            code = super().main(*args, **(extra | {"standalone_mode": False}))
        except click.UsageError as error:
            where = error.ctx.command_path if error.ctx else "autobatch"
            _leave(f"{error.format_message().rstrip('.')}; see {where} --help", error.exit_code)
        except click.ClickException as error:
            _leave(error.format_message(), error.exit_code)
        except click.Abort:
            _leave("interrupted", Stopped.exit_code)
        sys.exit(code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            ctx.default_map = pyproject_defaults()
            return super().invoke(ctx)
        except AutobatchError as error:
            if debug_asked(ctx):
                raise
            if isinstance(error, UserCodeError):
                click.echo(error.traceback_text.rstrip(), err=True)
            _leave(str(error), error.exit_code)


def _leave(message: str, exit_code: int) -> NoReturn:
    click.echo(f"autobatch: {message}", err=True)
    sys.exit(exit_code)


@click.group(
    "autobatch",
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(version("torch-autobatch"), prog_name="autobatch")
@debug_option
@click.pass_context
def main(ctx: click.Context) -> None:
    """Find the micro-batch and accumulation split that reaches your effective batch at the most tokens per second.

    autobatch tune --target 256
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
