"""`sparkbench train embedded`: makes the embedded family from nothing. The work is in sparkbench/train/."""

from pathlib import Path
from typing import Annotated

import typer

from sparkbench.cli.console import literal, note, print_json, show
from sparkbench.cli.doctor import usable_cores
from sparkbench.cli.options import Json
from sparkbench.errors import UsageError

app = typer.Typer(help="Train models from a recipe.", rich_markup_mode=None)


@app.callback()
def train() -> None:
    """Train models from a recipe."""


@app.command("embedded")
def embedded(
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="FOLDER",
            help="Where the family goes. Default: embedded.",
            show_default=False,
        ),
    ] = Path("embedded"),
    work: Annotated[
        Path | None,
        typer.Option("--work", metavar="FOLDER", help="For unfinished stages. Default: OUT-work."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="CPU threads. Default: all cores.")
    ] = None,
    json: Json = False,
) -> None:
    """Train the embedded target and its drafters: about 70 minutes on two cores.

    The same command again continues where it stopped.
    """
    threads = usable_cores() if threads is None else threads
    if threads < 1:
        raise UsageError(f"--threads {threads} is not allowed: 1 or above")
    work = out.with_name(f"{out.name}-work") if work is None else work
    for folder in (out, work):
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file, and a folder is needed")

    from sparkbench.train import embedded as family

    try:
        family.train(work, out, threads=threads, progress=note)
    except KeyboardInterrupt:
        note(f"sparkbench: interrupted; what is done is kept in {work}: the same command continues there")
        raise typer.Exit(130) from None
    if json:
        print_json({"out": out, "work": work})
    else:
        show(literal(f"the family is in {out}"), wrap=False)
