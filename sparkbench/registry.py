"""Methods by name, and the text form in which a person names one.

A method is `name[:key=value...]`, for example `ddtree:builder=heap`. The canonical text (defaults dropped, keys sorted)
is the column `variant` of the results. Built-in methods are the modules of `sparkbench.methods`, other packages add
theirs by the entry-point group `sparkbench.methods` (name = "module:Class"). Listing names imports no method.
"""

import dataclasses
import importlib
import pkgutil
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from sparkbench.errors import UsageError

if TYPE_CHECKING:
    from sparkbench.decoding.method import Method

ALIASES = {"ar": "autoregressive"}
GROUP = "sparkbench.methods"

MethodType = TypeVar("MethodType", bound="type[Method]")


def method(name: str) -> Callable[[MethodType], MethodType]:
    """Class decorator that gives a method its name; the module must be called the same."""

    def named(cls: MethodType) -> MethodType:
        cls.name = name
        return cls

    return named


def names() -> list[str]:
    """All methods, autoregressive decoding first."""
    found = set(_built_in()) | set(_plugged_in())
    return sorted(found, key=lambda name: (name != "autoregressive", name))


def get(name: str) -> "type[Method]":
    """The method class of a name or alias. UsageError: there is none."""
    name = ALIASES.get(name, name)
    plugged_in = _plugged_in()
    if name in _built_in():  # first, so that no other package can take a built-in's name
        module = importlib.import_module(f"sparkbench.methods.{name}")
        return next(value for value in vars(module).values() if getattr(value, "name", None) == name)
    if name in plugged_in:
        return _load(plugged_in[name])
    raise UsageError(f"unknown method {name!r}; known: {', '.join(names())}")


@dataclass(frozen=True, order=True)
class Variant:
    """A method and its options, validated; `options` holds (key, text) pairs that differ from the defaults, sorted."""

    method: str
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str, unless_given: Mapping[str, str] | None = None) -> "Variant":
        """Read `name[:key=value...]`. UsageError: unknown method, option or value; the message lists what exists.

        unless_given: options that take these values where the text does not name them.
        """
        name, *pairs = text.strip().split(":")
        # A value may hold colons itself (a drive letter, a hub revision): pieces without `=` belong to the one before.
        joined: list[str] = []
        for pair in pairs:
            if "=" not in pair and joined:
                joined[-1] += ":" + pair
            else:
                joined.append(pair)
        found = get(name)
        fields = {field.name.replace("_", "-"): field for field in dataclasses.fields(found.Options)}
        hints = typing.get_type_hints(found.Options)
        options: dict[str, str] = {}
        named = {_key(pair) for pair in joined}
        joined += [f"{key}={value}" for key, value in (unless_given or {}).items() if key not in named]
        for pair in joined:
            _, equals, value = pair.partition("=")
            key = _key(pair)
            if not equals or key not in fields:
                known = ", ".join(sorted(fields)) or "none"
                raise UsageError(f"method {found.name}: unknown option {key or pair!r}; known: {known}")
            if key in options:
                raise UsageError(f"method {found.name}: option {key} is given twice")
            typed = _convert(found.name, key, value, hints[fields[key].name])
            if typed != fields[key].default:
                options[key] = _text(typed)
        variant = cls(found.name, tuple(sorted(options.items())))
        variant.typed_options()
        return variant

    @property
    def canonical(self) -> str:
        return ":".join([self.method, *(f"{key}={value}" for key, value in self.options)])

    def typed_options(self) -> Any:
        """The options as the method's own dataclass, which checks their values."""
        options_type = get(self.method).Options
        hints = typing.get_type_hints(options_type)
        values = {}
        for key, text in self.options:
            field = key.replace("-", "_")
            values[field] = _convert(self.method, key, text, hints[field])
        try:
            return options_type(**values)
        except ValueError as error:
            raise UsageError(f"method {self.method}: {error}") from error


def build(variant: Variant, *, drafter: Any = None, budget: int | None = None) -> "Method":
    """An instance of a variant. `drafter` is of the method's kind; `budget` is for methods that take one."""
    found = get(variant.method)
    return found(variant.typed_options(), drafter, budget if found.takes_budget else None)


def _key(pair: str) -> str:
    """The option's name in `key=value`."""
    return pair.partition("=")[0].strip().replace("_", "-")


def _built_in() -> list[str]:
    package = importlib.import_module("sparkbench.methods")
    return [module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_")]


def _plugged_in() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _load(point: EntryPoint) -> Any:
    try:
        found = point.load()
    except Exception as error:  # whatever a foreign package raises when it is imported
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"method {point.name}: its plug-in {point.value} cannot be loaded: {reason}") from error
    if getattr(found, "name", None) != point.name:
        raise UsageError(f"method {point.name}: its plug-in {point.value} is not a method of that name")
    return found


def _convert(name: str, key: str, text: str, kind: Any) -> Any:
    """Read an option's text as its declared type: str, int, float, bool or a Literal of these."""
    choices: tuple[Any, ...] = ()
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        kind = type(choices[0])
    if isinstance(kind, types.UnionType):
        kind = next(arm for arm in typing.get_args(kind) if arm is not type(None))
    try:
        value = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, kind.__name__)
        raise UsageError(f"method {name}: option {key}={text} is not allowed: {wanted}") from None
    if choices and value not in choices:
        allowed = ", ".join(str(choice) for choice in choices if choice != "")
        raise UsageError(f"method {name}: option {key}={text} is not allowed: {allowed}")
    return value


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
