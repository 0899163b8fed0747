"""The feature cache: what the target says of each training sequence, computed once and kept on disk.

A sequence is seen many times while a drafter trains, and the target never changes. So it runs once over each, and the
features of the drafter's layers and the final hidden states (after the final norm, what the head reads) go into
safetensors shards, in bfloat16. The published drafters were trained from such a cache.

A token costs `bytes_per_token`: 2 (m + 1) d + 5 for m feature layers of width d, ids and mask included; for Qwen3-4B
(m = 5, d = 2,560) that is 30,725, and 2,400 sequences of 512 to 768 tokens take 38 to 57 GB.

`manifest.json` says what a cache belongs to: target, layers and tokens. Every shard repeats it, is written under a
temporary name and renamed. So an interrupted run continues behind its last shard, and a foreign or damaged shard is
never used. Not covered: two processes that write the same cache.
"""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkbench.decoding.target import Target, dtype_name
from sparkbench.errors import RunError, UsageError
from sparkbench.files import TEMPORARY
from sparkbench.train.block import reader
from sparkbench.train.fit import Progress
from sparkbench.train.recipe import fingerprint
from sparkbench.train.samples import Sample, Samples
from sparkbench.train.storage import digest, load_json, save_json, save_tensors

VERSION = 1
SHARD_BYTES = 1 << 29
MANIFEST = "manifest.json"
PARTS = ("ids", "mask", "features", "final")


@dataclass(frozen=True, eq=False)
class CachedSequence:
    """A cached sequence. ids: [S] int64.   mask: [S] bool.   features: [S, m * d] and final: [S, d], float32."""

    ids: Tensor
    mask: Tensor
    features: Tensor
    final: Tensor


@dataclass(frozen=True, eq=False)
class FeatureCache:
    """A complete cache. shards: index of the first sequence of each; trained: sequences that are not held out."""

    folder: Path
    fingerprint: str
    shards: tuple[int, ...]
    trained: int
    count: int

    def read(self, index: int, device: torch.device) -> CachedSequence:
        """Sequence `index`; those held out follow those that are trained on. RunError: its shard cannot be read."""
        from safetensors import SafetensorError, safe_open

        number = sum(first <= index for first in self.shards) - 1
        path = self.folder / shard_name(number)
        try:
            with safe_open(path, framework="pt") as file:
                ids, mask, features, final = (file.get_tensor(f"{part}/{index}").to(device) for part in PARTS)
        except (OSError, SafetensorError) as error:
            raise RunError(f"cannot read {path}: {error}; delete it to make it again") from error
        return CachedSequence(ids.long(), mask, features.float(), final.float())


def bytes_per_token(hidden_size: int, layers: int) -> int:
    """Bytes of a token: bfloat16 features of `layers` layers and final states, an int32 id and a mask byte."""
    return 2 * (layers + 1) * hidden_size + 5


def signature(named: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of at most 64 values of each tensor: tells models apart without reading gigabytes."""
    parts = []
    for name, weight in named:
        values = weight.detach().reshape(-1)
        sample = values[:: max(1, len(values) // 64)][:64].float().cpu()
        parts.append([name, list(weight.shape), digest(sample)])
    return fingerprint(parts)


def build(target: Target, layers: tuple[int, ...], samples: Samples, folder: Path, progress: Progress) -> FeatureCache:
    """The cache of all samples in `folder`; what is there already is kept, the rest is made.

    UsageError: `folder` holds the cache of another target or of other tokens.   RunError: the disk has too little
    room, or cannot be written.
    """
    all_samples = samples.all
    per_token = bytes_per_token(target.hidden_size, len(layers))
    shards = _shards(all_samples, per_token)
    tokens = sum(len(sample.ids) for sample in all_samples)
    facts = {
        "version": VERSION,
        "target": target.name,
        "target_revision": target.revision,
        "dtype": dtype_name(target.dtype),
        "weights": signature(target.model.named_parameters()),
        "layers": list(layers),
        "tokens_hash": samples.hash,
        "sequences": len(all_samples),
        "tokens": tokens,
        "bytes": tokens * per_token,
        "shards": shards,
    }
    named = ("target", "target_revision")  # a model is what its weights are, wherever they lie
    identity = fingerprint({key: value for key, value in facts.items() if key not in named})
    _claim(folder, facts | {"fingerprint": identity})
    missing = [number for number in range(len(shards)) if not _is_made(folder / shard_name(number), identity, progress)]
    size = f"{len(all_samples)} sequences, {tokens:,} tokens of {per_token:,} bytes: {tokens * per_token / 1e9:.2f} GB"
    progress(f"features: {size}; {len(shards) - len(missing)} of {len(shards)} shards are there")
    ends = [*shards[1:], len(all_samples)]
    work = {number: range(shards[number], ends[number]) for number in missing}
    _check_room(folder, sum(len(all_samples[i].ids) for part in work.values() for i in part) * per_token)
    read = reader(target, layers, "float32")  # in the target's own number type: no autocast
    for done, (number, indices) in enumerate(work.items(), 1):
        tensors: dict[str, Tensor] = {}
        for index in indices:
            sample = all_samples[index]
            features, final = read(sample.ids.long().to(target.device)[None])
            parts = (sample.ids, sample.mask, features[0].bfloat16().cpu(), final[0].bfloat16().cpu())
            tensors |= {f"{part}/{index}": tensor for part, tensor in zip(PARTS, parts, strict=True)}
        save_tensors(folder / shard_name(number), tensors, {"fingerprint": identity})
        progress(f"features: shard {done} of {len(work)} written")
    return FeatureCache(folder, identity, tuple(shards), len(samples.train), len(all_samples))


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"features-{number:05d}.safetensors"


def _shards(samples: Sequence[Sample], per_token: int) -> list[int]:
    """Index of the first sequence of each shard; a shard is filled up to SHARD_BYTES."""
    firsts: list[int] = []
    room = 0
    for index, sample in enumerate(samples):
        size = len(sample.ids) * per_token
        if size > room or not firsts:
            firsts.append(index)
            room = SHARD_BYTES
        room -= size
    return firsts


def _claim(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, or check that the one which is there says the same."""
    path = folder / MANIFEST
    if not path.exists():
        save_json(path, manifest)
        return
    found = load_json(path)
    if not isinstance(found, dict) or found.get("fingerprint") != manifest["fingerprint"]:
        raise UsageError(
            f"{folder} holds the features of another target or of other conversations; "
            "use another work folder, or delete it"
        )


def _is_made(path: Path, identity: str, progress: Progress) -> bool:
    """Whether a shard is there, whole, and of this cache. A damaged or foreign one is named, and made again."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return False
    try:
        with safe_open(path, framework="pt") as file:  # checks that the file is as long as its header says
            facts = (file.metadata() or {}).get("facts", "")
    except (OSError, SafetensorError):
        facts = ""
    if identity in facts:
        return True
    progress(f"features: {path} is damaged or foreign, and is made again")
    return False


def _check_room(folder: Path, needed: int) -> None:
    """RunError: the disk has no room for `needed` bytes."""
    for leftover in (*folder.glob("*.tmp"), *folder.glob(f"*{TEMPORARY}*")):
        leftover.unlink()
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise RunError(
            f"the features need {needed / 1e9:.2f} GB and {folder} has {free / 1e9:.2f} GB free; "
            "use another work folder, or fewer rows"
        )
