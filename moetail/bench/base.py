"""`moetail bench forward --base REV`: this working tree against another commit, interleaved run by run.

Each version runs in a process of its own, from its own files; the rounds alternate between the two on one device. What
is compared is the same arm of both, with the bits of its outputs; the base once more is the control.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from moetail.bench import forward, machine_state, stats, timing
from moetail.bench.cases import parse_case

_ROOT = Path(__file__).resolve().parent.parent.parent
HERE = "working tree"


@contextlib.contextmanager
def worktree(rev: str) -> Iterator[Path]:
    """A throwaway checkout of `rev`. Raises: ValueError where git has no such commit, or it has no bench worker."""
    with tempfile.TemporaryDirectory(prefix="moetail-base-") as folder:
        path = Path(folder) / "tree"
        _git("worktree", "add", "--detach", str(path), rev)
        try:
            if not (path / "moetail" / "bench" / "worker.py").exists():
                raise ValueError(f"base must be a commit with moetail/bench/worker.py, got {rev}, which is older")
            yield path
        finally:
            _git("worktree", "remove", "--force", str(path))


def _git(*args: str) -> None:
    done = subprocess.run(["git", *args], cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"base must be a commit of this checkout: git {' '.join(args[:2])}: {done.stderr.strip()}")


class Worker:
    """A process that runs one version's files. `ask` sends a request and waits for the answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "moetail.bench.worker"]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Raises: RuntimeError where the process died, ValueError with what it answered as its error."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline() or "null")
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise RuntimeError(f"the bench worker of {self.folder} died (exit code {self.process.wait()})")
        if "error" in answer:
            raise ValueError(f"the bench worker of {self.folder}: {answer['error']}")
        return answer

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(timeout=60)


def run_case(
    base: Path, rev: str, model: str, text: Path, case: str, device: torch.device, arm: str | None, rounds: int | None,
    routing: str = "real", progress: Callable[[int, int], None] = lambda done, total: None,
) -> forward.Result:  # fmt: skip
    """One case, `base` (a checkout of `rev`) against this tree. `arm` None: the model's second.

    Raises: ValueError as `forward.load` and `StepModel.check` do; RuntimeError where a worker died.
    """
    with contextlib.ExitStack() as stack:
        workers = {rev: Worker(base), HERE: Worker(_ROOT)}  # both start before the first is asked
        for worker in workers.values():
            stack.callback(worker.close)
        for worker in workers.values():
            built = worker.ask(
                do="build", model=model, text=str(text.resolve()), device=str(device), case=case, arm=arm,
                routing=routing,
            )  # fmt: skip
            if Path(built["package"]).parent != worker.folder.resolve():
                raise RuntimeError(f"the worker of {worker.folder} imported moetail from {built['package']}")

        def arm_of(label: str, worker: Worker) -> timing.Arm:
            return timing.Arm(label, lambda: float(worker.ask(do="run")["us"]))

        arms = [arm_of(rev, workers[rev]), arm_of(HERE, workers[HERE]), arm_of(forward.CONTROL, workers[rev])]
        state = {"before": machine_state.read(device)}
        slowest_us = timing.warm_up(arms, seconds=1.0)
        rounds = rounds or forward.default_rounds(slowest_us, len(arms))
        done = iter(range(1, rounds + 1))
        samples, paired = timing.interleave(arms, rounds, lambda: progress(next(done), rounds))
        state["after"] = machine_state.read(device)
        outputs = [_outputs(workers[name]) for name in (rev, rev, HERE)]
    repeat = forward.differing_bits(outputs[0], outputs[1])
    bits = forward.differing_bits(outputs[0], outputs[2])
    ratio, aa = (stats.paired_ratio(paired[rev], paired[other]) for other in (HERE, forward.CONTROL))
    parsed = parse_case(case)
    return forward.Result(
        model, parsed.name, forward.Settings((rev, HERE), rounds, routing), parsed.num_tokens, 1, rounds, samples,
        dict.fromkeys(samples), ratio, aa, bits, repeat, None, None, None, 0.0, 1, {}, (), state,
        forward.verdict_of(ratio, aa, bits, repeat, rev),
    )  # fmt: skip


def _outputs(worker: Worker) -> tuple[torch.Tensor, ...]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outputs.pt"
        worker.ask(do="outputs", path=str(path))
        return tuple(torch.load(path, map_location="cpu"))
