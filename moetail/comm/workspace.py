"""What the tensor-parallel ops share: the ranks' memory, its layout, the call counter, and what went wrong.

A rank owns one allocation, which `memory.Layout` describes: header words, the inbox of the one-shot kernel, and flags,
inbox and results of the two-shot kernel. Both kernels count the same calls and push the same headers. Their protocols
are those of `tests/lamport_model.py` and `tests/two_shot_model.py`, where all interleavings are checked.
On a CPU there is no such memory: the ranks send the same headers and the same partials through a gloo group.
"""

from __future__ import annotations

import enum
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist

from moetail import tuning
from moetail.comm.memory import MAX_WORLD_SIZE, Layout, cleared, one_shot_tokens

# The int64 words of `Workspace.control`. PEERS: one word a rank, the address of its allocation (0 on a CPU).
# HOST_STATUS: the address of the host's copy of STATUS, so that check() needs no device sync.
CALL, OWNER, LEFT, STATUS, TIMEOUT_NS, HOST_STATUS, PEERS = range(7)

_Made = TypeVar("_Made")

# A schema carries no process group, only its name. The workspaces own the groups; this only finds them.
gloo_groups: weakref.WeakValueDictionary[str, dist.ProcessGroupGloo] = weakref.WeakValueDictionary()


class Kind(enum.IntEnum):
    """The op of a call, as its header says it."""

    ALL_REDUCE = 1
    FINALIZE_ALL_REDUCE = 2
    ALL_REDUCE_NORM = 3
    FINALIZE_ALL_REDUCE_NORM = 4
    ALL_REDUCE_MHC = 5
    FINALIZE_ALL_REDUCE_MHC = 6
    FINALIZE_REDUCE_SCATTER = 7

    def by(self, tile: int) -> int:
        """The op and the path in one byte: tokens of a tile in two shots, a power of two up to 128; 0 in one shot."""
        return self | tile.bit_length() << 4


def header(call: int, kind: int, T: int) -> int:
    """What a rank pushes to every peer at each call: its number, its op and path (`Kind.by`), and T < 2**24.

    The call is counted modulo 2**31 here: 60 tails a step and 100 steps a second pass that in four days.
    """
    return (call & 0x7FFFFFFF) << 32 | kind << 24 | T


class FaultKind(enum.IntEnum):
    TIMED_OUT = 1
    DISAGREED = 2
    CONCURRENT = 3
    DESTROYED = 4
    LOST = 5  # CPU only: a GPU cannot see a peer die, it times out


_RENEW = "; every later call fails: destroy() this workspace and make a new one on the ranks that are left"
_SENTENCES = {
    FaultKind.TIMED_OUT: "rank {rank} waited {timeout_s} s for rank {peer} at call {call}: it stopped, stalled or "
    "never made the call" + _RENEW,
    FaultKind.DISAGREED: "rank {rank} and rank {peer} disagree at call {call}: another op or another number of tokens"
    + _RENEW,
    FaultKind.CONCURRENT: "rank {rank} began call {call} inside another: a workspace serves one stream and one thread "
    "at a time" + _RENEW,
    FaultKind.DESTROYED: "the workspace of rank {rank} is destroyed: make a new one",
    FaultKind.LOST: "rank {rank} lost the connection to rank {peer} at call {call}: it died, gave up waiting or "
    "destroyed its workspace" + _RENEW,
}


@dataclass(frozen=True)
class Fault:
    """What ended a workspace. One word: kind | peer << 8 | call << 16, never 0."""

    kind: FaultKind
    peer: int = 0
    call: int = 0

    def encode(self) -> int:
        return self.kind | self.peer << 8 | self.call << 16

    @staticmethod
    def decode(word: int) -> Fault:
        return Fault(FaultKind(word & 0xFF), word >> 8 & 0xFF, word >> 16)

    def sentence(self, rank: int, timeout_s: float) -> str:
        return _SENTENCES[self.kind].format(rank=rank, peer=self.peer, call=self.call, timeout_s=timeout_s)


