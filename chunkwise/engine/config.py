"""What a kernel is built with, and for."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True)
class Config:
    """How one kernel is built. BK, BV: columns of a block of keys and of values; tma: through the copy engine, where it can be;
    registers: the most that a thread may have, so that more programs fit on a multiprocessor; None: as many as it wants; fuse: whether
    the compiler may fuse products and sums of its own."""

    BK: int
    BV: int
    num_warps: int
    num_stages: int
    tma: bool = True
    registers: int | None = None
    fuse: bool = True

    @property
    def launch(self) -> dict[str, int]:
        most = {} if self.registers is None or not card().arch.startswith("sm_") else {"maxnreg": self.registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **most, **({} if self.fuse else {"enable_fp_fusion": False})}


def said(c: Config) -> dict[str, Any]:
    """A config's fields as a file has them: those that are not what they are by default."""
    return {f.name: x for f in fields(c) if (x := getattr(c, f.name)) != f.default}


def read(given: Any) -> Config:
    """A config from its fields, as a file has them. Raises ValueError naming the field that is missing, unknown or of no use."""
    known = {f.name: f for f in fields(Config)}
    if not isinstance(given, dict):
        raise ValueError(f"a config must have {', '.join(known)}, got {given!r}")
    for name in given.keys() - known.keys():
        raise ValueError(f"a config has no {name!r}, but {', '.join(known)}")
    for name, f in known.items():
        if name not in given:
            if f.default is MISSING:
                raise ValueError(f"a config must have {name}, got {', '.join(given) or 'nothing'}")
            continue
        x, whole = given[name], isinstance(given[name], int) and not isinstance(given[name], bool)
        if name in ("tma", "fuse"):
            right, wanted = isinstance(x, bool), "true or false"
        elif name == "registers":
            right, wanted = x is None or whole and 16 <= x <= 255, "null or 16 to 255"
        elif name == "num_stages":
            right, wanted = whole and 1 <= x <= 16, "1 to 16"
        elif name == "num_warps":
            right, wanted = whole and x in (1, 2, 4, 8, 16), "1, 2, 4, 8 or 16"
        else:
            right, wanted = whole and x >= 0 and x & (x - 1) == 0, "0 or a power of two"
        if not right:
            raise ValueError(f"{name} must be {wanted}, got {x!r}")
    return Config(**given)


@dataclass(frozen=True)
class Card:
    """What kernels are built for and chosen by."""

    arch: str  # "sm_90", "gfx942"
    shared: int  # bytes of shared memory that a program can have
    name: str = ""  # as its maker calls it; "": nobody knows

    @property
    def engine(self) -> bool:
        """Whether a copy engine moves blocks that descriptors describe."""
        return self.arch.startswith("sm_") and int(self.arch[3:]) >= 90


def card() -> Card:
    """The current device, as Triton's driver reports it; the interpreter passes for an H200."""
    from triton import knobs
    from triton.runtime import driver

    if knobs.runtime.interpret:
        return Card("sm_90", 227 << 10)
    return _card(driver.active, driver.active.get_current_device())


@cache
def _card(driver: Any, device: Any) -> Card:
    target = driver.get_current_target()
    arch = f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch).partition(":")[0]
    name = torch.cuda.get_device_name(device) if isinstance(device, int) else driver.name  # of a stand-in: see precompile.py
    return Card(arch, driver.utils.get_device_properties(device)["max_shared_mem"], name)
