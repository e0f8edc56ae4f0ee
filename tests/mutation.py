"""Deliberate faults: `python tests/mutation.py` puts each into a copy of the package and sees whether the tests turn red.

A fault is one replacement of text that occurs exactly once in its file. One whose text is gone is reported: it must be found a new place.
Exit code 0: every fault was found. Options: words that the faults to try contain.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TESTS = (
    *("derivation", "derivation_gradient", "op_contract", "op_extreme", "op_option", "op_shape"),
    *("op_refusal", "member", "member_hgrn", "op_truth"),
)


class Fault(NamedTuple):
    file: str  # in chunkwise/
    old: str
    new: str
    what: str
    guard: str = "derivation"  # the tests tried first



FAULTS = (
    Fault(
        "engine/group.py",
        "min(p.C, power_of_two(b - a))",
        "p.C",
        "a packed sequence in the chunks of those beside it",
        "op_contract",
    ),
    Fault(
        "engine/stages_torch.py",
        "M.rw = -M.rw if c.beta is None else M.rw * -c.beta",
        "M.rw = M.rw if c.beta is None else M.rw * c.beta",
        "the eraser's sign",
        "derivation",
    ),
    Fault(
        "engine/stages_torch.py",
        "c.key.decayed(ew, strict=True,",
        "c.key.decayed(ew, strict=False,",
        "a token corrects itself",
        "derivation",
    ),
    Fault(
        "engine/stages_torch.py",
        "torch.bmm(torch.bmm(T[:, i + s : i + 2 * s, i + s : i + 2 * s], low_left), T[:, i : i + s, i : i + s])",
        "torch.bmm(torch.bmm(T[:, i : i + s, i : i + s], low_left), T[:, i + s : i + 2 * s, i + s : i + 2 * s])",
        "merging inverses in the wrong order",
        "derivation",
    ),
    Fault(
        "engine/stages_torch.py",
        "o.baddbmm_(qw, X)",
        "o.baddbmm_(qw, X, alpha=-1)",
        "the correction's sign in the output",
        "derivation",
    ),
    Fault(
        "engine/chunk.py",
        "-1 if c.delta else 1",
        "1",
        "what the state recalls is added, not taken off",
        "derivation_gradient",
    ),
    Fault("engine/chunk.py", "T.mT, given(M.qw).mT", "T, given(M.qw).mT", "T in place of T' in the mirror", "derivation_gradient"),
    Fault(
        "engine/decay.py",
        "return (self.G[..., -1:] - self.G).exp_()",
        "return (self.G[..., -1:] - self.G_before).exp_()",
        "a writer forgets its own token",
        "derivation",
    ),
    Fault(
        "engine/decay.py",
        "anchor = G[..., 0, -1:, :]",
        "anchor = G[..., 0, :1, :]",
        "an anchor that lets exponents be positive",
        "op_extreme",
    ),
    Fault(
        "engine/decay.py",
        "coarse = (g * GRAIN).round_().div_(GRAIN)",
        "coarse = g.clone()",
        "prefix sums without their fine part",
        "derivation",
    ),
    Fault(
        "engine/gradient.py",
        'self.sums["starts"].flip(-2).cumsum(-2).flip(-2)',
        'self.sums["starts"].cumsum(-2)',
        "the gate's gradient summed forwards",
        "derivation_gradient",
    ),
    Fault(
        "engine/decay.py",
        "rows_on.mT - torch.eye(s, dtype=at.dtype, device=at.device)",
        "rows_on.mT",
        "a token's decay between itself and later rows",
        "derivation",
    ),
    Fault("engine/gradient.py", "return dg + through[..., None, :]", "return dg", "what passes the whole chunk", "derivation_gradient"),
    Fault(
        "engine/gradient.py",
        "(U * c.v).sum(-1) - (dr * c.e).sum(-1)",
        "(U * c.v).sum(-1) + (dr * c.e).sum(-1)",
        "a sign in the strength's gradient",
        "derivation_gradient",
    ),
    Fault("engine/gradient.py", "d.sum(2, keepdim=True) if", "d[:, :, :1] if", "one value head's share for all", "derivation_gradient"),
    Fault("engine/layout.py", "rows >= end[:, None]", "rows > end[:, None]", "a row past a sequence's end", "op_contract"),
    Fault("engine/layout.py", "tail:].zero_()", "tail:]", "rows past the end that nobody clears", "op_shape"),
    Fault("engine/layout.py", "rows:].zero_()", "rows:]", "values past the end that nobody clears", "op_contract"),
    Fault("engine/layout.py", "any(lengths[n] < (i + 1)", "any(lengths[n] < i", "packed rows that nobody clears", "op_contract"),
    Fault("engine/recurrent.py", ".mul_(t.beta)", "", "the token form without strengths", "derivation_gradient"),
    Fault("engine/recurrent.py", "most) if o is None else o", "most)", "when the token form reads", "member"),
    Fault("engine/scan.py", "None if t is None else t * tokens for t in", "t for t in", "offsets in tokens where rows are steps", "member"),
    Fault("engine/prologue.py", "return -A * F.softplus(g)", "return A * F.softplus(g)", "a raw gate's sign", "op_option"),
    Fault("nn/norm.py", "keepdim=True)) + eps)", "keepdim=True)))", "nothing under the root for rows of zeros", "op_option"),
    Fault("engine/elementwise.py", "room[here] >= s", "room[here] > s", "doubling that misses a neighbour", "member_hgrn"),
    Fault(
        "engine/elementwise.py",
        "torch.cat((met[:, None], h[:, :-1]), 1) * dx",
        "h * dx",
        "the scan's gate meets its own token",
        "member_hgrn",
    ),
    Fault("engine/dispatch.py", "any(b < a for a, b in", "any(b <= a for a, b in", "empty sequences refused", "op_refusal"),
    Fault("ops/rwkv6.py", "g=w, u=u), parallel", "g=w, u=-u), parallel", "the bonus's sign", "member"),
    Fault(
        "ops/hgrn2.py",
        "forget.detach() - forget - g.expm1().detach()",
        "-g.expm1()",
        "the gradient of a gate that forgets nearly all",
        "op_extreme",
    ),
)


def _red(place: Path, tests: tuple[str, ...]) -> str:
    """The first test that fails, or nothing."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *(f"tests/test_{t}.py" for t in tests)]
    done = subprocess.run(command, cwd=place, env={**os.environ, "PYTHONPATH": str(place)}, capture_output=True, text=True, check=False)
    red = next((line.removeprefix("FAILED tests/") for line in done.stdout.splitlines() if line.startswith("FAILED")), "")
    return red.partition(" - ")[0] if done.returncode == 1 else ""


def found(fault: Fault) -> str:
    """The test that turns red, or nothing. Raises ValueError where the fault has no place any more."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for part in ("chunkwise", "tests", "docs", "README.md", "pyproject.toml"):
            (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, place / part)
        file = place / "chunkwise" / fault.file
        text = file.read_text()
        if text.count(fault.old) != 1:
            raise ValueError(f"its text occurs {text.count(fault.old)} times")
        file.write_text(text.replace(fault.old, fault.new))
        return _red(place, (fault.guard,)) or _red(place, tuple(t for t in TESTS if t != fault.guard))


def main(words: list[str]) -> int:
    missed = 0
    for fault in FAULTS:
        if all(w in f"{fault.file} {fault.what}" for w in words):
            try:
                by = found(fault)
            except ValueError as lost:
                print(f"LOST | {fault.file} | {fault.what} | {lost}", flush=True)
                missed += 1
                continue
            missed += not by
            print(f"{'red' if by else 'MISSED'} | {fault.file} | {fault.what} | {by}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