@dataclass(frozen=True)
class Facts:
    """What every rank must have said alike."""

    max_tokens: int
    hidden: int
    dtype: torch.dtype
    timeout_s: float
    device_type: str
    world_size: int
    one_shot_tokens: int  # of this rank's GPU and world_size, by the table

    def check(self) -> None:
        """Raises: ValueError naming the argument, what it was and what it must be."""
        _check_world_size(self.world_size)
        if not _is_int(self.max_tokens) or not 1 <= self.max_tokens < 2**24:
            raise ValueError(f"max_tokens must be from 1 to {2**24 - 1}, got {self.max_tokens!r}")
        if not _is_int(self.hidden) or self.hidden < 1:
            raise ValueError(f"hidden must be 1 or more, got {self.hidden!r}")
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"dtype must be bfloat16 or float16, got {self.dtype!r}")
        if not isinstance(self.timeout_s, (int, float)) or not 1e-3 <= self.timeout_s <= 86400:
            raise ValueError(f"timeout_s must be from 0.001 to 86400 seconds, got {self.timeout_s!r}")
        if self.device_type not in ("cpu", "cuda"):
            raise ValueError(f"device must be a cpu or cuda device, got {self.device_type}")
        if not _is_int(self.one_shot_tokens) or self.one_shot_tokens < 1:
            raise ValueError(f"one_shot_tokens must be 1 or more, got {self.one_shot_tokens!r}")

    def layout(self) -> Layout:
        return Layout(self.world_size, self.max_tokens, self.hidden, self.one_shot_tokens)


def check_agreement(ranks: list[Facts]) -> None:
    """Raises: ValueError naming both values and both ranks, the same on every rank."""
    for field in fields(Facts):
        values = [getattr(facts, field.name) for facts in ranks]
        for rank, value in enumerate(values):
            if value != values[0]:
                name = field.name.removesuffix("_type")
                raise ValueError(
                    f"{name} must be the same on every rank, got {values[0]!r} on rank 0 and {value!r} on rank {rank}"
                )


