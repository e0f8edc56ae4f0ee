"""Triton's fingerprint of itself, remembered between processes.

Triton finds built kernels under a hash of all its files, and so reads 400 MB in every process before it looks up the first one. The hash is
kept in its own cache here, under the sizes and times of those files. A Triton that does that itself ends the need for this.
"""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import triton
from triton.runtime import cache

NAME = "fingerprint.txt"
FOLDERS = ("_C", "backends", "compiler", "language", "runtime")
LOCK = threading.Lock()
KNOWN: list[str] = []


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
