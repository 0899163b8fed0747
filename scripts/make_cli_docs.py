"""Write docs/cli.md from the command line itself, so that the reference cannot drift from the program.

python scripts/make_cli_docs.py          write the page
python scripts/make_cli_docs.py --check  exit 1 if the page on disk is another one (a test does this too)
"""

import sys
from pathlib import Path
from typing import Any

import typer

from sparkbench.cli import app

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
HEAD = """# The command line

Written by `scripts/make_cli_docs.py`; do not edit. `sparkbench COMMAND --help` shows the same.

Results go to stdout, everything else to stderr; `--json` prints one JSON document. `NO_COLOR` switches colour
off, `FORCE_COLOR` on; `SPARKBENCH_TRACEBACK=1` adds the traceback of an unexpected error.

| exit code | meaning |
| --- | --- |
| 0 | done |
| 1 | a verdict: an output differs from autoregressive decoding's |
| 2 | usage: a bad value, file or name |
| 3 | results that cannot be compared |
| 4 | failed while running: model, memory, disk, network, or an unexpected error |
| 130 | interrupted; finished units are kept |
| 141 | the reader of a pipe went away |
"""


def page() -> str:
    """The whole page."""
    root: Any = typer.main.get_command(app)
    sections = [section(f"sparkbench {name}", command) for name, command in commands(root)]
    return "\n".join([HEAD, *sections])


def commands(group: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """All commands that do something, with their names behind `sparkbench`, in the order of `--help`."""
    found = []
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found += commands(command, f"{prefix}{name} ")
        else:
            found.append((prefix + name, command))
    return found


def section(name: str, command: Any) -> str:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    usage = " ".join([name, *(usage_of(param) for param in arguments), "[OPTIONS]"])
    lines = [f"## {name}", "", paragraphs(command.help), "", f"    {usage}", ""]
    lines += ["| | |", "| --- | --- |", *(row(param) for param in command.params)]
    return "\n".join(lines) + "\n"


def paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def usage_of(param: Any) -> str:
    name = param.metavar or param.name.upper()
    return name if param.required else f"[{name.strip('[]')}]"


def row(param: Any) -> str:
    if param.param_type_name == "argument":
        name = usage_of(param)
    else:
        name = " ".join([", ".join(param.opts), *([param.metavar] if param.metavar else [])])
    return "| `{}` | {} |".format(name.replace("|", "\\|"), param.help)


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        return 0 if PAGE.exists() and PAGE.read_text() == page() else 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
