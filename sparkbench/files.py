"""Writing files whole or not at all: to a temporary name, then renamed, so that nobody reads half of one."""

import os
import uuid
from pathlib import Path

from sparkbench.errors import RunError

TEMPORARY = ".part-"  # in the name of a file that is being written


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to `path`, whose folder is made. OSError: it cannot be written, and nothing is left behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}{TEMPORARY}{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """`write_whole` of text in UTF-8. RunError: it cannot be written."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from None
