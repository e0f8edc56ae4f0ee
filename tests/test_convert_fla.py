"""Models that fla 0.6.0 itself built and computed, through ours: the same logits, the same tensors back."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nn_agreement import agree

pytest.importorskip("transformers", reason="transformers is not installed")
PEER = Path(sys.prefix) / "peer"  # where the Makefile puts fla
if importlib.util.find_spec("fla") is None and not (PEER / "fla").is_dir():
    pytest.skip("flash-linear-attention is not installed", allow_module_level=True)

from safetensors.torch import load_file  # noqa: E402

from chunkwise.models.convert import read_folder, write_folder  # noqa: E402


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fla")
    script = str(Path(__file__).parent / "fla_reference.py")
    code = f"import runpy, sys; sys.path.append({str(PEER)!r}); runpy.run_path({script!r}, run_name='__main__')"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
    return folder


def test_models_of_fla_compute_the_same_through_ours_and_go_back(made, tmp_path):
    folders = sorted(made.iterdir())
    assert len(folders) > 10
    for folder in folders:
        run, model = torch.load(folder / "logits.pt"), read_folder(folder)
        with torch.no_grad():
            truth, got = read_folder(folder).double()(run["x"]).logits, model(run["x"]).logits
        agree({folder.name: run["logits"].flatten(0, 1)}, {folder.name: truth.flatten(0, 1)}, {folder.name: got.flatten(0, 1)})
        agree({folder.name: got.flatten(0, 1)}, {folder.name: truth.flatten(0, 1)}, {folder.name: run["logits"].flatten(0, 1)})
        kind = json.loads((folder / "config.json").read_text())["model_type"]
        write_folder(model, tmp_path / folder.name, kind)
        theirs, back = load_file(folder / "model.safetensors"), load_file(tmp_path / folder.name / "model.safetensors")
        assert theirs.keys() == back.keys() and all(torch.equal(theirs[n], back[n]) for n in theirs), folder.name
