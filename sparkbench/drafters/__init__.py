"""Neural drafters, loaded from their published checkpoint layouts.

`load` is the one entry: a kind (what a method asks for as `drafter_kind`), a source (folder or hub id) and the target
the drafter must fit. Configs are read as JSON and weights as safetensors; code that a checkpoint carries never runs.
"""

from typing import TYPE_CHECKING, Any

from sparkbench.errors import UsageError

if TYPE_CHECKING:
    from sparkbench.decoding.target import Target

KINDS = ("dflash",)


def load(kind: str, source: str, target: "Target", revision: str | None = None) -> Any:
    """A drafter of `kind` for `target`, on its device and in its dtype.

    UsageError: unknown kind, missing or broken files, or a drafter that was made for another target.
    """
    from sparkbench.drafters import dflash

    if kind not in KINDS:
        raise UsageError(f"unknown kind of drafter {kind!r}; known: {', '.join(KINDS)}")
    return dflash.load(source, target, revision)
