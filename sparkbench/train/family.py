"""What the embedded family consists of: its drafters, the stages that make it, and what its figures show."""

from collections.abc import Mapping

DRAFTERS: Mapping[str, str | None] = {  # and the one each begins with
    "dflash": None,
    "dspark_b7": None,
    "dspark_b16": "dspark_b7",
    "dart": None,
}
STAGES = (
    "corpus",
    "target",
    "polish",
    "responses",
    "dflash",
    "dspark_b7",
    "dspark_b16",
    "calibration",
    "dart",
    "ngram",
    "figures",
)
INDEX = "ngram/index.safetensors"  # the n-gram index, in the family's folder
# Drafter, variant and budget of the figures.
VARIANTS: tuple[tuple[str, str, int | None], ...] = (
    ("dflash", "dflash", None),
    ("dflash", "ddtree", 16),
    ("dflash", "ddtree", 64),
    ("dspark_b7", "dspark:drafter=dspark-b7", None),
    ("dspark_b7", "sparklingtree:drafter=dspark-b7", 64),
    ("dspark_b16", "dspark", None),
    ("dspark_b16", "sparklingtree", 16),
    ("dspark_b16", "sparklingtree", 64),
    ("dart", "dflash:drafter=dart", None),
    ("dart", "dart", 16),
    ("dart", "dart", 64),
)


def folder_name(drafter: str) -> str:
    """Folder of a drafter in the family."""
    return drafter.replace("_", "-")
