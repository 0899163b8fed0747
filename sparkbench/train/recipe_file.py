"""Reading the recipe of `sparkbench train drafter` from its TOML file: exactly its keys, each in its type.

Some recipes come with the package and are known by name. What the values may be is `drafter_recipe.py`.
"""

import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from sparkbench.errors import UsageError
from sparkbench.train.drafter_recipe import KINDS, PublishedRecipe

BUNDLED = Path(__file__).resolve().parent / "recipes"
WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", tuple: "a list of two numbers"}
_LARGEST = (1 << 63) - 1  # of any number in a recipe


def bundled() -> list[str]:
    """Names of the recipes that come with the package, sorted."""
    return sorted(path.stem for path in BUNDLED.glob("*.toml"))


def find(recipe: str) -> Path:
    """The file of a recipe: a path that ends in .toml, or a bundled name. UsageError: neither."""
    path = Path(recipe) if recipe.endswith(".toml") else BUNDLED / f"{recipe}.toml"
    if not path.is_file():
        raise UsageError(f"unknown recipe {recipe!r}; allowed: a file FILE.toml, or one of {', '.join(bundled())}")
    return path


def read(path: Path) -> PublishedRecipe:
    """Read a recipe. UsageError: unreadable, an unknown or missing key, or an impossible value."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML file: {error}") from None
    try:
        recipe: PublishedRecipe = _part(PublishedRecipe, table, "", _parts(table))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return recipe


def _parts(table: dict[str, Any]) -> dict[str, Any]:
    """The parts whose keys depend on the kind of drafter."""
    model = table.get("model")
    if not isinstance(model, dict) or "kind" not in model:
        raise UsageError("the key model.kind is missing")
    if model["kind"] not in list(KINDS):
        raise UsageError(f"model.kind {model['kind']!r} is not allowed: {', '.join(KINDS)}")
    return KINDS[model["kind"]]


def _part(kind: Any, table: dict[str, Any], prefix: str, chosen: dict[str, Any]) -> Any:
    """A dataclass from a table with exactly its keys. chosen: types of fields that allow several."""
    names = [each.name for each in fields(kind)]
    for key in table:
        if key not in names:
            raise UsageError(f"unknown key {prefix}{key}; allowed here: {', '.join(names)}")
    missing = [name for name in names if name not in table]
    if missing:
        raise UsageError(f"the key {prefix}{missing[0]} is missing")
    hints = get_type_hints(kind) | chosen
    return kind(**{name: _value(hints[name], table[name], f"{prefix}{name}") for name in names})


def _value(kind: Any, value: Any, key: str) -> Any:
    """`value` in the type of a field: a part, a pair of numbers, or a plain value."""
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise UsageError(f"{key} is not allowed: a table [{key}] is needed")
        return _part(kind, value, f"{key}.", {})
    if get_args(kind):
        if not isinstance(value, list) or len(value) != len(get_args(kind)):
            raise UsageError(f"{key} {value!r} is not allowed: {WORDS[tuple]}")
        return tuple(_value(float, each, key) for each in value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number if kind is float else type(value) is kind) or (number and not abs(value) <= _LARGEST):
        raise UsageError(f"{key} {value!r} is not allowed: {WORDS[kind]}")
    return kind(value)
