"""What models are trained on: tokenizers, text, recall."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from chunkwise.data.mix import mix
from chunkwise.data.permutation import product_table
from chunkwise.data.task import IGNORE, Drill, all_tasks
from chunkwise.data.text import Crops, TextTask, fingerprint, read_texts, split_texts
from chunkwise.data.tokenizer import Stream, bpe_tokenizer, byte_tokenizer, encode, token_bytes

TEXT = "O, wonder!\nHow many goodly creatures are there here! “Naïve” café, 世界, \U0001f600, \x07\r\n\ttab. " * 20


@pytest.fixture(scope="module", params=["byte", "bpe"])
def tokenizer(request):
    return byte_tokenizer() if request.param == "byte" else bpe_tokenizer([TEXT], 300)


class Uniform(torch.nn.Module):
    """A model that thinks every token equally likely."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(vocab))

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.weight.expand(*input_ids.shape, -1))


def test_byte_ids_are_the_bytes():
    tokenizer = byte_tokenizer()
    assert encode(tokenizer, TEXT) == tokenizer.encode(TEXT) == list(TEXT.encode())
    assert token_bytes(tokenizer) == [bytes([b]) for b in range(256)]


def test_any_text_comes_back_from_its_tokens(tokenizer):
    ids = encode(tokenizer, TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert b"".join(token_bytes(tokenizer)[i] for i in ids).decode() == TEXT


def test_bpe_learns_merges_up_to_its_vocabulary():
    tokenizer = bpe_tokenizer([TEXT], 300)
    assert len(tokenizer) == 300
    assert len(encode(tokenizer, TEXT)) < 0.7 * len(TEXT.encode())
    with pytest.raises(ValueError, match="vocab must be more than the 256 bytes, got 256"):
        bpe_tokenizer([TEXT], 256)


def test_saved_tokenizer_is_found_by_autotokenizer(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert encode(loaded, TEXT) == loaded(TEXT)["input_ids"] == encode(tokenizer, TEXT)
    assert loaded.decode(encode(loaded, TEXT)) == TEXT


def test_stream_shows_a_character_when_its_last_byte_comes(tokenizer):
    ids = encode(tokenizer, TEXT)
    stream = Stream(tokenizer)
    parts = [stream.put(i) for i in ids]
    assert "".join(parts) + stream.end() == TEXT
    assert not any("\ufffd" in p for p in parts)
    stream = Stream(byte_tokenizer())
    assert [stream.put(b) for b in "é!".encode()] == ["", "é", "!"]
    assert stream.put(0xE4) == "" and stream.end() == "\ufffd"


def test_tokenizer_that_is_not_byte_level_is_refused():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "▁b": 1}, unk_token="a")))
    with pytest.raises(ValueError, match="byte-level; its token 1"):
        token_bytes(words)


def test_folder_is_read_whole_without_what_is_no_text(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.md").write_text("first")
    (tmp_path / "picture").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / ".hidden").write_text("no")
    assert read_texts([tmp_path]) == ["first", "second"]
    assert read_texts([tmp_path / "b.txt", tmp_path / "a"]) == ["second", "first"]


def test_unreadable_texts_are_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such file"):
        read_texts([tmp_path / "nowhere"])
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="latin is not UTF-8"):
        read_texts([tmp_path / "latin"])
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(ValueError, match="no text in .*empty"):
        read_texts([tmp_path / "empty"])


def test_validation_is_the_end_of_every_text_and_never_trained_on():
    texts = ["a" * 95 + "b" * 5, "c" * 190 + "d" * 10]
    assert split_texts(texts) == (["a" * 95, "c" * 190], ["b" * 5, "d" * 10])
    task = TextTask(texts, byte_tokenizer(), context=8, items=500, seed=0)
    seen = {int(t) for i in range(500) for t in task.train[i]["input_ids"]}
    assert seen == set(b"ac")


def test_fingerprint_tells_texts_apart():
    assert len({fingerprint(t) for t in (["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"])}) == 4
    assert fingerprint(["ab", "c"]) == fingerprint(["ab", "c"])


