"""Text files as a language-modelling task measured in bits per byte, so that tokenizers can be compared."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .mix import mix
from .tokenizer import encode, token_bytes

HELD_OUT = 0.05  # the last part of every file is for validation


def read_texts(paths: Sequence[Path], but: Path | None = None) -> list[str]:
    """The text of the files, folders taken whole (hidden files and files that are not UTF-8 text are passed over), sorted by path.

    but: a folder that is passed over where it lies in another of them, as that of a run, which grows from one reading to the next.

    Raises FileNotFoundError for a path that is not there, ValueError for a named file that is not UTF-8 text and where no text is left.
    """
    texts = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and not any(x.startswith(".") for x in p.relative_to(path).parts))
            apart = None if but is None or but.resolve() == path.resolve() else but.resolve()
            texts += [t for t in (_decode(p) for p in inside if apart not in p.resolve().parents) if t]
        elif path.is_file():
            text = _decode(path)
            if text is None:
                raise ValueError(f"{path} is not UTF-8 text")
            texts.append(text)
        else:
            raise FileNotFoundError(f"{path}: no such file or folder")
    if not any(t.strip() for t in texts):
        raise ValueError(f"no text in {', '.join(map(str, paths))}")
    return texts


def _decode(path: Path) -> str | None:
    raw = path.read_bytes()
    if b"\0" in raw:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def split_texts(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """(training, validation): the last twentieth of every text is held out."""
    cuts = [len(t) - int(len(t) * HELD_OUT) for t in texts]
    return [t[:c] for t, c in zip(texts, cuts)], [t[c:] for t, c in zip(texts, cuts)]


def fingerprint(texts: Sequence[str]) -> str:
    """A digest of the texts, by which a resumed run knows that it trains on the same."""
    digest = hashlib.sha256()
    for t in texts:
        raw = t.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


class Crops(Dataset):
    """Item i is a stretch of `context` tokens at a place drawn from (seed, i); `steps * batch` items.

    Items: {"input_ids": [context] int64, "labels": the same}.
    """

    def __init__(self, tokens: Tensor, context: int, length: int, seed: int) -> None:
        self.tokens, self.context, self.length, self.seed = tokens, context, length, seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        start = mix(self.seed, i) % (len(self.tokens) - self.context + 1)
        ids = self.tokens[start : start + self.context].long()
        return {"input_ids": ids, "labels": ids}


class TextTask:
    """Predict the next token of `texts`; validated on the held-out end of each, in bits per byte.

    Raises ValueError where the text is shorter than the context asks for.
    """

    headline = "bits_per_byte"

    def __init__(self, texts: Sequence[str], tokenizer: Any, *, context: int, items: int, seed: int, held_out_bytes: int = 1 << 16) -> None:
        lengths = [len(b) for b in token_bytes(tokenizer)]
        train, held_out = (self._encode(tokenizer, part) for part in split_texts(texts))
        if len(train) < context:
            raise ValueError(f"the text is too short: {len(train)} tokens for training, context wants {context}")
        if len(held_out) < 2:
            raise ValueError(f"the text is too short: {len(held_out)} tokens held out for validation, at least 2 are needed")
        self.train = Crops(train, context, items, seed)
        self._windows, self._lengths = _windows(held_out, context, held_out_bytes), torch.tensor(lengths)
        self.tokens = len(train)

    @staticmethod
    def _encode(tokenizer: Any, texts: Sequence[str]) -> Tensor:
        ids = [i for t in texts for i in encode(tokenizer, t)]
        return torch.tensor(ids, dtype=torch.int32)

    def evaluate(
        self, model: torch.nn.Module, batch: int = 16, autocast: Callable[[], AbstractContextManager] = nullcontext
    ) -> dict[str, float]:
        """{"loss": nats per token, "bits_per_byte"} over the held-out windows."""
        device, nats, tokens, size = next(model.parameters()).device, 0.0, 0, 0
        with torch.no_grad(), autocast():
            for windows in self._windows:
                for ids in windows.split(batch):
                    ids = ids.to(device).long()  # [batch, context]
                    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
                    nats += torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
                    tokens += ids[:, 1:].numel()
                    size += int(self._lengths.to(device)[ids[:, 1:]].sum())
        return {"loss": nats / tokens, "bits_per_byte": nats / math.log(2) / size}


def _windows(tokens: Tensor, context: int, limit: int) -> list[Tensor]:
    """Windows that share one token with the next, so that every token but the first is predicted once: [n, context] and the rest.

    Where that is more than `limit` tokens, evenly spaced whole windows are kept.
    """
    whole = tokens.unfold(0, context, context - 1) if len(tokens) >= context else tokens.new_empty(0, context)
    keep = max(1, limit // context)
    if len(whole) > keep:
        return [whole[torch.linspace(0, len(whole) - 1, keep).long()]]
    rest = tokens[len(whole) * (context - 1) :]
    return [w for w in (whole, rest[None]) if w.numel() and w.shape[1] > 1]
