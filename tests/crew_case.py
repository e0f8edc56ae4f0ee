"""Work that kills its worker, in a module that imports nothing large: every worker imports it."""

import os


def divmod_or_die(a: int, b: int) -> tuple[int, int]:
    if b == 0:
        os._exit(1)
    return divmod(a, b)
