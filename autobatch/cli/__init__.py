"""The command `autobatch`: one module a command; each parses, calls one function, and prints."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from typing import Any

import click

from autobatch.cli.config import pyproject_defaults
from autobatch.errors import AutobatchError, UserCodeError

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

    def invoke(self, ctx: click.Context) -> Any:
        try:
            ctx.default_map = pyproject_defaults()
            return super().invoke(ctx)
        except AutobatchError as error:
            if ctx.params.get("debug"):
                raise
            if isinstance(error, UserCodeError):
                click.echo(error.traceback_text.rstrip(), err=True)
            click.echo(f"autobatch: {error}", err=True)
            sys.exit(error.exit_code)
        except BrokenPipeError:
            sys.exit(1)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("torch-autobatch"), prog_name="autobatch")
@click.option("--debug", is_flag=True, help="Show autobatch's own traceback when it stops with an error.")
def main(debug: bool) -> None:  # noqa: FBT001 -- read from the context
    """Find the micro-batch and accumulation split that reaches your effective batch at the most tokens per second.

    autobatch tune --target 256
    """
