"""The house rules that a machine can hold: which way imports point, how long a file is, where things are."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moetail import reference

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "moetail"
FILES = sorted(PACKAGE.rglob("*.py"))
CEILING = 450

# What a part of the package may import of it. Leaves import nothing; the core never imports what is built on it.
MAY_IMPORT = {
    "numerics": set(),
    "quantization": set(),
    "guards": set(),
    "module_function": set(),
    "contract": {"numerics"},
    "tuning": set(),
    "routing": set(),
    "shared_slots": set(),
    "coverage": {"models", "ops", "plan", "tuning"},
    "plan": set(),
    "models": {"comm", "contract", "experts", "layer", "models", "ops", "plan", "routing", "shared_slots"},
    "reference": {"numerics", "quantization", "reference", "routing"},
    "layer": {"contract", "plan", "shared_slots"},
    "experts": {"contract", "ops", "shared_slots"},
    "conformance": {"module_function", "numerics", "reference", "testing"},
    "testing": {"numerics"},
    "ops": {"numerics", "quantization", "reference", "routing", "ops", "tuning"},
    "comm": {"numerics", "quantization", "reference", "ops", "tuning", "comm"},
    "integrations": {"comm", "contract", "experts", "numerics", "ops", "reference", "integrations", "models", "plan"},
    "bench": {"bench", "comm", "contract", "coverage", "experts", "guards", "integrations", "layer", "models"}
    | {"module_function", "numerics", "ops", "plan", "quantization", "reference", "routing", "testing", "tuning"},
    "cli": {"bench", "cli", "conformance", "coverage", "integrations", "models", "plan", "tuning"},
    "__init__": {"comm", "contract", "experts", "layer", "numerics", "ops", "plan", "reference", "routing"}
    | {"integrations", "quantization", "shared_slots"},
}
OPTIONAL = {"transformers", "accelerate", "numba", "rich", "typer", "matplotlib", "triton", "packaging", "vllm"}
CORE = ("__init__", "numerics", "contract", "reference", "guards", "testing", "tuning", "conformance", "plan", "models",
        "layer", "routing", "experts", "quantization", "shared_slots")  # fmt: skip


def part(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path, top_level_only=False):
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            if node.module == "moetail":
                yield from (f"moetail.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    for name in imports(path):
        if name == "moetail":
            assert part(path) == "bench", f"{path} imports the whole package"
        if name.startswith("moetail."):
            assert name.split(".")[1] in MAY_IMPORT[part(path)], f"{path} must not import {name}"


@pytest.mark.parametrize("path", [p for p in FILES if part(p) in CORE], ids=lambda p: p.name)
def test_the_core_needs_no_extra(path):
    assert not {name.split(".")[0] for name in imports(path, top_level_only=True)} & OPTIONAL


def test_import_moetail_loads_no_extra():
    code = f"import sys, moetail; print(sorted({OPTIONAL!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = ast.literal_eval(done.stdout)
    torchs_own = subprocess.run(
        [sys.executable, "-c", code.replace("moetail", "torch")], capture_output=True, text=True, check=True
    )
    assert loaded == ast.literal_eval(torchs_own.stdout)


@pytest.mark.parametrize("path", [*FILES, *sorted((ROOT / "tests").glob("*.py"))], ids=lambda p: p.name)
def test_file_budget(path):
    assert len(path.read_text().splitlines()) <= CEILING


@pytest.mark.parametrize("path", [p for p in FILES if part(p) in ("ops", "comm") and p.stem != "__init__"],
                         ids=lambda p: p.name)  # fmt: skip
def test_one_string_finds_everything(path):
    op = path.stem.removesuffix("_triton").removesuffix("_cpu")
    assert (ROOT / "tests" / f"test_{op}.py").exists()
    if "torch.library.define" in path.read_text():
        definition = getattr(reference, op)
        assert definition.__name__ == op and definition.__module__.startswith("moetail.reference.")
        assert f"moetail::{op}" in path.read_text() and re.search(rf"^def {op}\(", path.read_text(), re.MULTILINE)


def test_environment_variables():
    """At most five, all MOETAIL_*, and the README names each."""
    names = {n for path in FILES for n in re.findall(r"MOETAIL_[A-Z_]+", path.read_text())}
    assert len(names) <= 5
    assert names == set(re.findall(r"MOETAIL_[A-Z_]+", (ROOT / "README.md").read_text()))


def test_readme_tables_are_what_the_records_say():
    from moetail.bench import tables

    readme = (ROOT / "README.md").read_text()
    assert tables.with_tables(readme, ROOT) == readme
    assert "<!-- table:" in readme
