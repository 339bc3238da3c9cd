"""One version's side of `bench forward --base`: a process that builds one case and runs it when it is told to.

    python -m moetail.bench.worker      one JSON object a line: requests on stdin, answers on stdout

{"do": "build", "model", "text", "device", "case", "arm", "routing"} -> {"package": folder, "T": int}
{"do": "run"} -> {"us": float}        {"do": "outputs", "path"} -> {}        an error -> {"error": sentence}
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import moetail
from moetail.bench import forward
from moetail.bench.cases import parse_case
from moetail.bench.ranks import Ranks


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    timed: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "build":
                timed, answer = build(request)
            elif request["do"] == "run":
                answer = {"us": timed.arm.run()}
            else:
                torch.save(timed.outputs(), request["path"])
                answer = {}
        except (ValueError, OSError, RuntimeError) as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def build(request: dict[str, Any]) -> tuple[forward.TimedArm, dict[str, Any]]:
    """The arm, warmed up (and captured, on CUDA)."""
    case = parse_case(request["case"])
    model = forward.load(request["model"], Path(request["text"]), [case], torch.device(request["device"]))
    arm = request["arm"] or model.arms[1]
    forward.check_arms((model.arms[0], arm) if arm != model.arms[0] else (arm, model.arms[1]), model)
    model.use(arm)
    work = model.build(case, request["routing"])
    timed = forward.timed_arm(model, arm, arm, work, Ranks())
    for _ in range(3):
        timed.arm.run()
    return timed, {"package": str(Path(moetail.__file__).resolve().parent), "T": case.num_tokens}


if __name__ == "__main__":
    main()