class Workspace:
    """The memory of one tensor-parallel group for calls of up to `max_tokens` tokens of `hidden` elements.

    Made by all ranks together, before any CUDA graph capture; never grown. `group` None or of one rank needs no memory
    and exchanges nothing. One call at a time: use from several streams must be ordered by events.
    On a GPU it takes 4 (two ranks) to 5.5 (eight) * max_tokens * hidden bytes, and 4 * world_size * hidden for each
    token up to the most that go in one shot (`tuning.one_shot_tokens`).

    dtype      bf16 | fp16
    timeout_s  how long a call waits for a peer. After that the workspace has a fault: on a GPU this and every later
               call returns NaN and `check()` raises; on a CPU the calls raise
    device     the current CUDA device where there is one, else the CPU

    Raises: ValueError naming the argument, on every rank, where it is out of range or differs between ranks, and where
    one rank cannot read its config files; RuntimeError, on every rank, where one has no such device or memory;
    RuntimeError during a CUDA graph capture.
    """

    rank: int
    world_size: int
    max_tokens: int
    hidden: int
    dtype: torch.dtype
    timeout_s: float
    device: torch.device
    control: torch.Tensor  # int64 on the device: what the ops take as Tensor(a!)
    group_name: str  # of the group that a CPU exchanges through, in `gloo_groups`
    destroyed: bool
    one_gpu: bool  # the ranks share one GPU (`virtual`)

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        max_tokens: int,
        hidden: int,
        dtype: torch.dtype = torch.bfloat16,
        timeout_s: float = 30.0,
        device: torch.device | None = None,
    ) -> None:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"group must be a torch.distributed.ProcessGroup or None, got {group!r}")
        _refuse_capture()  # no rank can gather in one: this is the only error that the others do not hear of
        rank, world_size = (0, 1) if group is None else (group.rank(), group.size())

        def say() -> tuple[torch.device, Facts, str, str]:
            """What may raise on this rank only: a device that is not here, config files that cannot be read."""
            here = _resolved(device)
            tokens = one_shot_tokens(here, world_size)
            facts = Facts(max_tokens, hidden, dtype, timeout_s, here.type, world_size, tokens)
            return here, facts, tuning.digest(here), uuid.uuid4().hex

        name = ""
        if group is None or world_size == 1:
            here, facts, _, _ = say()
        else:  # before any check of its own: a rank that raised would not arrive
            mine = _attempted(say)
            everyone = _from_all(mine, group, None if isinstance(mine, Exception) else mine[0])
            check_agreement([theirs for _, theirs, _, _ in everyone])
            tuning.check_ranks([theirs for _, _, theirs, _ in everyone])
            here, facts, _, _ = everyone[rank]
            name = everyone[0][3]
        facts.check()
        if group is None or world_size == 1:
            self._own(rank, facts, here, peers=[0], memory=None)
        elif here.type == "cpu":
            exchange = _attempted(lambda: _gloo_group(group, name, timeout_s))
            # A rank that is done first may drop the workspace at once: its connections close under a peer that is
            # still making them ("Connection closed by peer").
            _from_all(exchange if isinstance(exchange, Exception) else None, group, here)
            assert not isinstance(exchange, Exception), "it raised"
            self._own(rank, facts, here, peers=[0] * world_size, memory=exchange)
            self.group_name = name
            gloo_groups[name] = exchange
        else:
            self._own(rank, facts, here, *_symmetric_memory(group, facts, here))

    @staticmethod
    def virtual(
        world_size: int,
        max_tokens: int,
        hidden: int,
        dtype: torch.dtype = torch.bfloat16,
        timeout_s: float = 30.0,
        device: torch.device | None = None,
    ) -> list[Workspace]:
        """For tests: `world_size` ranks in this process on one GPU, each to be used from a stream of its own.

        Raises: ValueError as the constructor does, and for a device that is no GPU.
        """
        _refuse_capture()
        device = _resolved(device)
        if device.type != "cuda":
            raise ValueError(f"device must be a cuda device for virtual ranks, got {device}")
        _check_world_size(world_size)
        facts = Facts(
            max_tokens, hidden, dtype, timeout_s, device.type, world_size, one_shot_tokens(device, world_size)
        )
        facts.check()
        layout = facts.layout()
        memory = [
            cleared(torch.empty(layout.size // 2, dtype=torch.int16, device=device), layout) for _ in range(world_size)
        ]
        peers = [part.data_ptr() for part in memory]
        ranks = []
        for rank in range(world_size):
            workspace = Workspace.__new__(Workspace)
            workspace._own(rank, facts, device, peers, memory)  # all of it: a peer may outlive this one
            workspace.one_gpu = True
            ranks.append(workspace)
        torch.cuda.synchronize(device)
        return ranks

    def _own(self, rank: int, facts: Facts, device: torch.device, peers: list[int], memory: Any) -> None:
        self.rank, self.world_size, self.device = rank, facts.world_size, device
        self.max_tokens, self.hidden, self.dtype = facts.max_tokens, facts.hidden, facts.dtype
        self.timeout_s = facts.timeout_s
        self.group_name, self.destroyed, self.one_gpu, self._memory = "", False, False, memory
        on_gpu = device.type == "cuda"
        host_status = torch.zeros(1, dtype=torch.int64, pin_memory=on_gpu)
        words = [0] * PEERS + peers
        words[CALL] = 1
        words[TIMEOUT_NS] = int(facts.timeout_s * 1e9)
        words[HOST_STATUS] = host_status.data_ptr() if on_gpu else 0
        self.control = torch.tensor(words, dtype=torch.int64, device=device)
        self._status = host_status if on_gpu else self.control[STATUS : STATUS + 1]

    def check(self) -> None:
        """Free of device syncs. Raises: RuntimeError saying what failed, at which call, and because of which rank."""
        word = int(self._status)
        if word:
            raise RuntimeError(Fault.decode(word).sentence(self.rank, self.timeout_s))

    def admit(self, name: str, x: torch.Tensor, T: int) -> None:
        """Whether a call on `x` [.., H], the argument `name`, with T tokens may start: nothing has been sent yet.

        Raises: RuntimeError where the workspace is destroyed, ValueError where it was made for something else.
        """
        if self.destroyed:
            raise RuntimeError(Fault(FaultKind.DESTROYED).sentence(self.rank, self.timeout_s))
        if x.dtype != self.dtype:
            raise ValueError(f"{name} must have the workspace's dtype {self.dtype}, got {x.dtype}")
        if x.device != self.device:
            raise ValueError(f"{name} must be on the workspace's device {self.device}, got {x.device}")
        if x.shape[1] != self.hidden:
            raise ValueError(f"{name} must have the workspace's hidden size {self.hidden}, got {x.shape[1]}")
        if self.max_tokens < T:
            raise ValueError(f"workspace must hold a call's T={T} tokens, got one of max_tokens={self.max_tokens}")

    def destroy(self) -> None:
        """Give the memory back. Later calls raise; CUDA graphs that hold `control` replay to NaN and touch no peer.

        Any rank, at any time outside of a capture: a peer that is still in a call has a fault. The object must outlive
        such graphs.
        """
        if self.destroyed:
            return
        _refuse_capture()
        self.destroyed = True
        word = Fault(FaultKind.DESTROYED).encode()
        self.control[STATUS] = word
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a kernel may still poll: its time-out bounds this
        self._status[0] = word  # last: what such a kernel has to say is no longer of interest
        self._memory = None


def _check_world_size(world_size: object) -> None:
    if not _is_int(world_size) or not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(f"world_size must be from 1 to {MAX_WORLD_SIZE}, got {world_size!r}")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _resolved(device: torch.device | None) -> torch.device:
    """With its index, and the default where None."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(default if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be a cpu or cuda device, got {device!r} ({error})") from error
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _refuse_capture() -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a Workspace must be made and destroyed outside of a CUDA graph capture, got one under way")


def _attempted(make: Callable[[], _Made]) -> _Made | Exception:
    """What `make` returns, or its error, for `_from_all`."""
    try:
        return make()
    except Exception as error:  # of a class that every rank can unpickle
        known = next((kind for kind in (ValueError, RuntimeError) if isinstance(error, kind)), None)
        told = RuntimeError(repr(error)) if known is None else known(str(error))
        told.__cause__ = error
        return told


def _from_all(mine: Any, group: dist.ProcessGroup, device: torch.device | None) -> list[Any]:
    """What each rank has, in rank order. A rank whose attempt failed takes part with its error, so that none waits.

    device  through which NCCL gathers; None, or a CPU: the current one
    Raises: the first rank's error, on every rank, with the rank.
    """
    everyone: list[Any] = [None] * group.size()
    with torch.cuda.device(device.index if device is not None and device.type == "cuda" else -1):
        dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        if isinstance(theirs, Exception):
            raise type(theirs)(f"{theirs} (on rank {rank})") from (mine if isinstance(mine, Exception) else None)
    return everyone


def _gloo_group(group: dist.ProcessGroup, name: str, timeout_s: float) -> dist.ProcessGroupGloo:
    """A group of our own: its time-out is ours, and a call that fails closes its connections, never the user's.

    Not by dist.new_group: it names a subgroup after how many groups this rank knows, so a name can come twice, and two
    ranks can differ.
    """
    from torch.distributed.distributed_c10d import _get_process_group_store

    store = dist.PrefixStore(f"moetail/{name}", _get_process_group_store(group))
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), timedelta(seconds=timeout_s))


def _symmetric_memory(group: dist.ProcessGroup, facts: Facts, device: torch.device) -> tuple[list[int], Any]:
    """The address of every rank's allocation as this rank sees it, and what keeps them mapped.

    Not from symm_mem.empty: its pool gives a destroyed workspace's memory to the next one, where a stalled peer's late
    stores would be taken for arrived data; and torch exchanges a block once, so that ranks whose pools differ hang.
    Memory of its own dies with its last mapping: such stores land in what nobody reads.
    """
    from torch.distributed import _symmetric_memory as symm_mem

    with torch.cuda.device(device):
        layout = facts.layout()
        size = (layout.size // 2,)
        memory = _attempted(lambda: symm_mem._SymmetricMemory.empty_strided_p2p(size, (1,), torch.int16, device))
        # A rank whose GPU is full raises: the others would wait for it in the rendezvous.
        _from_all(memory if isinstance(memory, Exception) else None, group, device)
        assert not isinstance(memory, Exception), "it raised"
        handle = symm_mem.rendezvous(memory, group.group_name)
        cleared(memory, layout)
        torch.cuda.synchronize(device)
    # buffer_ptrs are the blocks' and a tensor may lie inside one. The gather is also the barrier: no rank pushes before
    # every rank has cleared its memory.
    offsets = _from_all(memory.data_ptr() - handle.buffer_ptrs[group.rank()], group, device)
    return [base + offset for base, offset in zip(handle.buffer_ptrs, offsets, strict=True)], (memory, handle)