def test_crops_depend_on_seed_and_index_alone_and_reach_every_place():
    tokens = torch.arange(40, dtype=torch.int32)
    crops, again, other = (Crops(tokens, 8, 2000, seed) for seed in (3, 3, 4))
    starts = [int(crops[i]["input_ids"][0]) for i in range(2000)]
    assert starts == [int(again[i]["input_ids"][0]) for i in reversed(range(2000))][::-1]
    assert starts != [int(other[i]["input_ids"][0]) for i in range(2000)]
    assert set(starts) == set(range(33))
    item = crops[7]["input_ids"]
    assert torch.equal(item, torch.arange(8) + item[0])


def test_mix_is_spread_evenly():
    n, bins = 20000, torch.zeros(64)
    for i in range(n):
        bins[mix(1, i) >> 58] += 1
    chi2 = ((bins - n / 64) ** 2 / (n / 64)).sum()  # 63 degrees of freedom: mean 63, deviation sqrt(126)
    assert abs(chi2 - 63) < 6 * math.sqrt(126)
    assert len({mix(s, i) for s in range(100) for i in range(-50, 50)}) == 10000


@pytest.mark.parametrize("context", [2, 7, 64, 10**4])
def test_bits_per_byte_of_a_uniform_model_are_those_of_its_vocabulary(tokenizer, context):
    text = TEXT * (1 if context < 1000 else 110)
    task = TextTask([text], tokenizer, context=context, items=1, seed=0, held_out_bytes=1 << 20)
    held_out = encode(tokenizer, split_texts([text])[1][0])
    got = task.evaluate(Uniform(len(tokenizer)))
    size = sum(len(token_bytes(tokenizer)[i]) for i in held_out[1:])
    want = math.log2(len(tokenizer)) * (len(held_out) - 1) / size  # every token but the first is predicted once
    honest = len(held_out) * torch.finfo(torch.float32).eps  # float32 sums of at most so many terms
    assert abs(got["bits_per_byte"] / want - 1) <= honest
    assert abs(got["loss"] / math.log(len(tokenizer)) - 1) <= honest


def test_evaluation_is_bounded_in_length():
    task = TextTask(["ab" * 50000], byte_tokenizer(), context=16, items=1, seed=0, held_out_bytes=160)
    assert sum(w.numel() for w in task._windows) == 160


def test_text_too_short_for_the_context_is_refused():
    with pytest.raises(ValueError, match="too short: 95 tokens for training, context wants 96"):
        TextTask(["a" * 100], byte_tokenizer(), context=96, items=1, seed=0)
    with pytest.raises(ValueError, match="1 tokens held out"):
        TextTask(["a" * 20], byte_tokenizer(), context=4, items=1, seed=0)


TASKS = all_tasks()


@pytest.mark.parametrize("length", [13, 40])
def test_recall_asks_every_key_once_and_never_shows_the_answer(length):
    task = TASKS["recall"](pairs=4, keys=10, values=6, length=length)
    for i in range(50):
        ids, labels = task.item(0, i)
        key, value = ids[0:8:2], ids[1:8:2]
        assert len(set(key.tolist())) == 4 and key.min() >= 1 and key.max() <= 10
        assert value.min() > 10 and value.max() <= 16
        book = dict(zip(key.tolist(), value.tolist()))
        asked = (labels != IGNORE).nonzero().flatten()
        assert sorted(ids[asked - 1].tolist()) == sorted(book)
        assert all(book[int(ids[p - 1])] == int(labels[p]) for p in asked)
        assert set(ids[8:].tolist()) <= {0, *book}


def test_copying_asks_for_the_string_again():
    ids, labels = TASKS["copying"](length=7, symbols=5).item(3, 1)
    assert ids[:7].min() >= 1 and ids[:7].max() <= 5 and ids[7] == 0 and torch.equal(ids[8:], ids[:7])
    assert (labels[:8] == IGNORE).all() and torch.equal(labels[8:], ids[:7])


