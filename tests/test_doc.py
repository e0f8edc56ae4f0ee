"""What README and docs say is so: names exist, files are there, commands take their options, cases have their tests."""

import ast
import doctest
import importlib.metadata
import importlib.util
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import mutation
import pytest
from typer.main import get_command

import chunkwise
from chunkwise.cli.app import app

ROOT = Path(__file__).parents[1]
DOCS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
TESTS = {name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}
documents = pytest.mark.parametrize("document", DOCS, ids=lambda p: p.name)


@documents
def test_tests_named_in_the_documents_exist(document):
    named = set(re.findall(r"\btest_\w+\b(?!\.py|\*)", document.read_text()))
    files = {p.stem for p in (ROOT / "tests").rglob("*.py")}
    assert not named - TESTS - files


def elsewhere():
    """{test: where alone it runs}, of those that are passed over by default."""
    found = {}
    for file in (ROOT / "tests").rglob("test_*.py"):
        text = file.read_text()
        whole = re.findall(r"^pytestmark = pytest\.mark\.(\w+)", text, re.M)
        for marks, name in re.findall(r"^((?:@[^\n]*\n|[ )][^\n]*\n)*)def (test_\w+)", text, re.M):
            kinds = {*whole, *re.findall(r"^@(?:pytest\.mark\.)?(\w+)", marks, re.M)}
            where = "on a GPU" if kinds & {"gpu", "on_gpu"} else "builds" if "compile" in kinds else ""
            found.setdefault(name, set()).add(where)
    return {name: where.pop() for name, where in found.items() if len(where) == 1 and "" not in where}


def test_cases_say_which_tests_are_passed_over_here():
    text = (ROOT / "docs" / "cases.md").read_text()
    said = {name: where or "" for name, where in re.findall(r"`(test_\w+)`(?: \((on a GPU|builds)[,)])?", text)}
    assert {n: w for n, w in said.items() if w} == {n: w for n, w in elsewhere().items() if n in said}
    assert len(set(said.values())) == 3


def test_every_case_has_its_test_or_a_reason():
    rows = [line.split("|")[1:-1] for line in (ROOT / "docs" / "cases.md").read_text().splitlines() if re.match(r"\| [A-Z]\d\d", line)]
    seen = [entry for row in rows for entry in re.findall(r"[A-Z]\d\d", row[0])]
    assert len(seen) == len(set(seen)) and len(seen) > 80
    for entry, kind, tests in rows:
        named = re.findall(r"`(test_\w+)`", tests)
        assert kind.strip() and (named or len(tests.split()) > 2), entry


@documents
def test_names_in_the_documents_exist(document):
    for name in sorted(set(re.findall(r"\bchunkwise((?:\.\w+)+)", document.read_text()))):
        found, parts = chunkwise, name.strip(".").split(".")
        for i, part in enumerate(parts):
            try:
                found = getattr(found, part)
            except AttributeError:
                module = "chunkwise." + ".".join(parts[: i + 1])
                assert importlib.util.find_spec(module), module
                try:
                    found = importlib.import_module(module)
                except ModuleNotFoundError as missing:  # of an optional extra: the module itself is there
                    assert missing.name and not missing.name.startswith("chunkwise"), module
                    break


@documents
def test_files_in_the_documents_are_there(document):
    text = document.read_text()
    linked = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    quoted = [x for x in re.findall(r"`((?:chunkwise|tests|docs|bench)/[\w/.]*\w/?)`", text)]
    for path in linked:
        assert (document.parent / path).exists(), path
    for path in quoted:
        assert (ROOT / path).exists(), path


@documents
def test_commands_in_the_documents_take_their_options(document):
    commands = get_command(app).commands
    for line in re.findall(r"^\s*`?(chunkwise \w+[^#\n`]*)", document.read_text(), re.M):
        words = line.split()
        if words[1] in commands:
            known = {o for p in commands[words[1]].params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
            assert {w.partition("=")[0] for w in words if w.startswith("--")} <= known, line


def test_members_are_listed_nowhere_but_on_their_pages():
    """compat, the layouts of checkpoints and the benchmark's peers name what other libraries have, member by member."""
    found, elsewhere = [], ("ops", "compat", "models/layout", "bench/peer")
    for file in (ROOT / "chunkwise").rglob("*.py"):
        if file.relative_to(ROOT / "chunkwise").as_posix().startswith(elsewhere):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            parts = {ast.Dict: lambda d: [*d.keys, *d.values]}.get(type(node), lambda c: getattr(c, "elts", []))(node)
            words = {x.value for part in parts if part is not None for x in ast.walk(part) if isinstance(x, ast.Constant)}
            if len(words & set(chunkwise.all_ops())) > 1:
                found.append(f"{file.name}:{node.lineno}")
    assert not found


def test_the_version_is_the_distribution_s():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert chunkwise.__version__ == declared
    try:
        assert importlib.metadata.version("chunkwise") == declared
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("chunkwise is run from a checkout that is not installed")


@pytest.mark.parametrize("fault", mutation.FAULTS, ids=lambda fault: fault.what)
def test_a_deliberate_fault_has_its_place(fault):
    assert (ROOT / "chunkwise" / fault.file).read_text().count(fault.old) == 1


def test_parts_of_the_package_are_there_when_asked_for():
    code = "import chunkwise as c; c.nn.rms_norm, c.reference.reference, c.ops.gla.GLA; hasattr(c, 'glaa') and 1 / 0"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_operators_need_torch_alone():
    code = (
        "import sys, torch, chunkwise; before = set(sys.modules); x = torch.randn(1, 5, 1, 4)\n"
        "chunkwise.linear_attn(x, x, x); chunkwise.explain('kda', T=9)\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "sys.exit(', '.join(new & {'transformers', 'triton', 'numpy', 'typer', 'einops'}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_examples_in_docstrings_run():
    tried = 0
    for module in pkgutil.walk_packages(chunkwise.__path__, "chunkwise."):
        if module.name.startswith("chunkwise.kernels") or ">>>" not in Path(importlib.util.find_spec(module.name).origin).read_text():
            continue
        result = doctest.testmod(importlib.import_module(module.name))
        assert not result.failed, module.name
        tried += result.attempted
    assert tried


def test_readme_example_says_what_happens():
    failed, tried = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert tried > 5 and failed == 0
