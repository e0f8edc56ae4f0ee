"""The forward and backward pass of a training step as one CUDA graph: what the host says launch by launch is said once, then replayed.

The same kernels compute on the same numbers, so losses and gradients have the bits of a step that is not captured. What a graph cannot
hold goes on step by step, and why is said once: `Captured.refused`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..nn.joint import hooked

RESTLESS = 3  # times in a row that something lies elsewhere before a graph has been replayed twice, until it is said
MOST = 8  # shapes that graphs are made for, each with room of its own for gradients; further ones go step by step
SYNC, MODE = "synchronizing CUDA operation", "Synchronization debug mode"  # what torch.cuda.set_sync_debug_mode has said of the two
logger = logging.get_logger(__name__)


class Graph(NamedTuple):
    """A step recorded for inputs of one kind."""

    inputs: dict[str, Tensor]  # where it reads
    loss: Tensor  # and writes: the loss, and the parameters' gradients
    gradients: list[Tensor | None]
    replay: Callable[[], None]


class Captured:
    """loss = captured(**inputs): the model's loss, its gradients added to the parameters' `grad`, from the third call on as one graph.

        captured = Captured(model, dtype=torch.bfloat16)
        for ids in batches:
            loss = captured(input_ids=ids, labels=ids)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    Every kind of inputs (shapes, dtypes, what is no tensor; the modules' modes, autocast) takes two calls as they are, then one that
    records; what else the model looks at stays as it was then. Calls between two `zero_grad` accumulate. Gradients lie where the graph
    writes them: the next call changes them, so keep copies. Layers that draw random numbers draw others than without a graph.

    Args:
        model: on one GPU, to which tensors are moved; the call's keyword arguments are its own, and its output has a `loss`. Any model of
            transformers will do.
        dtype: of autocast around the model's forward pass; None for none.
        step: what to do instead of the model's forward and backward pass, step(**inputs) -> loss without a gradient.

    Raises:
        TypeError: model is no module, an input that is no tensor cannot be told from others (a list).
        ValueError: model is on no GPU, or on several devices.
    """

    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def __init__(self, model: nn.Module, *, dtype: torch.dtype | None = None, step: Callable[..., Tensor] | None = None):
        if not isinstance(model, nn.Module):
            raise TypeError(f"Captured: model must be a torch.nn.Module, got {type(model).__name__}")
        self.device = next(model.parameters()).device
        if len(places := {str(p.device) for p in model.parameters()}) > 1:
            raise ValueError(f"Captured: model must be on one device, got {', '.join(sorted(places))}")
        if self.device.type not in self.devices:
            raise ValueError(f"Captured: only work on a GPU can be a CUDA graph; model is on {self.device}")
        self.model, self.dtype, self.step = model, dtype, self.run if step is None else step
        self.graphs: dict[tuple[Any, ...], Graph] = {}
        self.calls: dict[tuple[Any, ...], int] = {}
        self.refused: dict[tuple[Any, ...], str] = {}  # kinds of inputs that go step by step, and why
        self.told: set[str] = set()
        self.places: tuple[int, ...] = ()
        self.age = 0  # calls since anything lay elsewhere
        self.moved: dict[str, int] = {}  # what lies elsewhere again and again, and how often in a row
        self.stream: torch.cuda.Stream | None = None
        self.pool: Any = None

    def run(self, **inputs: Any) -> Tensor:
        """One forward and backward pass."""
        with nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype):
            loss = self.model(**inputs).loss
        loss.backward()
        return loss.detach()

    def __call__(self, **inputs: Any) -> Tensor:
        tensors = {n: t.to(self.device) for n, t in inputs.items() if isinstance(t, Tensor)}
        rest = {n: x for n, x in inputs.items() if n not in tensors}
        inputs, on = {**tensors, **rest}, self.device.type
        mode = (*(m.training for m in self.model.modules()), torch.is_autocast_enabled(on) and torch.get_autocast_dtype(on))
        kind = (mode, *((n, t.shape, t.dtype, t.requires_grad) for n, t in tensors.items()), *rest.items())
        try:
            hash(kind)
        except TypeError:
            names = {n: type(x).__name__ for n, x in rest.items()}
            raise TypeError(f"Captured: inputs must be tensors or hashable, got {names}") from None
        parameters = (p.data_ptr() if p.requires_grad else -p.data_ptr() for p in self.model.parameters())
        places = (self.listeners(), *parameters, *(b.data_ptr() for b in self.model.buffers()))
        if places != self.places:  # what it holds was moved, replaced or frozen, somebody listens now: graphs know what was before
            self.moved = self.restless(places)
            self.graphs, self.calls, self.refused, self.places, self.pool, self.age = {}, {}, {}, places, None, 0
        self.age += 1
        if self.moved and self.age > 3:  # lies still now
            self.moved, self.calls, self.refused = {}, {}, {}
        if (graph := self.graphs.get(kind)) is None:
            seen = self.calls[kind] = self.calls.get(kind, 0) + 1
            if kind not in self.refused and (reason := self.obstacle(tensors)):
                self.refuse(kind, reason)
            if kind in self.refused:
                return self.step(**inputs)
            if seen <= 2:
                return self.watched(kind, inputs) if seen == 2 else self.aside(inputs)
            try:
                graph = self.graphs[kind] = self.record(tensors, rest)
            except RuntimeError as error:  # asking for the state of random numbers, say
                self.refuse(kind, str(error).partition("\n")[0])
                return self.step(**inputs)
        return self.replay(graph, tensors)

    def listeners(self) -> int:
        """How many modules and parameters have hooks."""
        modules = sum(hooked(m) for m in self.model.modules())
        return modules + sum(bool(p._backward_hooks or p._post_accumulate_grad_hooks) for p in self.model.parameters())

    def restless(self, places: tuple[int, ...]) -> dict[str, int]:
        """Parameters and buffers that lie elsewhere though no graph has been replayed twice; how often in a row."""
        if self.age > 3 or len(places) != len(self.places):
            return {}
        names = (n for listed in (self.model.named_parameters(), self.model.named_buffers()) for n, _ in listed)
        return {n: self.moved.get(n, 0) + 1 for n, a, b in zip(names, places[1:], self.places[1:]) if a != b}

    def obstacle(self, tensors: dict[str, Tensor]) -> str | None:
        """Why no graph can be made of the next kind of inputs."""
        if leaves := [n for n, t in tensors.items() if t.requires_grad]:
            return f"gradients are wanted of {', '.join(leaves)}, which a graph would read from a copy"
        if self.places[0]:
            return "modules or parameters have hooks, which a graph would not call"
        if again := [n for n, times in self.moved.items() if times >= RESTLESS]:
            return f"{', '.join(again)} lies elsewhere at every call: write into it (copy_) instead of assigning it anew"
        return f"{MOST} other shapes have one" if len(self.graphs) >= MOST else None

    def refuse(self, kind: tuple[Any, ...], reason: str) -> None:
        """Go on step by step with such inputs; each reason is told once."""
        if reason not in self.told:
            self.told.add(reason)
            logger.warning(f"Captured: no graph for inputs {kind[1:]}: {reason}")
        self.refused[kind] = reason

    def aside(self, inputs: dict[str, Any]) -> Tensor:
        """The step as it is, on the stream that records."""
        here = torch.cuda.current_stream(self.device)
        if self.stream is None:
            self.stream = torch.cuda.Stream(self.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            loss = self.step(**inputs)
        here.wait_stream(self.stream)
        return loss

    def watched(self, kind: tuple[Any, ...], inputs: dict[str, Any]) -> Tensor:
        """The same; finds out whether the host waits for the GPU in it, which a graph cannot."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                loss = self.aside(inputs)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for w in heard:
            if SYNC in str(w.message):
                if kind not in self.refused:
                    self.refuse(kind, f"the host reads from the GPU in {w.filename}:{w.lineno}")
            elif MODE not in str(w.message):
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
        return loss

    def record(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> Graph:
        """Record the step without running it; the parameters' gradients stay what they are."""
        parameters = list(self.model.parameters())
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        inputs, here = {n: t.clone() for n, t in tensors.items()}, torch.cuda.current_stream(self.device)
        graph = torch.cuda.CUDAGraph()
        torch.clear_autocast_cache()  # casts of weights made before would be what the graph reads for ever
        try:
            with torch.cuda.stream(here):  # again the current one afterwards: torch.cuda.graph leaves its own where recording fails
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                    loss = self.step(**inputs, **rest)
            gradients = [p.grad for p in parameters]
        finally:
            torch.clear_autocast_cache()
            for p, grad in zip(parameters, before):
                p.grad = grad
        self.pool = graph.pool()
        return Graph(inputs, loss, gradients, graph.replay)

    def replay(self, graph: Graph, tensors: dict[str, Tensor]) -> Tensor:
        """The step on these inputs."""
        parameters = list(self.model.parameters())
        ours = {id(t) for g in self.graphs.values() for t in g.gradients}
        for p in parameters:
            if p.grad is not None and id(p.grad) in ours:  # not taken away since the last call: to be added to
                p.grad = p.grad.clone()
        for name, place in graph.inputs.items():
            place.copy_(tensors[name])
        graph.replay()
        sums, more = [], []
        for p, grad in zip(parameters, graph.gradients):
            if grad is not None and p.grad is not None:
                sums.append(p.grad)
                more.append(grad)
            elif grad is not None:
                p.grad = grad
        if sums:
            torch._foreach_add_(sums, more)
        return graph.loss.clone()


__all__ = ["Captured"]
