"""What the host offers this process, and what the process takes of it, without importing anything heavy.

Devices and versions are `machine.py`.
"""

import os
import sys
from pathlib import Path


def usable_cores() -> int:
    """CPU cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int | None:
    """Bytes that can be had without swapping, where the system says."""
    return _figure("/proc/meminfo", "MemAvailable")


def process_memory(name: str) -> int | None:
    """Bytes of this process by the name that Linux has for them, such as RssFile; None on other systems."""
    return _figure("/proc/self/status", name)


def peak_memory() -> int | None:
    """The largest resident size of this process so far, in bytes; None on systems that do not tell."""
    peak = process_memory("VmHWM")  # first: getrusage counts what the program that started this one took, too
    if peak is not None:
        return peak
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _figure(file: str, name: str) -> int | None:
    """A line `name: N kB` of a file, in bytes."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        return None
