"""What the command line shows: its help texts, and the bar of a training run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import typer.main
from rich.text import Text

pytest.importorskip("transformers", reason="transformers is not installed")

from chunkwise.cli.app import app, run  # noqa: E402
from chunkwise.cli.progress import Progress  # noqa: E402
from chunkwise.engine import measured  # noqa: E402


def test_no_word_of_a_help_text_is_taken_for_markup():
    helps = [p.help for command in typer.main.get_command(app).commands.values() for p in command.params if getattr(p, "help", None)]
    assert len(helps) > 50
    assert [text for text in helps if Text.from_markup(text).plain != text] == []


def test_the_bar_shows_a_loss_as_soon_as_there_is_one_and_a_dash_before(tmp_path):
    state = SimpleNamespace(global_step=3, log_history=[])
    progress = Progress(SimpleNamespace(share=lambda step: 1.0), "loss", 8, tmp_path / "curve.png")
    shown = lambda: progress.bar.columns[2].render(progress.bar.tasks[0]).plain  # noqa: E731
    progress.on_step_begin(None, state, None)
    progress.on_step_end(None, state, None)
    assert "3 steps" in shown() and shown().endswith("loss –")
    progress.on_log(None, state, None, logs={"loss": 1.25})
    assert shown().endswith("loss 1.250")


def test_the_doctor_names_a_broken_file_of_measured_configs_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    (tmp_path / "abacus.json").write_text("{}")
    assert run(["doctor"]) == 2
    assert capsys.readouterr().err == f"chunkwise: tune: {tmp_path / 'abacus.json'} is no file of measured configs\n"
