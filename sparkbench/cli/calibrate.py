"""`sparkbench train calibration`: temperatures for a DSpark drafter's confidences. The work is in sparkbench/train/."""

from pathlib import Path
from typing import Annotated, Any

import typer

from sparkbench.cli.console import literal, note, print_json, show, table
from sparkbench.cli.options import Device, Dtype, Json, Revision, Target, check_file, given


def command(
    drafter: Annotated[
        str, typer.Option("--drafter", metavar="ID", help="Default: the target's own.", show_default=False)
    ] = "",
    target: Target = None,
    revision: Revision = None,
    dataset: Annotated[
        list[str] | None, typer.Option("--dataset", metavar="LIST", help="Data sets. Default: all of --data.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="WHERE", help="bundled, hub or a path. Default: bundled.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", help="Prompts a data set. Default: all.")] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", help="Of the target's draws. Default: 0.", show_default=False)
    ] = 0.0,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", help="Of each answer. Default: 128.", show_default=False)
    ] = 128,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Of draws and noise. Default: 0.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Default: calibration.json.", show_default=False)
    ] = Path("calibration.json"),
    json: Json = False,
) -> None:
    """Fit temperatures to a DSpark drafter's confidences, on prompts that you do not report on.

    Two thirds of the prompts are fitted on, the table is of the others. Use the file as `dspark:calibration=FILE`,
    or put it into the drafter's folder.
    """
    check_file("--out", out)

    from sparkbench import catalog, drafters
    from sparkbench.models import load_target, set_threads
    from sparkbench.prompts import encode_chat, load_prompts
    from sparkbench.settings import SweepConfig
    from sparkbench.train.calibrate import calibrate
    from sparkbench.train.recipe import CalibrationRecipe

    config = SweepConfig(
        methods=("dspark",),
        temperatures=(temperature,),
        max_new_tokens=max_new_tokens,
        **given(
            target=target,
            revision=revision,
            datasets=dataset,
            data=data,
            limit=limit,
            seed=seed,
            dtype=dtype,
            device=device,
        ),
    )
    source = catalog.resolve_drafter("dspark", config.target, drafter)
    loaded = load_target(config)
    set_threads(None, loaded)
    found = drafters.load("dspark", source, loaded)
    prompts: list[tuple[int, ...]] = []
    for name in config.datasets:
        for prompt in load_prompts(name, config.data, limit=config.limit, seed=config.seed).prompts:
            ids = encode_chat(loaded.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
            if ids and len(ids) + max_new_tokens <= loaded.max_context:
                prompts.append(ids)
    prompts = prompts[::3] + prompts[1::3] + prompts[2::3]  # every set among those fitted on and those judged on
    note(f"sparkbench: {len(prompts)} prompts")
    recipe = CalibrationRecipe(temperature=config.temperatures[0], max_new_tokens=max_new_tokens)
    calibration, facts = calibrate(loaded, found, prompts, recipe, config.seed)
    calibration.save(out)
    if json:
        print_json({"out": out, "temperatures": calibration.temperatures, **facts})
        return
    show(literal(f"{out}: {facts['rounds_fitted']} rounds fitted on, {facts['rounds_judged']} judged on"), wrap=False)
    header = ("position", "temperature", "ECE before", "ECE after", "AUROC")
    rows = [_row(row, value) for row, value in zip(facts["judged"], calibration.temperatures, strict=True)]
    show(table(header, rows, right=header), "")


def _row(row: dict[str, Any], temperature: float) -> list[str]:
    area = "-" if row["auroc"] is None else f"{row['auroc']:.3f}"
    return [str(row["position"]), f"{temperature:.2f}", f"{row['ece_before']:.1%}", f"{row['ece_after']:.1%}", area]
