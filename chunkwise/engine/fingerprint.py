"""What Triton finds built kernels under: its fingerprint of itself, remembered between processes, and a kernel's own, alike in all of them.

Triton finds built kernels under a hash of all its files, and so reads 400 MB in every process before it looks up the first one. The hash is
kept in its own cache here, under the sizes and times of those files. A Triton that does that itself ends the need for this.

Into a kernel's hash go the constants of the functions it calls, but Triton 3.6.0 takes those of a function before it has looked for them:
they are there only if another kernel that calls it came first. What one process had built another, with its kernels in another order, did
not find. A Triton that hashes a function before it asks for its constants ends the need for `settle`.
"""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import triton
from triton.runtime import cache, jit

NAME = "fingerprint.txt"
FOLDERS = ("_C", "backends", "compiler", "language", "runtime")
LOCK = threading.Lock()
KNOWN: list[str] = []


def settle() -> None:
    """Have Triton hash what a kernel calls before it takes its constants. To be called before any kernel is hashed."""
    finder = getattr(jit, "DependenciesFinder", None)
    if finder is not None and (taken := finder._update_hash).__module__ == jit.__name__:

        def hashed_first(self: Any, function: Any) -> None:
            function.cache_key  # noqa: B018
            taken(self, function)

        finder._update_hash = hashed_first


def stamp(root: Path) -> str:
    """Of all files that the hash may read, where they are, their sizes and times."""
    lines = [triton.__version__]
    for name in FOLDERS:
        for folder, _, files in os.walk(root / name):
            for file in sorted(files):
                if not file.endswith(".pyc"):
                    about = os.stat(os.path.join(folder, file))
                    lines.append(f"{folder}/{file} {about.st_size} {about.st_mtime_ns}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def remember() -> None:
    """Let Triton have its fingerprint without reading itself, if it has done so before; keep it, if not."""
    with LOCK:
        if KNOWN or not hasattr(cache, "triton_key"):
            return
        try:
            notes = cache.get_cache_manager(stamp(Path(triton.__file__).parent))
            found = notes.get_file(NAME)
            key = Path(found).read_text() if found else cache.triton_key()
            if not found:
                notes.put(key, NAME, binary=False)
        except OSError:  # a cache that may only be read
            key = cache.triton_key()
        KNOWN.append(key)
        cache.triton_key = lambda: key
