"""The command line as its user meets it."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cli_case import TEXT, TINY, call, tale, trained

from chunkwise.cli.recipe import Recipe


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return tale(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def run(text, tmp_path_factory) -> Path:
    """A finished run, with byte-pair encoding."""
    return trained(text, tmp_path_factory.mktemp("run") / "bpe", "--steps", 40, "--lr", 0.01, "--tokenizer", "bpe", "--vocab", 300)


def result(out: Path) -> dict:
    return json.loads((out / "result.json").read_text())


def losses(out: Path) -> list[tuple[int, dict]]:
    """The loss curve: everything logged but the clock."""
    history = [e for e in result(out)["history"] if "loss" in e or "eval_loss" in e]
    return [(e["step"], {k: v for k, v in e.items() if k != "seconds"}) for e in history]


def test_training_learns_and_leaves_a_model_a_curve_and_a_result(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import chunkwise.models  # noqa: F401

    out = result(run)
    curve = [e["loss"] for _, e in losses(run) if "loss" in e]
    assert curve[-1] < curve[0] - 0.5 and out["steps"] == 40 and out["tokens"] == 40 * 2 * 32
    assert out["bits_per_byte"] < math.log2(300) / 2
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").glob("events*"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run), AutoTokenizer.from_pretrained(run)
    assert model.num_parameters() == out["parameters"]
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT


def test_killed_run_continues_to_the_bit(text, tmp_path):
    """kill -9 after the first checkpoint, then --resume: the loss curve and the weights are those of a run left alone."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    program = [sys.executable, "-m", "chunkwise.cli", "train"]
    options = [str(text), *TINY, "--steps", "100", "--save-every", "10", "--out"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    process = subprocess.Popen([*program, *options, str(killed)], **quiet)
    while not list(killed.glob("checkpoint-*/COMPLETE")):
        assert process.poll() is None, "the run ended before its first checkpoint"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (killed / "result.json").exists()
    half = killed / "checkpoint-9999"  # as if the kill had come while a checkpoint was being written
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    resumed = subprocess.run([*program, "--resume", "--out", str(killed)], **{**quiet, "stderr": subprocess.PIPE}, text=True)
    assert resumed.returncode == 0 and "continuing from step" in resumed.stderr
    subprocess.run([*program, *options, str(whole)], check=True, **quiet)
    assert losses(killed) == losses(whole)
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert not half.exists()


def test_run_killed_before_its_first_checkpoint_starts_again(text, tmp_path, capsys):
    options = [*TINY, "--steps", 12, "--seed", 5]
    assert call("train", text, "--out", tmp_path / "whole", *options) == 0
    assert call("train", text, "--out", tmp_path / "killed", *options) == 0
    for file in (tmp_path / "killed").iterdir():
        if file.is_file() and file.name != "recipe.json":
            file.unlink()
    assert call("train", "--out", tmp_path / "killed", "--resume") == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_run_inside_the_folder_of_its_texts_reads_nothing_of_itself(text, tmp_path, capsys):
    (tmp_path / "tale.txt").write_text(TEXT)
    out = tmp_path / "runs" / "inside"
    assert call("train", tmp_path, "--out", out, *TINY, "--steps", 10) == 0
    (out / "result.json").unlink()
    assert call("train", "--out", out, "--resume") == 0
    capsys.readouterr()
    assert call("train", text, "--out", tmp_path / "alone", *TINY, "--steps", 10) == 0
    assert losses(out) == losses(tmp_path / "alone")


def test_run_is_reproducible_and_the_seed_changes_it(text, tmp_path):
    for name, seed in dict(a=1, b=1, c=2).items():
        assert call("train", text, "--out", tmp_path / name, *TINY, "--steps", 10, "--seed", seed) == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")


def test_run_limited_by_time_stops_on_time(text, tmp_path):
    assert call("train", text, "--out", tmp_path / "run", *TINY, "--minutes", 0.02) == 0
    out = result(tmp_path / "run")
    assert 1.2 <= out["seconds"] < 10 and out["history"][-1]["step"] == out["steps"] > 1


def test_bfloat16_trains_by_autocast_on_float32_weights(text, tmp_path):
    from safetensors.torch import load_file

    for dtype in "bfloat16", "float32":
        assert call("train", text, "--out", tmp_path / dtype, *TINY, "--steps", 10, "--dtype", dtype) == 0
    weights = load_file(tmp_path / "bfloat16" / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.float32}
    assert losses(tmp_path / "bfloat16") != losses(tmp_path / "float32")


def test_learning_rate_follows_its_schedule():
    recipe = Recipe(mixer="gla", layers=1, width=8, heads=1, batch=1, lr=1.0, steps=1000, warmup=100)
    rates = [recipe.rate(s, s / 1000) for s in range(1001)]
    assert rates.index(max(rates)) == 100 and rates[0] < 0.02 and abs(rates[1000]) < 1e-12
    wsd = Recipe(mixer="gla", layers=1, width=8, heads=1, batch=1, lr=1.0, steps=1000, warmup=100, schedule="wsd")
    rates = [wsd.rate(s, s / 1000) for s in range(1001)]
    assert all(r == 1 for r in rates[100:800]) and rates[900] == pytest.approx(0.5) and rates[1000] == 0


def test_eval_compares_members_and_plots_and_goes_on_where_it_stopped(tmp_path, capsys):
    sizes = "--size pairs=2 --size keys=4 --size values=4 --size length=12 --layers 1 --width 16 --steps 20".split()
    both = ["--mixer", "delta_rule:allow_neg_eigval=true", "--mixer", "rwkv7"]
    assert call("eval", "recall", "--out", tmp_path, *both, *sizes) == 0
    said = capsys.readouterr().out
    found = {m: json.loads((tmp_path / m / "accuracy.json").read_text()) for m in (both[1], "rwkv7")}
    for name, points in found.items():
        assert list(points) == ["2", "4"] and points["2"] == result(tmp_path / name)["accuracy"]  # 8 pairs are more than the keys
        assert f"{name}: {points['4']:.1%} right at pairs = 4 (guessing: 25.0%)" in said
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    before = (tmp_path / "rwkv7" / "model.safetensors").stat().st_mtime_ns
    assert json.loads((tmp_path / both[1] / "config.json").read_text())["allow_neg_eigval"] is True
    (tmp_path / both[1] / "accuracy.json").unlink()
    assert call("eval", "recall", "--out", tmp_path, *both, *sizes, "--mixer", "retention", "--resume") == 0
    assert found == {m: json.loads((tmp_path / m / "accuracy.json").read_text()) for m in found}
    assert (tmp_path / "rwkv7" / "model.safetensors").stat().st_mtime_ns == before and result(tmp_path / "retention")["steps"] == 20
    assert call("eval", "parity", "--out", tmp_path, *both, "--resume") == 2
    assert "holds a run on" in capsys.readouterr().err


def test_perplexity_is_that_of_the_whole_window_in_one_pass(run, text, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from chunkwise.data.tokenizer import encode
    from chunkwise.models.perplexity import by_doubling, nats_by_context

    model, tokenizer = AutoModelForCausalLM.from_pretrained(run).double().eval(), AutoTokenizer.from_pretrained(run)
    tokens = torch.tensor([encode(tokenizer, TEXT)[:100], encode(tokenizer, TEXT)[50:150]])
    with torch.no_grad():
        want = -model(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2).mean(0)
    for piece in (7, 99, 1000):
        got = nats_by_context(model, tokens, piece)
        assert got.shape == want.shape and (got - want).norm() <= 64 * torch.finfo(torch.float64).eps * want.norm()
    seen = by_doubling(want)
    assert list(seen) == [1, 2, 4, 8, 16, 32, 64] and seen[4] == want[3:7].mean() and seen[64] == want[63:].mean()
    capsys.readouterr()
    assert call("perplexity", run, text, "--context", 64, "--out", run / "seen") == 0
    table = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in table[1:-1]] == [1, 2, 4, 8, 16, 32]
    assert all(1 <= float(line.split()[1]) < 300 for line in table[1:-1]) and (run / "seen" / "perplexity.png").is_file()


def test_generated_text_is_that_of_the_model_before_it_was_saved(tmp_path, capsys):
    from chunkwise.data.tokenizer import byte_tokenizer
    from chunkwise.models import ChunkwiseConfig, ChunkwiseForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_heads=2, vocab_size=256)
    config = ChunkwiseConfig(mixer="gla", **sizes)
    model, tokenizer = ChunkwiseForCausalLM(config).eval(), byte_tokenizer()
    ids = tokenizer("Hello", return_tensors="pt")["input_ids"]
    want = tokenizer.decode(model.generate(ids, max_new_tokens=30, do_sample=False)[0])
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert call("generate", tmp_path, "--prompt", "Hello", "--max-new-tokens", 30, "--temperature", 0) == 0
    assert capsys.readouterr().out == want + "\n"


