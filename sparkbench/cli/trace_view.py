"""How `sparkbench trace` looks: a line a round with what it committed, and one draft tree.

With colour, accepted draft tokens are green and the target's own tokens bold yellow; without, they are
`[draft]` and `<own>`. Token text is literal (console.py), so a newline is `\\n` and a token stays on its
line.
"""

import sys
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from sparkbench.cli.console import literal, show, wants_colour
from sparkbench.tracing import Node, Token, Trace, TracedRound

DRAFT = ("green", "bold green")  # alternating, so that neighbours can be told apart
OWN = "bold yellow"


def show_trace(trace: Trace) -> None:
    """Print a trace on stdout."""
    colour = wants_colour(sys.stdout)
    what = [f"target {trace.target}", f"method {trace.variant}", f"temperature {trace.temperature:g}"]
    if trace.budget is not None:
        what.insert(2, f"budget {trace.budget}")
    show(literal(", ".join(what)), "")
    show(Text.assemble(("prompt  ", "bold"), literal(trace.prompt)), wrap=False)
    show(Text.assemble(("output  ", "bold"), literal(trace.text)), "", wrap=False)
    show(_rounds(trace, colour), "")
    example = Token(0, "so")
    legend = Text("accepted draft tokens ").append_text(_draft(example, 0, colour))
    show(legend.append(", the target's own ").append_text(_own(example, colour)), "")
    if trace.shown is not None:
        _show_tree(trace.rounds[trace.shown], colour)
    elif not any(done.drafted for done in trace.rounds):
        show("no tree: nothing was drafted", "")
    show(_stats(trace))


def _rounds(trace: Trace, colour: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("ROUND", "DRAFTED", "ACCEPTED"):
        table.add_column(name, justify="right")
    table.add_column("COMMITTED", overflow="fold")
    table.add_row("prefill", "", "", _own(trace.first, colour))
    for done in trace.rounds:
        text = Text()
        for place, token in enumerate(done.draft):
            text.append_text(_draft(token, place, colour))
        if done.bonus is not None:
            text.append_text(_own(done.bonus, colour))
        table.add_row(str(done.index), str(done.drafted), str(done.accepted), text)
    return table


def _draft(token: Token, place: int, colour: bool) -> Text:
    return Text(_shown(token), DRAFT[place % 2]) if colour else Text(f"[{_shown(token)}]")


def _own(token: Token, colour: bool) -> Text:
    return Text(_shown(token), OWN) if colour else Text(f"<{_shown(token)}>")


def _shown(token: Token) -> str:
    """A token's text, or its id where it is only part of a character."""
    return f"#{token.id}" if "\ufffd" in token.text else literal(token.text)


def _show_tree(done: TracedRound, colour: bool) -> None:
    """The tree of a round: `p` given the parent, `path` from the root, `*` and green on the accepted path."""
    kind = "cold, " if done.cold else ""
    show(f"draft tree of round {done.index} ({kind}{done.drafted} nodes, * accepted):")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for name in ("DEPTH", "P", "PATH"):
        table.add_column(name, justify="right")
    table.add_column("TOKEN", overflow="fold")
    for node, guide in _walk(done.nodes):
        style = "green" if node.accepted else ""
        table.add_row(
            "*" if node.accepted else "",
            str(node.depth),
            _probability(node.probability),
            _probability(node.path_probability),
            Text.assemble((guide, "dim"), (f"'{_shown(node.token)}'", style)),
        )
    show(table)
    if done.bonus is not None:
        show(Text("the target went on with ").append_text(_own(done.bonus, colour)), "")
    else:
        show("the output ended inside this round", "")


def _walk(nodes: Sequence[Node]) -> Iterator[tuple[Node, str]]:
    """Nodes in reading order, likelier siblings first, each with the guides that lead to it."""
    children: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        if node.parent >= 0:
            children.setdefault(node.parent, []).append(index)
    branch, last, passing = _guides()
    stack = [(0, "", "")]
    while stack:
        index, before, own = stack.pop()
        yield nodes[index], before + own
        inner = before if index == 0 else before + ("  " if own == last else passing)
        below = sorted(children.get(index, ()), key=lambda child: -(nodes[child].path_probability or 0.0))
        marks = [branch] * (len(below) - 1) + [last] * bool(below)
        stack.extend((child, inner, mark) for child, mark in reversed(list(zip(below, marks, strict=True))))


def _guides() -> tuple[str, str, str]:
    guides = ("\u251c\u2500", "\u2514\u2500", "\u2502 ")
    try:
        "".join(guides).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "|-", "`-", "| "
    return guides


def _probability(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _stats(trace: Trace) -> str:
    tau = "n/a" if trace.tau is None else f"{trace.tau:.2f}"
    return (
        f"{trace.tokens_out} tokens in {len(trace.rounds)} rounds and {trace.forwards} target forwards, "
        f"tau {tau}, ended by {trace.stop_reason}"
    )
