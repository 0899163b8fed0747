"""Neural drafters, loaded from their published checkpoint layouts.

`load` is the one entry: a kind (what a method asks for as `drafter_kind`), a source (folder or hub id) and the target
the drafter must fit. Configs are read as JSON and weights as safetensors; code that a checkpoint carries never runs.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkbench.errors import UsageError

if TYPE_CHECKING:
    from sparkbench.decoding.target import Target

NO_HEAD = "none"
KINDS = ("dflash", "dspark", "dart")


def load(kind: str, source: str, target: "Target", revision: str | None = None) -> Any:
    """A drafter for `target`, on its device and in its dtype.

    kind:   what a method asks for. `dspark` must have a Markov head. The others must have none and serve each other's
            methods: all that is asked of them is independent logits for each drafted token.
    source: a folder or a hub id; for ablations `BACKBONE+HEAD` of two of them (the first with the Markov head of the
            second and without a confidence head, which was trained for another backbone), or `BACKBONE+none`.
    UsageError: unknown kind, missing or broken files, or a drafter that was made for another target.
    """
    from sparkbench.drafters import loading

    if kind not in KINDS:
        raise UsageError(f"unknown kind of drafter {kind!r}; known: {', '.join(KINDS)}")
    backbone, head = split_source(source)
    drafter = loading.load(backbone, target, revision)
    if head is None:
        check_kind(kind, drafter)
        return drafter
    if kind != "dspark" and head != NO_HEAD:
        raise UsageError(f"drafter {source}: a {kind} drafter takes no Markov head; use the method dspark")
    drafter.markov_head = drafter.confidence_head = None
    drafter.source = source
    if head != NO_HEAD:
        other = loading.load(head, target)
        if other.markov_head is None:
            raise UsageError(f"drafter {head}: it has no Markov head, so it is no DSpark drafter")
        drafter.markov_head = other.markov_head
        drafter.revision = "+".join(filter(None, (drafter.revision, other.revision))) or None
    return drafter


def check_kind(kind: str, drafter: Any) -> None:
    """Whether a loaded drafter is of a kind, which sharing it between methods must not skip. UsageError: it is not."""
    source = drafter.source
    if kind != "dspark" and drafter.markov_head is not None:
        raise UsageError(f"drafter {source}: it has a Markov head, so it is a DSpark drafter")
    if kind == "dspark" and drafter.markov_head is None and split_source(source)[1] is None:
        raise UsageError(f"drafter {source}: it has no Markov head, so it is no DSpark drafter")


def split_source(source: str) -> tuple[str, str | None]:
    """`BACKBONE+HEAD` -> both; any other source -> itself and None. A folder's own name may hold a `+`.

    UsageError: a part is missing, or there are more than two.
    """
    places = [place for place, sign in enumerate(source) if sign == "+"]
    if not places or Path(source).exists():
        return source, None
    place = next((place for place in places if Path(source[:place]).is_dir()), places[0])
    backbone, head = source[:place], source[place + 1 :]
    if not backbone or not head or ("+" in head and not Path(head).is_dir()):
        raise UsageError(f"drafter {source!r} is not allowed: two of them are joined as A+B, or A+none")
    return backbone, head
