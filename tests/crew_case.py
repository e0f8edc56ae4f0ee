"""What workers of tests do, in a module that imports nothing large: every worker imports it."""

import os
import sys


def divmod_or_die(a: int, b: int) -> tuple[int, int]:
    if b == 0:
        os._exit(1)
    return divmod(a, b)


def afresh(work, *item):
    """work(*item) in a worker that has built nothing yet: what is built is not heard again, but launched."""
    for name, module in list(sys.modules.items()):
        if name.startswith("chunkwise."):
            for function in vars(module).values():
                if hasattr(type(function), "preload"):
                    function.device_caches.clear()
    return work(*item)
