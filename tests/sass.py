"""What an sm_90 kernel's machine code does with uniform registers, of which wgmma's descriptors of shared memory are made.

ptxas 12.8 can build a descriptor from registers that nobody has written, where one block of shared memory is the left operand of one
product and a narrower right operand of another: wrong numbers or an illegal access, by luck (docs/facts/kernels.md, "What the compiler
taught").
"""

from __future__ import annotations

import re
import subprocess
import tempfile

# Instructions without a register as their result; all others write their first operand that is no predicate.
RESULTLESS = (
    "ST", "RED.", "ATOMS.", "BAR", "BRA", "BRX", "BSSY", "BSYNC", "CALL", "CCTL", "DEPBAR", "ERRBAR", "EXIT", "FENCE", "HGMMA", "MEMBAR",
    "NANOSLEEP", "NOP", "RET", "SYNCS", "UBLK", "UCGABAR", "UTMA", "WARP", "YIELD",
)  # fmt: skip
UNIFORM = re.compile(r"\bUR(\d+)(\.64)?")


def instructions(cubin: bytes) -> list[str]:
    """The kernel's machine code, an instruction each, in the order of their addresses."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([knobs.nvidia.cuobjdump.path, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+([A-Z@{][^;]*?)\s*;", text)


def _width(opcode: str) -> int:
    """Registers of a result, or of a 64-bit operand."""
    pair = ".64" in opcode or ".WIDE" in opcode or (opcode.startswith("CS2R") and ".32" not in opcode)
    return 4 if ".128" in opcode else 2 if pair else 1


def unset_registers(code: list[str]) -> dict[str, str]:
    """Uniform registers that a kernel with wgmma reads before, in the order of its code, anything has written them: who reads each first;
    and others that additions of 64 bits read so, which is how descriptors move on.

    Permutations of bytes may read a register of which they keep only what they have just put there.
    """
    written: set[int] = set()
    vector: set[int] = set()
    found: dict[str, str] = {}
    for line in code if any("gdesc[" in line for line in code) else ():
        opcode, _, rest = re.sub(r"^@!?U?P\w+\s+", "", line).partition(" ")
        operands = [x.strip() for x in rest.split(",")]
        result: list[int] = []
        first = ""
        if not opcode.startswith(RESULTLESS):
            while operands and re.fullmatch(r"!?U?P(\d|T)", operands[0]):
                operands.pop(0)
            first = operands.pop(0) if operands else ""
            if m := re.fullmatch(UNIFORM, first):
                result = list(range(int(m[1]), int(m[1]) + _width(opcode)))
        if opcode.startswith("IADD3") and re.search(r"\bP\d\b", rest):
            for x in operands:
                if (m := re.fullmatch(r"-?R(\d+)(\.reuse)?", x)) and int(m[1]) not in vector:
                    found.setdefault(f"R{m[1]}", line)
        if m := re.fullmatch(r"R(\d+)", first):
            vector.update(range(int(m[1]), int(m[1]) + _width(opcode)))
        for n in () if opcode.startswith("UPRMT") else _read(opcode, operands):
            if n not in written:
                found.setdefault(f"UR{n}", line)
        written.update(result)
    return found


def _read(opcode: str, operands: list[str]) -> list[int]:
    read: list[int] = []
    for i, x in enumerate(operands):
        if m := re.fullmatch(r"gdesc\[UR(\d+)\].*", x):
            # Two words of the left operand's block and two of the right's; a left operand in registers leaves its two unread.
            read += [int(m[1]) + j for j in (range(4) if i == 1 else (2, 3))]
        else:
            for m in UNIFORM.finditer(x):
                read += [int(m[1]), int(m[1]) + 1] if m[2] or opcode.startswith("UIADD3.64") else [int(m[1])]
    return read
