"""`chunkwise ops`: the members of the family."""

from __future__ import annotations


def ops() -> None:
    """List the members: what they forget by, how they write, in which forms they come, where they are from."""
    from rich.console import Console
    from rich.table import Table

    from chunkwise.spec import PREFIX, all_ops

    table = Table("member", "gate", "rule", "inputs", "forms", "paper", box=None, header_style="bold")
    for op in all_ops().values():
        inputs = ", ".join(f"{name} [{arg.axes.replace(' ', ',')}]" for name, arg in op.args.items())
        table.add_row(op.name, op.gate.value, op.rule.value, inputs, ", ".join(PREFIX[f] for f in op.forms), op.paper)
    console = Console(highlight=False)
    console.print(table) if console.is_terminal else Console(width=240, highlight=False).print(table)
