"""What the distribution requires for its extras, as its metadata will say when this checkout is installed."""

import tomllib
from pathlib import Path

EXTRAS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
LINES = [f'{line}; extra == "{name}"' for name, lines in EXTRAS.items() for line in lines]
