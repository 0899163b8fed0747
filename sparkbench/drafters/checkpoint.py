"""Reading a drafter checkpoint: config.json and safetensors, from a folder or the hub. No pickle, no remote code."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sparkbench.errors import RunError, UsageError, first_line

LARGEST = 1 << 24  # of any number in a config that counts something


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's files. `revision` is the commit the hub resolved, None for a folder."""

    source: str
    folder: Path
    revision: str | None
    config: dict[str, Any]

    @classmethod
    def open(cls, source: str, revision: str | None = None) -> "Checkpoint":
        """Find a checkpoint. UsageError: not a checkpoint folder. RunError: the hub does not deliver."""
        folder, commit = (Path(source), None) if Path(source).is_dir() else _download(source, revision)
        path = folder / "config.json"
        if not path.is_file():
            raise UsageError(f"drafter {source}: the folder has no config.json")
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"drafter {source}: config.json cannot be read: {first_line(error)}") from error
        if not isinstance(config, dict):
            raise UsageError(f"drafter {source}: config.json is not an object")
        return cls(source, folder, commit, config)

    def require(self, key: str, kind: type) -> Any:
        """A config value of a type. UsageError: missing or of another one."""
        value = self.config.get(key)
        if value is None:
            raise self.broken(f"lacks {key} ({kind.__name__})")
        if type(value) is not kind:
            raise self.broken(f"has {key} {value!r}, and {kind.__name__} is needed")
        return value

    def whole(self, key: str, low: int = 1, high: int = LARGEST) -> int:
        """A whole number of the config. UsageError: missing, no whole number, or beyond what makes sense."""
        value: int = self.require(key, int)
        if not low <= value <= high:
            raise self.broken(f"has {key} {value}, and {low} to {high} is allowed")
        return value

    def positive(self, key: str, value: Any) -> float:
        """`value` of `key` as a finite number above 0. UsageError: it is none."""
        if value is None:
            raise self.broken(f"lacks {key}")
        number = float(value) if type(value) in (int, float) and abs(value) < LARGEST else math.nan
        if not 0 < number < math.inf:
            raise self.broken(f"has {key} {value!r}, and a number above 0 is needed")
        return number

    def broken(self, what: str) -> UsageError:
        return UsageError(f"drafter {self.source}: config.json {what}")

    def rope_theta(self) -> float:
        """The RoPE base, from `rope_parameters` or the older `rope_theta`. UsageError: missing, or scaled RoPE.

        A default is never assumed: with the wrong base everything runs and nothing is accepted.
        """
        parameters = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        if not isinstance(parameters, dict):
            raise self.broken(f"has rope_parameters {parameters!r}, and an object is needed")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default":
            raise UsageError(f"drafter {self.source}: RoPE of type {kind!r} is not supported; supported: default")
        theta = parameters.get("rope_theta", self.config.get("rope_theta"))
        return self.positive("rope_theta (also looked for in rope_parameters)", theta)

    def tensors(self) -> dict[str, Tensor]:
        """All weights, by name. UsageError: none, or a broken file."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise UsageError(f"drafter {self.source}: the folder has no safetensors file")
        tensors: dict[str, Tensor] = {}
        for file in files:
            try:
                tensors.update(load_file(file))
            except (SafetensorError, OSError) as error:
                raise UsageError(f"drafter {self.source}: broken weight file {file.name}: {error}") from error
        return tensors

    def check_names(self, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
        """UsageError unless `found` has the names and shapes of `wanted`, and nothing else."""
        missing = sorted(wanted.keys() - found.keys())
        extra = sorted(found.keys() - wanted.keys())
        shapes = [
            f"{name} {tuple(found[name].shape)} instead of {tuple(wanted[name].shape)}"
            for name in wanted.keys() & found.keys()
            if wanted[name].shape != found[name].shape
        ]
        for problem, names in (("lacks", missing), ("has unknown", extra), ("has the wrong shape for", sorted(shapes))):
            if names:
                raise UsageError(f"drafter {self.source}: the checkpoint {problem} {', '.join(names[:3])}")


def _download(source: str, revision: str | None) -> tuple[Path, str | None]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        folder = snapshot_download(
            source,
            revision=revision,
            allow_patterns=["config.json", "*.safetensors", "tokenizer.json", "calibration.json"],
        )
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise UsageError(f"drafter {source}: neither a folder nor a repository of the hub") from error
    except Exception as error:  # the hub client raises errors of several libraries
        raise RunError(f"drafter {source}: cannot be downloaded: {first_line(error)}") from error
    return Path(folder), Path(folder).name