def test_parity_asks_for_the_ones_so_far():
    ids, labels = TASKS["parity"](length=30).item(0, 0)
    for t in range(30):
        assert labels[t + 1] - 1 == sum(int(b) - 1 for b in ids[: t + 1]) % 2
    assert ids[30] == 0 and labels[0] == IGNORE and set(ids[:30].tolist()) == {1, 2}


@pytest.mark.parametrize("n", [2, 3, 5])
def test_permutations_ask_for_the_product_so_far(n):
    every = list(itertools.permutations(range(n)))
    table = product_table(n)
    assert all(sorted(row) == list(range(len(every))) for row in table)
    if n > 2:
        assert any(table[p][q] != table[q][p] for p in range(len(every)) for q in range(len(every)))
    ids, labels = TASKS["permutation"](length=12, n=n).item(0, 0)
    things = list(range(n))
    for t in range(12):
        step = every[int(ids[t]) - 1]
        things = [step[i] for i in things]  # each thing goes where the step sends its place
        assert tuple(things) == every[int(labels[t + 1]) - 1]


@pytest.mark.parametrize("name", TASKS)
def test_tasks_are_drawn_from_seed_and_index_alone(name):
    task = TASKS[name]()
    draws = [task.item(1, i) for i in range(10)]
    assert all(torch.equal(a, b) for i, d in enumerate(draws) for a, b in zip(d, task.item(1, i)))
    assert len({tuple(d[0].tolist()) for d in (*draws, *(task.item(2, i) for i in range(10)))}) == 20
    for ids, labels in draws:
        assert ids.shape == labels.shape == (task.tokens,) and ids.min() >= 0 and ids.max() < task.vocab
        asked = labels[labels != IGNORE]
        assert len(asked) and asked.min() >= 1 and asked.max() < task.vocab and 0 < task.chance <= 0.5
    assert getattr(task.at(5), task.axis) == 5


class Book(torch.nn.Module):
    """Looks every token up among the pairs in front of it: the right answer to recall."""

    def __init__(self, vocab: int, keys: int) -> None:
        super().__init__()
        self.vocab, self.keys, self.weight = vocab, keys, torch.nn.Parameter(torch.zeros(()))

    def forward(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, self.vocab)
        for b, row in enumerate(input_ids.tolist()):
            book = {}
            for t, (x, after) in enumerate(zip(row, row[1:])):
                if x in book:
                    logits[b, t, book[x]] = 1
                if 0 < x <= self.keys < after:
                    book[x] = after
        return SimpleNamespace(logits=logits)


def test_recall_accuracy_is_one_for_who_looks_up_and_none_for_who_does_not():
    drill = Drill(TASKS["recall"](pairs=4, keys=8, values=8, length=16), items=1, seed=0, held_out=64)
    assert drill.evaluate(Book(drill.vocab, 8))["accuracy"] == 1
    assert drill.evaluate(Book(drill.vocab, 8), task=drill.task.at(8))["accuracy"] == 1
    assert drill.evaluate(Uniform(drill.vocab))["accuracy"] == 0  # its likeliest token is the filler


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("recall", {"pairs": 0}, "pairs must be at least 1, got 0"),
        ("recall", {"pairs": 9, "keys": 8}, "pairs must be between 1 and keys = 8, got 9"),
        ("recall", {"values": 1}, "values must be at least 2, got 1"),
        ("recall", {"pairs": 4, "length": 12}, "length must be at least 3 . pairs . 1 = 13, got 12"),
        ("copying", {"length": 0}, "length must be at least 1, got 0"),
        ("parity", {"length": 0}, "length must be at least 1, got 0"),
        ("permutation", {"n": 6}, "n must be between 2 and 5, got 6"),
    ],
)
def test_task_sizes_that_cannot_be_drawn_are_refused(name, change, message):
    with pytest.raises(ValueError, match=f"^{name}: {message}"):
        TASKS[name](**change)
