"""Files of the work folder: tensors as safetensors, facts as JSON.

Each is written to a temporary name and renamed, so an interrupted write never leaves a half-written file
under a final name. Facts that belong to tensors travel in the header of the same file, so both are always of the
same moment. Nothing is pickled.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sparkbench.errors import RunError
from sparkbench.files import write_text


def save_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Any = None) -> None:
    """Write tensors and JSON facts to `path`. RunError: the file cannot be written."""
    from safetensors.torch import save_file

    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, temporary, metadata={"format": "pt", "facts": json.dumps(facts)})
        os.replace(temporary, path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error}") from error


def load_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Tensors and facts of `path`. RunError: missing or broken."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("facts", "null"))
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot read {path}: {error}; delete it to make it again") from error


def digest(*tensors: Tensor) -> str:
    """A hash of the tensors' values, the same on every machine."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        state.update(tensor.contiguous().numpy().tobytes())
    return state.hexdigest()


def save_json(path: Path, value: Any) -> None:
    """Write JSON to `path`. RunError: the file cannot be written."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def load_json(path: Path) -> Any:
    """The JSON value in `path`. RunError: missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}; delete it to make it again") from error
