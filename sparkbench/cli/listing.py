"""`sparkbench list`: the methods, data sets and targets there are, and where each comes from."""

from dataclasses import asdict, fields
from typing import Annotated, Any

import typer

from sparkbench.cli.console import print_json, show, table
from sparkbench.cli.options import Json, one_of

KINDS = ("methods", "datasets", "targets")


def command(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="[methods|datasets|targets]", help="What to list. Default: all.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """List methods, data sets and targets, with where each comes from."""
    wanted = KINDS if kind is None else (one_of("list", kind, KINDS),)
    found = {name: COLLECT[name]() for name in wanted}
    if json:
        print_json(found)
        return
    for name, entries in found.items():
        SHOW[name](entries)


def methods() -> list[dict[str, Any]]:
    from sparkbench import catalog, registry

    entries = []
    for name in registry.names():
        method = registry.get(name)
        kind = method.drafter_kind
        options = {field.name.replace("_", "-"): field.default for field in fields(method.Options)}
        entries.append(
            {
                "name": name,
                "summary": method.summary,
                "takes_budget": method.takes_budget,
                "options": options,
                "drafter_kind": kind,
                "drafters": {} if kind is None else catalog.drafters_of(kind),
            }
        )
    return entries


def show_methods(entries: list[dict[str, Any]]) -> None:
    rows = []
    for entry in entries:
        options = " ".join(f"{name}={'' if value is None else value}" for name, value in entry["options"].items())
        rows.append(
            [
                entry["name"],
                "yes" if entry["takes_budget"] else "no",
                entry["drafter_kind"] or "none",
                options,
            ]
        )
    show(table(("method", "budget", "drafter", "options"), rows), "")
    show(table(("method", "what"), [[entry["name"], entry["summary"]] for entry in entries]), "")


def datasets() -> list[dict[str, Any]]:
    from importlib.util import find_spec

    from sparkbench import prompts

    bundled = prompts.available()
    entries = []
    for name in prompts.dataset_names():
        spec = prompts.spec(name)
        package = spec.package
        entries.append(
            {
                "name": name,
                "title": spec.title,
                "domain": spec.domain,
                "licence": spec.licence,
                "bundled_rows": len(prompts.load_prompts(name).prompts) if name in bundled else 0,
                "hub": {**asdict(spec.hub), "rows": spec.rows},
                "package": package and {"name": package.name, "installed": find_spec(package.module) is not None},
            }
        )
    return entries


def show_datasets(entries: list[dict[str, Any]]) -> None:
    rows = []
    for entry in entries:
        package = entry["package"]
        state = "" if package is None else f"{package['name']}{'' if package['installed'] else ' (not installed)'}"
        numbers = [str(entry["bundled_rows"]), str(entry["hub"]["rows"])]
        rows.append([entry["name"], entry["domain"], *numbers, entry["hub"]["repo"], state])
    show(table(("dataset", "domain", "bundled", "rows", "hub", "package"), rows, right=("bundled", "rows")), "")
    titles = [[entry["name"], entry["title"], entry["licence"]] for entry in entries]
    show(table(("dataset", "title", "licence"), titles), "")


def targets() -> list[dict[str, Any]]:
    from sparkbench import catalog

    return [asdict(target) for target in catalog.targets()]


def show_targets(entries: list[dict[str, Any]]) -> None:
    show(table(("target", "what"), [[entry["name"], entry["note"]] for entry in entries]), "")
    rows = [
        [entry["name"], kind, source]
        for entry in entries
        for kind, source in {**entry["drafters"], **entry["named"]}.items()
    ]
    rows += [[entry["name"], "n-gram index", entry["index"]] for entry in entries if entry["index"]]
    show(table(("target", "drafter", "from"), rows), "")


COLLECT = {"methods": methods, "datasets": datasets, "targets": targets}
SHOW = {"methods": show_methods, "datasets": show_datasets, "targets": show_targets}
