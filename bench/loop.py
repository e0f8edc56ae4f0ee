"""The same function written plainly, a loop over chunks under autograd, beside the operator: time and memory of a training step.

    python bench/loop.py [--threads 2] [--rounds 5] [--shape 1,2048,16,32,128,128]       (B,T,H,HV,K,V)

Both are compared with each other before they are timed, output and every gradient.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import chunkwise
from chunkwise.bench.clock import Side, peak, race

C = 64


def plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule, chunk by chunk, by the formulas of docs/derivation.md; autograd keeps what it needs."""
    n, scale = v.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    q, k = ((t if n == 1 else t.repeat_interleave(n, 2)).transpose(1, 2) for t in (q * scale, k))
    v, g, beta = v.transpose(1, 2), g.transpose(1, 2), beta.transpose(1, 2)[..., None]
    S, out = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for i in range(0, q.shape[2], C):
        qc, kc, vc, gc, bc = (t[:, :, i : i + C] for t in (q, k, v, g, beta))
        G = gc.cumsum(-1)
        gamma = (G[..., :, None] - G[..., None, :]).tril().exp().tril()
        L = (bc * (kc @ kc.mT) * gamma).tril(-1)
        X = torch.linalg.solve_triangular(
            L + torch.eye(L.shape[-1]), bc * (vc - G.exp()[..., None] * (kc @ S)), upper=False, unitriangular=True
        )
        out.append(G.exp()[..., None] * (qc @ S) + (qc @ kc.mT * gamma) @ X)
        S = G[..., -1:, None].exp() * S + (kc * (G[..., -1:] - G).exp()[..., None]).mT @ X
    return torch.cat(out, 2).transpose(1, 2)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--threads", type=int, default=2)
    ask.add_argument("--rounds", type=int, default=5)
    ask.add_argument("--shape", default="1,2048,16,32,128,128")
    asked = ask.parse_args()
    torch.set_num_threads(asked.threads)
    op = chunkwise.all_ops()["gated_delta_rule"]
    x = op.draw(dict(zip(("B", "T", "H", "HV", "K", "V"), map(int, asked.shape.split(",")))))
    x = {n: t.requires_grad_() for n, t in x.items()}
    do = torch.randn(x["v"].shape)

    def step(f):
        def run() -> dict[str, Tensor]:
            o = f(**x)
            return {"o": o.detach(), **{f"d{n}": d for n, d in zip(x, torch.autograd.grad(o, list(x.values()), do))}}

        return run

    sides = {"chunkwise": Side(step(lambda **x: op(x)[0]), torch.device("cpu")), "plain loop": Side(step(plain), torch.device("cpu"))}
    ours, theirs = (side.call() for side in sides.values())
    worst = {n: ((ours[n] - t).norm() / t.norm()).item() for n, t in theirs.items()}
    print("apart by", ", ".join(f"{n} {e:.1e}" for n, e in worst.items()))
    if max(worst.values()) > torch.finfo(torch.float32).eps ** 0.5:
        raise SystemExit("they compute different functions: no times")
    del ours, theirs
    memory = {n: peak(side) for n, side in sides.items()}
    for n, t in race(sides, asked.rounds, 20.0).items():
        print(f"{n:12s} {1e3 * t.work.p50:8.1f} ms (p20 {1e3 * t.work.p20:.1f}, p80 {1e3 * t.work.p80:.1f})  {memory[n] / 2**20:7.0f} MiB")


if __name__ == "__main__":
    main()
