"""module:function of a user: found, or one sentence that says what is wrong, through both commands that take it."""

import sys

import pytest
from typer.testing import CliRunner

from moetail import cli, module_function

MODULES = {
    "mf_mine": "def finalize_rows(): pass\ndef other(): pass\nlimit = 3\n",
    "mf_raises": "1 / 0\n",
    "mf_needs": "import mf_not_there\n",
    "mf_syntax": "def f(:\n",
    "mf_exits": "raise ImportError('needs a GPU')\n",
}
BAD = {
    "nocolon": "must be module:function, got 'nocolon'",
    ":f": "must be module:function, got ':f'",
    "mf_mine:": "must be module:function, got 'mf_mine:'",
    "mf_mine:a.b": "must be module:function, got 'mf_mine:a.b'",
    "mf_nope:f": "got 'mf_nope:f': there is no module mf_nope (is its folder on PYTHONPATH?)",
    "mf_pack.nope:f": "got 'mf_pack.nope:f': there is no module mf_pack.nope (is its folder on PYTHONPATH?)",
    "mf_nope.sub:f": "got 'mf_nope.sub:f': there is no module mf_nope (is its folder on PYTHONPATH?)",
    "mf_mine:finalise_rows": "got 'mf_mine:finalise_rows': mf_mine has no finalise_rows; it has finalize_rows",
    "mf_mine:x": "got 'mf_mine:x': mf_mine has no x",
    "mf_mine:limit": "got 'mf_mine:limit', of type int",
    "mf_raises:f": "got 'mf_raises:f': importing mf_raises raised ZeroDivisionError: division by zero",
    "mf_needs:f": "got 'mf_needs:f': importing mf_needs raised ModuleNotFoundError: No module named 'mf_not_there'",
    "mf_syntax:f": "got 'mf_syntax:f': importing mf_syntax raised SyntaxError: invalid syntax",
    "mf_exits:f": "got 'mf_exits:f': importing mf_exits raised ImportError: needs a GPU",
}


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(source)
    (tmp_path / "mf_pack").mkdir()
    (tmp_path / "mf_pack" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith("mf_")]:
        del sys.modules[name]


def test_a_function_is_found():
    assert module_function.load("impl", "mf_mine:other").__name__ == "other"


@pytest.mark.parametrize("spec", BAD)
def test_what_is_wrong_is_said(spec):
    with pytest.raises(ValueError) as caught:
        module_function.load("impl", spec)
    assert str(caught.value).startswith("impl must be module:function") and BAD[spec] in str(caught.value)
    assert "PYTHONPATH" not in str(caught.value) or "there is no module" in BAD[spec]


@pytest.mark.parametrize("spec", [spec for spec in BAD if ":" in spec])
@pytest.mark.parametrize("command", [["conformance", "--impl"], ["bench", "forward", "--model"]], ids=["impl", "model"])
def test_the_commands_say_it_and_exit_with_2(command, spec):
    result = CliRunner().invoke(cli.app, [*command, spec])
    assert result.exit_code == cli.USAGE and BAD[spec] in " ".join(result.stderr.split())


def test_a_factory_that_takes_no_device_is_refused():
    result = CliRunner().invoke(cli.app, ["bench", "forward", "--model", "mf_mine:other"])
    assert result.exit_code == cli.USAGE, result.exception
    assert "model must be a factory that takes the device and returns a StepModel, got 'mf_mine:other': TypeError" in (
        " ".join(result.stderr.split())
    )
