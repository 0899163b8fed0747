"""What a run records about where it ran: device, CPU, driver, clocks, versions, the code's commit.

A number without its machine cannot be compared, so all of this goes into `run.json`, and the device's id into
every sample. What a system does not tell is None. Not covered: deciding what may be compared (`gate.py`).
"""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from sparkbench.host import available_memory

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow")
GPU_FIELDS = (
    "name",
    "uuid",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.limit",
    "mig.mode.current",
)


def describe(device: torch.device) -> dict[str, Any]:
    """The machine as JSON values: CPU, memory, threads and, for CUDA, the GPU with driver and clocks."""
    return {
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cpu_count": os.cpu_count(),
        "cpu_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "device": str(device),
        "device_name": device_name(device),
        "device_id": device_id(device),
        "gpus": _gpus() if device.type == "cuda" else None,
    }


def versions() -> dict[str, str | None]:
    """Versions of Python, of the libraries that matter, and of CUDA."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def device_name(device: torch.device) -> str:
    """The model of the GPU or CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def device_id(device: torch.device) -> str:
    """What tells devices apart: a GPU's UUID; of a CPU the model and the machine's name."""
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"{cpu_model()} ({platform.node()})"


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def git_commit() -> str | None:
    """The commit of the checkout this runs from, `-dirty` with local changes; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    commit = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    # An installed copy may lie inside somebody else's repository: only a tracked file makes it a checkout.
    if commit is None or _output("git", "-C", str(folder), "ls-files", "--error-unmatch", __file__) is None:
        return None
    return commit + ("-dirty" if _output("git", "-C", str(folder), "status", "--porcelain", "-uno") else "")


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _gpus() -> list[dict[str, str]] | None:
    text = _output("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader")
    if text is None:
        return None
    return [dict(zip(GPU_FIELDS, line.split(", "), strict=False)) for line in text.splitlines()]


def _output(*command: str) -> str | None:
    """What a command prints, stripped; None when it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on the device; of the host, without swapping; None where a system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()
