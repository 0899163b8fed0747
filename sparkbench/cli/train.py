"""`sparkbench train`: the embedded family from nothing, or a drafter from a recipe (sparkbench/train/)."""

from pathlib import Path
from typing import Annotated, Any

import typer

from sparkbench.cli import calibrate
from sparkbench.cli.console import literal, note, print_json, show, table
from sparkbench.cli.options import Device, Json
from sparkbench.errors import UsageError
from sparkbench.host import usable_cores

app = typer.Typer(help="Train models from a recipe.", rich_markup_mode=None)


@app.callback()
def train() -> None:
    """Train models from a recipe."""


app.command("calibration")(calibrate.command)


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
    """Train the embedded target and its drafters: about 90 minutes on two cores.

    The same command again continues where it stopped.
    """
    threads = usable_cores() if threads is None else threads
    if threads < 1:
        raise UsageError(f"--threads {threads} is not allowed: 1 or above")
    work = work_folder(out, work)

    from sparkbench.train import embedded as family

    try:
        family.train(work, out, threads=threads, progress=note)
    except KeyboardInterrupt:
        raise interrupted(work) from None
    if json:
        print_json({"out": out, "work": work})
    else:
        show(literal(f"the family is in {out}"), wrap=False)


@app.command("drafter")
def drafter(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="FILE.toml or the name of a bundled recipe.")],
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="ID", help="embedded, a folder or a hub id. Default: the recipe's."),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option("--start", metavar="ID", help="The drafter to begin with. Default: the recipe's."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FROM", help="FILE.jsonl of conversations, or hub. Default: the recipe's."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Where the drafter goes. Default: the recipe's name.")
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option("--work", metavar="FOLDER", help="For features and training state. Default: OUT-work."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", help="Steps of the optimiser. Default: the recipe's.")
    ] = None,
    device: Device = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="TYPE", help="float32 or bfloat16. Default: the recipe's.")
    ] = None,
    json: Json = False,
) -> None:
    """Train a DSpark or DART drafter for a target by a recipe.

    A DSpark drafter begins with another one; a DART drafter with random weights, or with another one. The target runs
    once over all conversations, and what it says is kept on disk (the size is printed first). The same command again
    continues where it stopped.
    """
    from sparkbench.train import recipe_file

    file = recipe_file.find(recipe)
    chosen = recipe_file.read(file).override(target, start, data, steps, dtype)
    out = Path(file.stem) if out is None else out
    work = work_folder(out, work)

    from sparkbench.train import drafter as training

    try:
        record = training.train(chosen, out, work, device=device or "auto", progress=note)
    except KeyboardInterrupt:
        raise interrupted(work) from None
    if json:
        print_json({"out": out, "work": work} | record)
    else:
        show_acceptance(record["held_out"])
        show(literal(f"the drafter is in {out}"), wrap=False)


def show_acceptance(held_out: dict[str, Any]) -> None:
    """Acceptance on held-out conversations before and after training: tau, then slot by slot."""
    before, after = held_out["start"], held_out["trained"]
    slots = zip(before["acceptance"], after["acceptance"], strict=True)
    rows = [("tau", before["tau"], after["tau"]), *((f"slot {slot}", *pair) for slot, pair in enumerate(slots, 1))]
    cells = [[name, f"{first:.3f}", f"{second:.3f}"] for name, first, second in rows]
    show(table(("held out", "start", "trained"), cells, right=("start", "trained")), "")


def work_folder(out: Path, work: Path | None) -> Path:
    """The folder for unfinished work. UsageError: it or `out` is a file."""
    if not out.name:
        raise UsageError(f"--out {str(out)!r} is not allowed: the name of a folder")
    work = out.with_name(f"{out.name}-work") if work is None else work
    if work.resolve() == out.resolve():
        raise UsageError(f"--work {work} is not allowed: another folder than --out")
    for folder in (out, work):
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file, and a folder is needed")
    return work


def interrupted(work: Path) -> typer.Exit:
    note(f"sparkbench: interrupted; what is done is kept in {work}: the same command continues there")
    return typer.Exit(130)
