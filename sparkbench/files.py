"""Writing small files whole or not at all: to a temporary name, then renamed, so that nobody reads half of one."""

import contextlib
import os
import uuid
from pathlib import Path

from sparkbench.errors import RunError


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8; makes its folder. RunError: it cannot be written, and nothing is left behind."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise RunError(f"cannot write {path}: {error.strerror}") from None
