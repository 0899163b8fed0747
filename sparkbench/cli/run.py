"""`sparkbench run`: a sweep of methods over prompts, checked against autoregressive decoding.

Options become a SweepConfig (those on the command line win over a TOML file's), which checks its own values
before any model loads. What is measured, and how it is stored and summed up, is the business of sweep.py,
runner.py and report/.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from sparkbench.cli.console import literal, note, print_json, show, table
from sparkbench.cli.options import (
    Device,
    Dtype,
    Json,
    MinP,
    RepetitionPenalty,
    Revision,
    Target,
    Thinking,
    Threads,
    TopK,
    TopP,
    given,
    one_of,
    pairs,
    switch,
    text,
)

IMPLIED_LIMIT = 4
Texts = list[str] | None


def command(
    method: Annotated[
        Texts,
        typer.Option("--method", "-m", metavar="LIST", help="Methods, name[:key=value...], or all. Default: all."),
    ] = None,
    dataset: Annotated[
        Texts,
        typer.Option("--dataset", "-d", metavar="LIST", help="Data sets. Default: all that --data has."),
    ] = None,
    temperature: Annotated[
        Texts, typer.Option("--temperature", metavar="LIST", help="0 is greedy. Default: 0.")
    ] = None,
    budget: Annotated[
        Texts,
        typer.Option("--budget", metavar="LIST", help="Draft nodes a round, for tree methods. Default: 64."),
    ] = None,
    batch_size: Annotated[
        Texts, typer.Option("--batch-size", metavar="LIST", help="Prompts decoded together. Default: 1.")
    ] = None,
    target: Target = None,
    drafter: Annotated[
        Texts,
        typer.Option("--drafter", metavar="METHOD=ID", help="A method's drafter; repeat. Default: the target's own."),
    ] = None,
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FROM", help="bundled, hub, package, a folder or FILE.jsonl. Default: bundled."),
    ] = None,
    prompt: Annotated[
        Texts,
        typer.Option("--prompt", metavar="TEXT", help="A prompt of your own instead of data sets; repeat."),
    ] = None,
    thinking: Thinking = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="N",
            help=f"Prompts a data set. Default: all; {IMPLIED_LIMIT} when no option says what to run.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", metavar="N", help="Where an output ends at the latest. Default: 128."),
    ] = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    rule: Annotated[
        str | None,
        typer.Option(
            "--rule",
            metavar="RULE",
            help="match or rejection, which is for sampled drafts; a method's option too. Default: match.",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Outputs go on to --max-new-tokens: equal work for all.")
    ] = False,
    arrivals: Annotated[
        str | None,
        typer.Option(
            "--arrivals",
            metavar="poisson:R",
            help="R requests a second join while others run, at most --batch-size at a time.",
        ),
    ] = None,
    switch_to_ar: Annotated[
        str | None,
        typer.Option(
            "--switch-to-ar",
            metavar="N",
            help="Larger batches are not drafted for: a number, auto (the measured break-even), off. Default: off.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="Of the draw of prompts and the noise. Default: 0."),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", metavar="N", help="Times each prompt is decoded. Default: 1.")
    ] = None,
    threads: Threads = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Where results go. Default: in results/, named by the settings."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE.toml", help="A sweep; options given here win over it."),
    ] = None,
    on: Annotated[
        str, typer.Option("--on", metavar="WHERE", help="local. Default: local.", show_default=False)
    ] = "local",
    strict: Annotated[bool, typer.Option("--strict", help="Refuse a prompt file that has bad lines.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run; load no model.")] = False,
    json: Json = False,
) -> None:
    """Run a sweep and compare the methods with autoregressive decoding.

    LIST is separated by commas, or the option repeated. The same command again continues where it stopped,
    or shows the finished results.
    """
    one_of("--on", on, ("local",))
    chosen = given(
        methods=method,
        datasets=dataset,
        temperatures=temperature,
        budgets=budget,
        batch_sizes=batch_size,
        target=target,
        drafters=drafter and pairs("--drafter", drafter),
        revision=revision,
        dtype=dtype,
        device=device,
        data=data,
        prompts=prompt and tuple(text("--prompt", each) for each in prompt),
        thinking=switch("--thinking", thinking),
        limit=limit,
        max_new_tokens=max_new_tokens,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        rule=rule,
        ignore_eos=ignore_eos or None,
        arrivals=arrivals,
        switch_to_ar=switch_to_ar,
        seed=seed,
        repeats=repeats,
        threads=threads,
        strict=strict or None,
    )

    from sparkbench import sweep

    fields = chosen if config is None else {**sweep.SweepConfig.from_toml(config), **chosen}
    if not fields:
        fields = {"limit": IMPLIED_LIMIT}
        note(f"no option says what to run: --limit {IMPLIED_LIMIT} is implied")
    swept = sweep.SweepConfig(**fields)
    if dry_run:
        show_plan(sweep.dry_run(swept), json)
        return

    from sparkbench import runner
    from sparkbench.cli.progress import progress
    from sparkbench.report.summary import summarise

    place = sweep.default_out(swept) if out is None else out
    try:
        with progress() as shown:
            outcome = runner.run(swept, place, shown)
    except KeyboardInterrupt:
        note(f"sparkbench: interrupted; finished units are kept in {place}: the same command continues there")
        raise typer.Exit(130) from None
    summary = summarise([place])
    for message in outcome.notes:
        if message not in summary.warnings:
            note(message)
    if json:
        print_json({"outcome": outcome, "exit_code": outcome.exit_code, "summary": summary.document()})
    else:
        show(*summary.tables())
        done = f"{outcome.measured} of {outcome.units} units measured now"
        again = "" if outcome.measured else "; another --out measures again"
        show("", literal(f"results in {place} ({done}{again})"), wrap=False)
    if outcome.violations:
        note(f"sparkbench: {outcome.violations} outputs are not what autoregressive decoding returns")
    if outcome.failed:
        note(f"sparkbench: {outcome.failed} rows failed; their column `error` says why")
    raise typer.Exit(outcome.exit_code)


def show_plan(plan: dict[str, Any], json: bool) -> None:
    if json:
        print_json(plan)
        return
    show(literal("methods: " + ", ".join(plan["variants"])), "")
    numbers = ("temperature", "batch_size", "prompts", "generations")
    rows = [[unit["dataset"], *(str(unit[name]) for name in numbers)] for unit in plan["units"]]
    show(table(("dataset", *numbers), rows, right=numbers), "")
    for message in plan["notes"]:
        note(message)
    show(f"{len(rows)} units, {plan['prompts']} prompts, {plan['generations']} generations; nothing was run")
