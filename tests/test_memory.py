"""What the engine asks of the system's memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from chunkwise.engine.memory import LARGE, room
from chunkwise.ops.gla import gla


def flags(t: torch.Tensor) -> list[str]:
    """What Linux notes about the mapping that holds the middle of a tensor."""
    at, found = t.data_ptr() + t.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, end = (int(x, 16) for x in words[0].split("-"))
            found = start <= at < end
        elif found and words[0] == "VmFlags:":
            return words[1:]
    raise AssertionError("no mapping holds the tensor")


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_large_results_ask_for_huge_pages():
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this kernel has no huge pages")
    big = room(LARGE, 2, dtype=torch.uint8, device=torch.device("cpu"))
    assert "hg" in flags(big) and big.fill_(1).min() == 1
    q = torch.randn(1, 40, 2, 64)
    o, S = gla(q, q, torch.randn(1, 40, 2, 16384), -q.abs(), output_final_state=True)
    assert o.nbytes >= LARGE and "hg" in flags(o)


def test_small_results_are_left_alone(monkeypatch):
    monkeypatch.setattr("chunkwise.engine.memory._advise", lambda: pytest.fail("asked for huge pages"))
    assert room(3, LARGE // 16, dtype=torch.float32, device=torch.device("cpu")).shape == (3, LARGE // 16)
