"""The documented examples of models."""

import doctest
from pathlib import Path


def test_documented_models_do_what_is_written():
    failed, tried = doctest.testfile(str(Path(__file__).parents[1] / "docs" / "models.md"), module_relative=False)
    assert tried > 5 and failed == 0