def test_sampling_repeats_with_its_seed_and_only_with_it(run, capsys):
    def text(**options):
        flags = [x for k, v in options.items() for x in (f"--{k.replace('_', '-')}", v)]
        assert call("generate", run, "--prompt", "It was", "--max-new-tokens", 30, *flags) == 0
        return capsys.readouterr().out

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert text(seed=1).startswith("It was")
    assert text(seed=1, top_p=1e-9) == text(temperature=0)  # only the likeliest token is left


def test_text_appears_while_the_model_still_writes(run, monkeypatch):
    from chunkwise.models import ChunkwiseForCausalLM

    forward, calls, seen = ChunkwiseForCausalLM.forward, [], []

    def counted(self, *args, **kwargs):
        calls.append(1)
        return forward(self, *args, **kwargs)

    class Paper:
        def write(self, text):
            seen.append((len(calls), text))

        def flush(self):
            seen.append((len(calls), None))

    counted.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(ChunkwiseForCausalLM, "forward", counted)
    monkeypatch.setattr(sys, "stdout", Paper())
    assert call("generate", run, "--prompt", "It was", "--max-new-tokens", 20) == 0
    written = [n for n, text in seen if text]
    assert written[0] <= 1 and len(calls) == 20
    assert len(set(written)) > 10, "the text came in a few lumps"
    assert all(text is None for _, text in seen[1::2]), "every write is flushed"


