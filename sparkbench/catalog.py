"""Known targets and their drafters: what `--target` and a method's default drafter resolve to.

`embedded` is the family of tiny models that ships with the package. For published targets the drafters that were
published for them are known by name, so that `--target Qwen/Qwen3-4B --method ddtree` needs nothing more. Any other
folder or hub id works too; its drafters are then named with `--drafter`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparkbench.drafters import NO_HEAD, split_source
from sparkbench.errors import UsageError
from sparkbench.paths import embedded_folder

EMBEDDED = "embedded"
NO_INDEX = "none"


@dataclass(frozen=True)
class KnownTarget:
    """A target by name.

    drafters: default source by kind of drafter.   named: further drafters by short name.
    index:    default n-gram index for its tokens; empty where none is known.
    """

    name: str
    source: str
    note: str
    drafters: Mapping[str, str] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    index: str = ""


def targets() -> list[KnownTarget]:
    """All known targets, the embedded default first."""
    folder = embedded_folder()
    embedded = KnownTarget(
        EMBEDDED,
        str(folder / "target"),
        "tiny models that ship with sparkbench; no evidence for real ones",
        drafters={
            "dflash": str(folder / "dflash"),
            "dspark": str(folder / "dspark-b16"),
            "dart": str(folder / "dart"),
        },
        named={name: str(folder / name) for name in ("dspark-b7", "dspark-b16")},
        index=str(folder / "ngram" / "index.safetensors"),
    )
    qwen = KnownTarget(
        "Qwen/Qwen3-4B",
        "Qwen/Qwen3-4B",
        "needs a GPU with 16 GB and the hub",
        drafters={
            "dflash": "z-lab/Qwen3-4B-DFlash-b16",
            "dspark": "shreybirmiwal/Qwen3-4B-DSpark-b16",
            "dart": "fvliang/qwen4b-dart",
        },
        named={
            "dflash-b16": "z-lab/Qwen3-4B-DFlash-b16",
            "dflash-b7": "deepseek-ai/dflash_qwen3_4b_block7",
            "dspark-b7": "deepseek-ai/dspark_qwen3_4b_block7",
            "dspark-b16": "shreybirmiwal/Qwen3-4B-DSpark-b16",
        },
        index="fvliang/dart-qwen3-ngram/small.trie",
    )
    return [embedded, qwen]


def resolve_target(name: str) -> str:
    """The folder or hub id of a target. UsageError: a folder that does not exist, or missing embedded weights."""
    known = _known(name)
    source = known.source if known else name
    if known and known.name == EMBEDDED and not (Path(source) / "config.json").is_file():
        raise UsageError("target embedded: its weights are missing from this installation; reinstall sparkbench")
    return _existing("target", source, (target.name for target in targets()))


def resolve_drafter(kind: str, target: str, wanted: str = "") -> str:
    """The folder or hub id of a drafter of `kind` for `target`.

    wanted: a short name known for the target, a folder or a hub id; empty for the default. `A+B` and `A+none` are
            resolved part by part (sparkbench.drafters).
    UsageError: no default is known, or a folder does not exist.
    """
    known = _known(target)
    backbone, head = split_source(wanted)
    if head is not None:
        other = head if head == NO_HEAD else resolve_drafter(kind, target, head)
        return f"{resolve_drafter(kind, target, backbone)}+{other}"
    if wanted:
        named = {**known.drafters, **known.named} if known else {}
        return _existing("drafter", named.get(wanted, wanted), named)
    if known is None or kind not in known.drafters:
        raise UsageError(f"no {kind} drafter is known for target {target}; name one: --drafter METHOD=FOLDER_OR_HUB_ID")
    return known.drafters[kind]


def resolve_index(target: str, wanted: str = "") -> str | None:
    """The file or hub path of an n-gram index for `target`; None where `wanted` is `none`.

    UsageError: no default is known, or `wanted` can only be meant as a file and there is none.
    """
    known = _known(target)
    if wanted == NO_INDEX:
        return None
    source = wanted or (known.index if known else "")
    if not source:
        raise UsageError(
            f"no n-gram index is known for target {target}; name one: dart:index=FILE, or index={NO_INDEX}"
        )
    path = Path(source)
    if path.is_dir():
        raise UsageError(f"n-gram index {source} is a folder; name a file")
    if not path.is_file() and (_looks_local(source) or "/" not in source):
        raise UsageError(f"n-gram index {source}: there is no such file")
    return source


def _known(name: str) -> KnownTarget | None:
    return next((target for target in targets() if target.name == name), None)


def _looks_local(source: str) -> bool:
    """Whether a source is written as no hub id is."""
    return Path(source).is_absolute() or source.startswith((".", "~")) or "\\" in source


def _existing(what: str, source: str, names: Iterable[str]) -> str:
    """`source`, unless it can only be meant as a folder and there is none. names: what is known by name."""
    if Path(source).is_dir():
        return source
    if _looks_local(source) or source.count("/") > 1:
        raise UsageError(f"{what} {source}: there is no such folder")
    if "/" not in source:
        known = ", ".join(names) or "none"
        raise UsageError(f"unknown {what} {source!r}; allowed: a folder, a hub id like org/name, or one of {known}")
    return source


def drafters_of(kind: str) -> dict[str, str]:
    """Default drafter of `kind` by target, for all targets that have one."""
    return {target.name: target.drafters[kind] for target in targets() if kind in target.drafters}
