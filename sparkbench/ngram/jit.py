"""Compiling with numba, kept on disk so that a later process starts fast.

numba keeps compiled code beside the source, or in the user's cache folder where the source's cannot be written. Where
neither can, it refuses to decorate; then the code is compiled once a process.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """`function`, compiled at its first call with arguments of new types; the GIL is free while it runs."""
    try:
        return cast(Function, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # no folder for the cache
        return cast(Function, numba.njit(nogil=True)(function))
