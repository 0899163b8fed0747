"""`sparkbench trace PROMPT`: decode one prompt and show which round committed what, and a draft tree.

What is recorded, and how, is `sparkbench/tracing.py`; `trace_view.py` prints it, `--json` prints it as it is.
"""

from typing import Annotated

import typer

from sparkbench.cli.console import print_json
from sparkbench.cli.options import (
    Device,
    Dtype,
    Json,
    MinP,
    RepetitionPenalty,
    Revision,
    Target,
    Thinking,
    TopK,
    TopP,
    given,
    switch,
    text,
)


def command(
    prompt: Annotated[str, typer.Argument(help="What the user says.", show_default=False)],
    method: Annotated[
        str,
        typer.Option(
            "--method", "-m", metavar="NAME", help="name[:key=value...]. Default: ddtree.", show_default=False
        ),
    ] = "ddtree",
    budget: Annotated[
        int,
        typer.Option(
            "--budget",
            metavar="N",
            help="Draft nodes a round, for tree methods. Default: 16.",
            show_default=False,
        ),
    ] = 16,
    temperature: Annotated[
        float | None, typer.Option("--temperature", metavar="T", help="0 is greedy. Default: 0.")
    ] = None,
    round_: Annotated[
        int | None,
        typer.Option("--round", metavar="N", help="Whose tree is shown. Default: the first warm one with a branch."),
    ] = None,
    target: Target = None,
    drafter: Annotated[
        str | None,
        typer.Option("--drafter", metavar="ID", help="A folder or hub id. Default: the target's own."),
    ] = None,
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
    thinking: Thinking = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            help="Where the output ends at the latest. Default: 64.",
            show_default=False,
        ),
    ] = 64,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Of the noise. Default: 0.")] = None,
    json: Json = False,
) -> None:
    """Decode one prompt and show which round committed what, and a draft tree."""
    prompt, think = text("PROMPT", prompt), switch("--thinking", thinking)

    from sparkbench.cli.trace_view import show_trace
    from sparkbench.registry import Variant
    from sparkbench.settings import SweepConfig
    from sparkbench.tracing import trace_prompt

    settings = SweepConfig(
        methods=(method,),
        budgets=(budget,),
        prompts=(prompt,),
        max_new_tokens=max_new_tokens,
        **given(
            temperatures=temperature,
            target=target,
            drafters=drafter and {Variant.parse(method).method: drafter},
            revision=revision,
            dtype=dtype,
            device=device,
            thinking=think,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        ),
    )
    result = trace_prompt(settings, round_)
    if json:
        print_json(result)
    else:
        show_trace(result)
