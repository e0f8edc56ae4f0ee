"""Tokenizers that need no download: the 256 bytes, or byte-pair merges learnt from the training text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from functools import cache
from typing import Any

BYTES = 256


@cache
def byte_alphabet() -> tuple[str, ...]:
    """The printable character by which byte-level tokenizers write each byte, in the order of the bytes.

    Bytes that are printable Latin-1 characters stand for themselves; the others are 256, 257, ... in order (Radford et al. 2019).
    """
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(BYTES, 2 * BYTES))
    return tuple(chr(b if b in plain else next(moved)) for b in range(BYTES))


def byte_tokenizer() -> Any:
    """A `PreTrainedTokenizerFast` of 256 tokens whose ids are the bytes of the UTF-8 text. No special tokens."""
    from tokenizers import models

    return _fast(_byte_level(models.BPE(vocab={c: b for b, c in enumerate(byte_alphabet())}, merges=[]), words=False))


def bpe_tokenizer(texts: Iterable[str], vocab: int) -> Any:
    """A `PreTrainedTokenizerFast` of byte-level byte-pair encoding with at most `vocab` tokens, learnt from `texts`.

    Raises ValueError where `vocab` leaves no room for a merge.
    """
    from tokenizers import models, trainers

    if vocab <= BYTES:
        raise ValueError(f"vocab must be more than the {BYTES} bytes, got {vocab}")
    tokenizer = _byte_level(models.BPE(), words=True)
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=sorted(byte_alphabet()), special_tokens=[], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return _fast(tokenizer)


def encode(tokenizer: Any, text: str) -> list[int]:
    """The token ids of `text`; any text comes back whole from `tokenizer.decode`."""
    if len(tokenizer) == BYTES:  # the ids are the bytes: much faster than asking
        return list(text.encode())
    return tokenizer.encode(text, add_special_tokens=False)


def token_bytes(tokenizer: Any) -> list[bytes]:
    """What each token id stands for. Special tokens, which stand for no text, are empty.

    Raises ValueError for a tokenizer that is not byte-level.
    """
    back = {c: b for b, c in enumerate(byte_alphabet())}
    special = set(tokenizer.all_special_ids)
    table = []
    for i, token in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))):
        if i not in special and not all(c in back for c in token):
            raise ValueError(f"the tokenizer must be byte-level; its token {i} is {token!r}")
        table.append(b"" if i in special else bytes(back[c] for c in token))
    return table


class Stream:
    """Text from tokens one at a time: a character split over several tokens appears when its last byte has come."""

    def __init__(self, tokenizer: Any) -> None:
        self._bytes = token_bytes(tokenizer)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def put(self, token: int) -> str:
        return self._decoder.decode(self._bytes[token])

    def end(self) -> str:
        """What is left: a replacement character if the last character never became whole."""
        return self._decoder.decode(b"", final=True)


def _byte_level(model: Any, words: bool) -> Any:
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _fast(tokenizer: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
