"""What an extra brings is named where it is missing."""

import importlib.metadata
import subprocess
import sys

import pytest
from declared import LINES

from chunkwise import extra as page


@pytest.fixture(autouse=True)
def declared(monkeypatch):
    """What the metadata of this checkout will say."""
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: LINES)


def test_an_extra_brings_what_the_distribution_declares_and_what_that_brings():
    models, train = page.modules("models"), page.modules("train")
    assert "transformers" in models and models == train[: len(models)]
    assert {"typer", "psutil", "matplotlib"} <= set(train) and "triton" not in train
    assert page.modules("unheard_of") == []


def test_the_first_that_is_missing_is_named(monkeypatch):
    assert page.missing("models") == ""
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None if name in ("safetensors", "tokenizers") else True)
    assert page.missing("train") == "safetensors"


def test_nothing_is_said_to_be_missing_where_nothing_is_declared(monkeypatch):
    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", unknown)
    assert page.modules("train") == [] and page.missing("train") == ""


def test_an_import_that_fails_says_where_the_module_comes_from():
    with pytest.raises(ModuleNotFoundError, match=r"the page needs transformers: pip install 'chunkwise\[models\]'") as caught:
        with page.extra("models", "the page"):
            raise ModuleNotFoundError("No module named 'transformers.models'", name="transformers.models")
    assert caught.value.name == "transformers.models"
    with pytest.raises(ModuleNotFoundError, match="^No module named 'numpy'$"), page.extra("models", "the page"):
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")


@pytest.mark.parametrize(("module", "lacking"), [("chunkwise.models", "transformers"), ("chunkwise.models.harness", "lm_eval")])
def test_models_and_the_harness_say_what_they_need(module, lacking):
    pytest.importorskip("transformers")
    code = (
        f"import sys, importlib.metadata as m; sys.modules['{lacking}'] = None; m.requires = lambda name: {LINES!r}\n"
        f"try:\n    import {module}\nexcept ModuleNotFoundError as e:\n    print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"{module} needs {lacking}: pip install 'chunkwise[" in done.stdout, done.stderr
