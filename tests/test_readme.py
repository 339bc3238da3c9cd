"""The README's Python runs, and its commands are commands with these options."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import typer
from test_transformers import tiny

import moetail
from moetail import cli
from moetail.testing import finalize_inputs

TEXT = (Path(__file__).resolve().parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = re.findall(r"`(moetail [^`]+)`", TEXT)


def names(H):
    x = finalize_inputs(4, 3, H)
    return {"moetail": moetail, "rows": x.rows, "row_map": x.row_map, "weights": x.weights, "shared": x.shared,
            "residual": x.shared.clone(), "w": torch.ones(H)}  # fmt: skip


def test_a_model(capsys):
    model = tiny("glm4_moe")
    exec(BLOCKS[0], {"model": model})
    assert "one kernel" in capsys.readouterr().out and "moetail" in model.get_experts_implementation().values()


def test_the_op_and_the_norm():
    found = names(256)
    exec(BLOCKS[1], found)
    assert found["y"].shape == found["h"].shape == found["residual"].shape == (4, 256)
    (line,) = re.findall(r"`quant_out=(moetail.Quantized.empty\(.*?\))`", TEXT)
    assert eval(line, {"moetail": moetail, "T": 4, "H": 256, "device": "cpu"}).values.shape == (4, 256)


def test_tensor_parallelism():
    found = names(5120) | {"group": None}
    exec(BLOCKS[2], found)
    assert found["y"].shape == (4, 5120)


def test_there_is_no_other_python():
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("text", dict.fromkeys(COMMANDS))
def test_a_command(text):
    command, words = typer.main.get_command(cli.app), shlex.split(text)[1:]
    while words and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    options = {option for parameter in command.params for option in parameter.opts}
    for word in words:
        assert not word.startswith("--") or word in options, f"{text}: {word} is no option"
    for parameter in command.params if words else ():  # without any, the text only names the command
        given = any(option in words for option in parameter.opts) or parameter.param_type_name == "argument"
        assert given or not parameter.required, f"{text} needs {parameter.opts[0]}"
