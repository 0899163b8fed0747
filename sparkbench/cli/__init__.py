"""The command line: `sparkbench COMMAND`, one file a command; this one holds the app and the entry point.

`main` owns what all commands share: the environment that must be set before torch is imported, streams that
can print any text, and the exit codes. 0: done. 1: a verdict. 2: usage, a bad file or name. 3: not
comparable. 4: failed while running, uncaught exceptions included. 130: interrupted. 141: the reader of a
pipe went away. An error is one line on stderr; SPARKBENCH_TRACEBACK=1 adds the traceback of an uncaught one.

Nothing heavy is imported here: torch, transformers, pyarrow and rich load inside the commands that need
them, so that `sparkbench --help` answers at once.
"""

import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from sparkbench import __version__
from sparkbench.cli import doctor, listing, ngram, profile, run, trace, train
from sparkbench.cli.console import note, prepare_streams
from sparkbench.errors import SparkbenchError

ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",  # idle OpenMP threads must not spin: that distorts CPU times
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
TRACEBACK = "SPARKBENCH_TRACEBACK"
INTERRUPTED = 130
PIPE_CLOSED = 141

app = typer.Typer(
    name="sparkbench",
    help="Runs, checks, times and compares speculative-decoding methods on transformers models.",
    epilog="Try `sparkbench run`: it needs no GPU, no network and no download.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.command)
app.command("list")(listing.command)
app.command("doctor")(doctor.command)
app.command("trace")(trace.command)
app.command("profile")(profile.command)
app.add_typer(train.app, name="train")
app.add_typer(ngram.app, name="ngram")


@app.callback(invoke_without_command=True)
def sparkbench(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        print(f"sparkbench {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` are those after the program's name."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    prepare_streams()
    try:
        code = _invoke(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        note("sparkbench: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit complains
        return PIPE_CLOSED
    except SparkbenchError as error:
        return _fail(str(error), error.exit_code)
    except Exception as error:
        return _fail_unexpected(error)


def _invoke(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    try:
        with command.make_context("sparkbench", arguments) as context:
            command.invoke(context)
        return 0
    except typer.Exit as finished:
        return finished.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        # What marks the parser's own errors in all releases of Typer; their class has moved between them.
        if not hasattr(error, "format_message"):
            raise
        where = getattr(error, "ctx", None)
        hint = f" (see {where.command_path} --help)" if where else ""
        return _fail(f"{error.format_message().rstrip('.')}{hint}", 2)


def _fail(message: str, code: int) -> int:
    note("sparkbench: error: " + re.sub(r"[ \t\r\n]+", " ", message).strip())
    return code


def _fail_unexpected(error: Exception) -> int:
    if os.environ.get(TRACEBACK):
        import traceback

        for line in "".join(traceback.format_exception(error)).splitlines():
            note(line)
        return _fail(f"{type(error).__name__}: {error}", 4)
    return _fail(f"{type(error).__name__}: {error} ({TRACEBACK}=1 shows the traceback)", 4)
