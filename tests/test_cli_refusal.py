"""Bad use of the command line: one line, an exit code, nothing written."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from cli_case import TINY, call, tale, trained
from declared import LINES

REFUSALS = {
    "no text": ("train --out {new}", "give at least one text"),
    "missing file": ("train {tmp}/nowhere.txt --out {new}", "nowhere.txt: no such file"),
    "empty file": ("train {tmp}/empty.txt --out {new}", "no text in"),
    "empty folder": ("train {tmp}/void --out {new}", "no text in"),
    "binary file": ("train {tmp}/binary --out {new}", "not UTF-8"),
    "short text": ("train {tmp}/short.txt --out {new}", "too short"),
    "unknown option": ("train {text} --out {new} --colour red", "--colour"),
    "option without a number": ("train {text} --out {new} --steps many", "--steps"),
    "unknown mixer": ("train {text} --out {new} --mixer abacus", "abacus"),
    "no layers": ("train {text} --out {new} --layers 0", "--layers must be at least 1, got 0"),
    "heads that do not divide": ("train {text} --out {new} --width 30 --heads 4", "--width must be a multiple of --heads"),
    "layers beyond counting": ("train {text} --out {new} --layers 99999999999999999999", "at least 1 and at most 2147483647, got 99999"),
    "steps beyond counting": ("train {text} --out {new} --steps 99999999999999999999", "--steps must be at least 1 and at most"),
    "batches beyond counting": ("train {text} --out {new} --batch 99999999999999999999", "--batch must be at least 1 and at most"),
    "vocabulary beyond counting": ("train {text} --out {new} --tokenizer bpe --vocab 99999999999999999999", "--vocab must be at most"),
    "no steps": ("train {text} --out {new} --steps 0", "--steps must be at least 1, got 0"),
    "minutes below zero": ("train {text} --out {new} --minutes -1", "--minutes must be a positive number"),
    "learning rate zero": ("train {text} --out {new} --lr 0", "--lr must be a positive number"),
    "learning rate not a number": ("train {text} --out {new} --lr nan", "--lr must be a positive number"),
    "unknown schedule": ("train {text} --out {new} --schedule moon", "--schedule must be one of cosine, wsd"),
    "unknown dtype": ("train {text} --out {new} --dtype int8", "--dtype must be one of"),
    "float16 on a CPU": ("train {text} --out {new} --dtype float16 --device cpu", "--dtype float16 needs a GPU"),
    "unknown device": ("train {text} --out {new} --device tpu", "--device must be auto, cpu or cuda"),
    "threads below zero": ("train {text} --out {new} --threads -1", "--threads must be between 0 and 1024, got -1"),
    "unknown tokenizer": ("train {text} --out {new} --tokenizer word", "--tokenizer must be one of byte, bpe"),
    "vocabulary for bytes": ("train {text} --out {new} --vocab 500", "--vocab is for --tokenizer bpe"),
    "vocabulary too small": ("train {text} --out {new} --tokenizer bpe --vocab 256", "more than 256, got 256"),
    "context of one": ("train {text} --out {new} --context 1", "--context must be at least 2"),
    "folder in use": ("train {text} --out {full}", "not empty: continue its run with --resume, replace it with --force"),
    "folder that is a file": ("train {text} --out {text}", "is a file"),
    "force over what is no run": ("train {text} --out {full} --force", "--force replaces only runs"),
    "resume and force": ("train {text} --out {run} --resume --force", "not both"),
    "resume of nothing": ("train {text} --out {new} --resume", "no run to resume"),
    "resume of a finished run": ("train --out {run} --resume", "finished"),
    "more pairs than keys": ("eval recall --out {new} --size pairs=9 --size keys=8", "pairs must be between 1 and keys = 8, got 9"),
    "sequence too short": ("eval recall --out {new} --size pairs=8 --size length=20", "length must be at least 3 * pairs + 1 = 25"),
    "mixer that is no mixer": ("eval parity --out {new} --mixer gla:expand_k", "--mixer must be NAME or NAME:FIELD=VALUE"),
    "mixer with another's field": ("eval parity --out {new} --mixer gla:lower_bound=-5", "no layer of ['gla'] uses lower_bound"),
    "mixer with a word for a number": ("train {text} --out {new} --mixer gla:expand_k=wide", "expand_k must be float | int"),
    "mixer with a number beyond all": ("train {text} --out {new} --mixer gla:expand_k=1e400", "expand_k must be finite"),
    "mixer with a size beyond counting": ("train {text} --out {new} --mixer gla:head_dim=99999999999999999999", "Overflow"),
    "mixer with its own tokens": ("train {text} --out {new} --mixer gla:bos_token_id=5", "--mixer cannot set bos_token_id"),
    "mixer with its own width": ("train {text} --out {new} --mixer gla:hidden_size=8", "--mixer cannot set hidden_size"),
    "unknown task": ("eval chess --out {new}", "TASK must be one of copying, parity, permutation, recall, got chess"),
    "unknown size": ("eval parity --out {new} --size pairs=3", "with a name among length, got pairs=3"),
    "second member unknown": ("eval parity --out {new} --mixer gla --mixer mamba7", "mixer and layer_types must be among"),
    "eval resumed and forced": ("eval parity --out {new} --resume --force", "not both"),
    "context longer than the text": ("perplexity {run} {text} --context 99999", "fewer than --context 99999"),
    "perplexity of no model": ("perplexity {full} {text}", "holds no model"),
    "missing model": ("generate {tmp}/nowhere", "nowhere: no such folder"),
    "folder without a model": ("generate {full}", "holds no model"),
    "damaged model": ("generate {tmp}/damaged", "header"),
    "folder below a file": ("train {text} --out {text}/below", "Not a directory"),
    "empty prompt": ("generate {run} --prompt {nothing}", "--prompt is empty"),
    "temperature below zero": ("generate {run} --temperature -1", "--temperature must be"),
    "top-p of zero": ("generate {run} --top-p 0", "--top-p must be"),
    "temperature that no number divides by": ("generate {run} --temperature 1e-300", "of at least 2e-16, got 1e-300"),
    "seed below zero": ("generate {run} --seed -1", "--seed must not be negative or huge"),
    "seed beyond counting": ("generate {run} --seed 99999999999999999999", "--seed must not be negative or huge"),
    "perplexity into a file": ("perplexity {run} {text} --context 32 --out {text}", "--out {text} is no folder and cannot be made one"),
    "bench into a file": ("bench gla --shape 1,64,1,1,16,16 --device cpu --out {text}", "--out {text} is no folder"),
    "bench of modules into a file": ("bench --module conv --shape 1,128,128 --device cpu --out {text}", "--out {text} is no folder"),
    "turns below a file": ("bench gla --shape 1,64,1,1,16,16 --device cpu --turns {text}/below/lock", "--turns: the folder"),
    "turns at a folder": ("bench gla --shape 1,64,1,1,16,16 --device cpu --turns {full}", "--turns must be a file"),
    "bench with threads beyond counting": ("bench gla --device cpu --threads 99999999999999999999", "--threads must be between 0 and 1024"),
    "no new tokens": ("generate {run} --max-new-tokens 0", "--max-new-tokens must be at least 1"),
    "unknown command": ("paint", "paint"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return tale(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def run(text, tmp_path_factory) -> Path:
    """A finished run."""
    return trained(text, tmp_path_factory.mktemp("run") / "bytes", "--steps", 10)


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_is_one_line_and_code_two_and_writes_nothing(case, text, run, tmp_path, capsys):
    command, message = REFUSALS[case]
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "short.txt").write_text("brief")
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    (tmp_path / "void").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("keep me")
    (tmp_path / "damaged").mkdir()
    for name in "config.json", "tokenizer.json", "tokenizer_config.json":
        (tmp_path / "damaged" / name).write_bytes((run / name).read_bytes())
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"half a mod")
    before = sorted((p, p.stat().st_mtime_ns) for root in (tmp_path, run) for p in root.rglob("*"))
    places = {"{tmp}": tmp_path, "{new}": tmp_path / "new", "{full}": tmp_path / "full", "{run}": run, "{text}": text, "{nothing}": ""}
    words = command.split()
    for mark, place in places.items():
        words, message = [w.replace(mark, str(place)) for w in words], message.replace(mark, str(place))
    assert call(*words) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("chunkwise: ") and message in captured.err
    assert captured.out == ""
    assert sorted((p, p.stat().st_mtime_ns) for root in (tmp_path, run) for p in root.rglob("*")) == before


FULL = [MemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory"), OverflowError("too large")]


@pytest.mark.parametrize("error", FULL, ids=lambda e: type(e).__name__)
def test_a_run_that_outgrows_the_memory_says_so(error, text, tmp_path, capsys, monkeypatch):
    from chunkwise.models import ChunkwiseForCausalLM

    def full(self, config):
        raise error

    monkeypatch.setattr(ChunkwiseForCausalLM, "__init__", full)
    code = call("train", text, "--out", tmp_path / "run", *TINY, "--steps", 10)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and not (tmp_path / "run").exists()
    assert (code, said.startswith("chunkwise: out of memory: ")) == ((2, False) if isinstance(error, OverflowError) else (1, True))


@pytest.mark.parametrize("signal", [KeyboardInterrupt, EOFError])
def test_a_user_who_interrupts_is_told_so(signal, run, capsys, monkeypatch):
    def stop(device):
        raise signal

    monkeypatch.setattr(importlib.import_module("chunkwise.cli.generate"), "choose_device", stop)
    assert call("generate", run) == 130
    assert capsys.readouterr().err.split("\n")[-2:] == ["chunkwise: interrupted", ""]


@pytest.mark.parametrize("lacking", ["transformers", "accelerate", "tensorboard", "matplotlib"])
@pytest.mark.parametrize("command", ["train {text}", "eval parity", "generate {run}", "perplexity {run} {text}", "convert {run} {new}"])
def test_a_command_names_what_is_not_installed_and_where_it_comes_from(command, lacking, text, run, tmp_path, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == lacking else find(name, *rest))
    monkeypatch.setattr("importlib.metadata.requires", lambda name: LINES)
    monkeypatch.chdir(tmp_path)
    words = [w.format(text=text, run=run, new=tmp_path / "new") for w in command.split()]
    extra = "models" if command.startswith("convert") else "train"
    if extra == "models" and lacking != "transformers":
        assert call(*words) == 0  # it can do without
        return
    assert call(*words) == 2
    assert capsys.readouterr().err == f"chunkwise: this command needs {lacking}: pip install 'chunkwise[{extra}]'\n"
    assert not list(tmp_path.iterdir())
