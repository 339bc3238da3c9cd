"""Ranks of a gloo group as processes that stay: `Ranks(3).run(f, x)` calls f(group, x) on each and returns the results.

They fork from a server that has imported what the tests import once, so that a group starts in milliseconds.
"""

import functools
import multiprocessing
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


@functools.cache
def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch._dynamo.testing", "moetail.testing", "moetail.ops.finalize_cpu"])
    return context


def _serve(rank, world_size, path, pipe):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=world_size, timeout=timedelta(seconds=20)
    )
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((True, function(dist.group.WORLD, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Ranks:
    """A context manager: leaving it ends the processes, and only these."""

    def __init__(self, world_size):
        self.directory = tempfile.TemporaryDirectory()
        path = Path(self.directory.name) / "store"
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = _context().Pipe()
            process = _context().Process(target=_serve, args=(rank, world_size, path, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function, *args):
        """Every living rank's result, in rank order; None for a rank that died. Raises: what a rank raised."""
        living = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for rank in living:
            self.pipes[rank].send((function, args))
        results = [None] * len(self.pipes)
        failures = []
        for rank in living:
            assert self.pipes[rank].poll(40), f"rank {rank} hangs in {function.__name__}"
            try:
                done, results[rank] = self.pipes[rank].recv()
            except EOFError:  # it was killed
                continue
            if not done:
                failures.append(f"rank {rank}:\n{results[rank]}")
        assert not failures, "\n".join(failures)
        return results

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()
        self.directory.cleanup()