def test_long_prompt_is_read_in_pieces_to_the_same_text(run, monkeypatch, capsys):
    def text():
        assert call("generate", run, "--prompt", TEXT[:300], "--max-new-tokens", 20, "--temperature", 0) == 0
        return capsys.readouterr().out

    whole = text()
    monkeypatch.setattr(importlib.import_module("chunkwise.cli.generate"), "PIECE", 16)
    assert text() == whole


def test_prompt_longer_than_the_memory_is_refused_where_memory_grows(run, tmp_path, monkeypatch, capsys):
    from chunkwise.data.tokenizer import byte_tokenizer
    from chunkwise.models import ChunkwiseConfig, ChunkwiseForCausalLM

    sizes = dict(hidden_size=16, num_hidden_layers=2, num_heads=2, vocab_size=256)
    ChunkwiseForCausalLM(ChunkwiseConfig(layer_types=["gla", "full_attention"], **sizes)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(importlib.import_module("chunkwise.cli.generate"), "free_memory", lambda: 15 * 2 * 16 * 4)
    assert call("generate", tmp_path, "--prompt", "Hello", "--max-new-tokens", 11) == 2  # one layer keeps 16 keys and values of 16 floats
    error = capsys.readouterr().err
    assert error == "chunkwise: 16 tokens are more than the memory holds: the attention layers want 2,048 bytes, 1,920 are free\n"
    assert call("generate", tmp_path, "--prompt", "Hello", "--max-new-tokens", 10) == 0
    assert call("generate", run, "--prompt", "Hello", "--max-new-tokens", 50) == 0  # a recurrent state does not grow


def test_listings_name_every_member(capsys):
    from chunkwise.spec import all_ops

    for command in "ops", "doctor":
        assert call(command) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in all_ops())
    assert torch.__version__ in out and "GPU" in out.upper()


def test_help_is_no_error(capsys):
    assert call("train", "--help") == 0
    assert "--mixer" in capsys.readouterr().out


def test_resumed_run_refuses_options_and_texts_that_differ(text, tmp_path, capsys):
    tale = tmp_path / "tale.txt"
    tale.write_text(TEXT)
    out = tmp_path / "run"
    assert call("train", tale, "--out", out, *TINY, "--steps", 10) == 0
    (out / "result.json").unlink()
    capsys.readouterr()
    assert call("eval", "parity", "--out", out.parent, "--mixer", out.name, "--resume") == 2
    assert "holds the run of another command" in capsys.readouterr().err
    assert call("train", "--out", out, "--resume", "--width", 32) == 2
    assert capsys.readouterr().err == "chunkwise: --width was 16 when the run began; it cannot become 32\n"
    tale.write_text(TEXT + "More.")
    assert call("train", "--out", out, "--resume") == 2
    assert "text has changed" in capsys.readouterr().err


def test_unfinished_run_points_to_its_checkpoint(tmp_path, capsys):
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-20" / "model.safetensors").write_bytes(b"")
    assert call("generate", tmp_path) == 2
    assert "the newest checkpoint is" in capsys.readouterr().err


def test_loss_that_is_not_finite_ends_the_run(text, tmp_path, capsys, monkeypatch):
    from chunkwise.models import ChunkwiseForCausalLM

    init = ChunkwiseForCausalLM.__init__

    def broken(self, config):
        init(self, config)
        with torch.no_grad():
            next(self.parameters()).fill_(float("nan"))

    monkeypatch.setattr(ChunkwiseForCausalLM, "__init__", broken)
    assert call("train", text, "--out", tmp_path / "run", *TINY, "--steps", 20) == 1
    assert "the loss is nan at step 10" in capsys.readouterr().err
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_force_replaces_a_run(text, tmp_path):
    assert call("train", text, "--out", tmp_path / "run", *TINY, "--steps", 10) == 0
    assert call("train", text, "--out", tmp_path / "run", *TINY, "--steps", 20, "--force") == 0
    assert result(tmp_path / "run")["steps"] == 20


def test_command_line_starts_without_torch():
    code = "import sys, chunkwise.cli.app; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
