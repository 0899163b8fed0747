"""Where the data that ships with the package lies.

In a wheel `datasets/` is inside the package; in an editable install of a checkout it stays beside it. It has no
`__init__.py` (it would shadow another package of that name for anything run from the repository root), so it is found
by its path.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def datasets_folder() -> Path:
    """The folder of the data sets' TOML files and bundled prompts."""
    inside = _PACKAGE / "datasets"
    return inside if inside.is_dir() else _PACKAGE.parent / "datasets"


def embedded_folder() -> Path:
    """The folder of the embedded default's weights."""
    return _PACKAGE / "embedded"
