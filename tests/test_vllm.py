"""The vLLM plugin without vLLM: decisions, hooks, one call's tail, the contract, and what `register` says where vLLM is
not what it knows. Against vLLM's own code: test_vllm_real.py."""

import json
import logging
import os
import subprocess
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from ranks import Ranks

from moetail import reference
from moetail.comm.memory import one_shot_tokens
from moetail.comm.workspace import Workspace
from moetail.contract import MoEOutput, TailSpec, UnfinalizedMoEOutput
from moetail.integrations import vllm
from moetail.integrations.vllm import contract, facts, hooks, signatures
from moetail.integrations.vllm.facts import Decision, LayerFacts, Reason
from moetail.integrations.vllm.facts import Path as Place
from moetail.integrations.vllm.tail import Call, Tail, make_workspace
from moetail.numerics import Numerics
from moetail.plan import Measured
from moetail.testing import assert_same_bits

PLAIN = {"experts": "TritonExperts", "dtype": "bfloat16", "K": 6}
TP2 = {**PLAIN, "tp": 2}
EAGER = {**PLAIN, "eager": True}


@pytest.mark.parametrize(
    "change, path, reason",
    [
        (PLAIN, Place.REDUCTION, Reason.INDUCTOR_ADD),
        (EAGER, Place.FUSED, Reason.ALL),
        ({**EAGER, "routed_scale": 2.5}, Place.FUSED, Reason.ALL),
        (TP2, Place.FUSED_ALL_REDUCE, Reason.ALL),
        ({**TP2, "tp": 4}, Place.FUSED, Reason.MORE_RANKS),
        ({**TP2, "rms_fusion": True}, Place.FUSED, Reason.RMS_FUSION),
        ({**TP2, "routed_scale": 2.5}, Place.REDUCTION, Reason.INDUCTOR_SCALE),
        ({**TP2, "reduces": False}, Place.REDUCTION, Reason.INDUCTOR_ADD),
        ({**TP2, "reduces": False, "eager": True}, Place.FUSED, Reason.REDUCED_LATER),
        ({**PLAIN, "copies": False}, Place.STOCK, Reason.NOTHING_TO_SAVE),
        ({**EAGER, "copies": False}, Place.FUSED, Reason.ALL),
        ({**EAGER, "shared": False}, Place.REDUCTION, Reason.NO_SHARED_EXPERTS),
        ({**EAGER, "transform": True}, Place.REDUCTION, Reason.TRANSFORM),
        ({**EAGER, "zero_expert": True}, Place.REDUCTION, Reason.ZERO_EXPERT),
        ({**EAGER, "dtype": "float16", "routed_scale": 2.5}, Place.REDUCTION, Reason.FP16_SCALE),
        ({**EAGER, "dtype": "float16"}, Place.FUSED, Reason.ALL),
        ({**EAGER, "dtype": "float32"}, Place.STOCK, Reason.DTYPE),
        ({**EAGER, "off": True}, Place.STOCK, Reason.OFF),
        ({**EAGER, "device_ok": False}, Place.STOCK, Reason.DEVICE),
        ({**EAGER, "K": 65}, Place.STOCK, Reason.TOP_K),
        ({**EAGER, "experts": "FlashInferExperts"}, Place.STOCK, Reason.EXPERTS),
        ({**EAGER, "experts": None}, Place.STOCK, Reason.EXPERTS),
        ({**EAGER, "lora": True}, Place.STOCK, Reason.LORA),
        ({**EAGER, "input_weights": True}, Place.STOCK, Reason.INPUT_WEIGHTS),
        ({**EAGER, "ep": 2}, Place.STOCK, Reason.EXPERT_PARALLEL),
        ({**EAGER, "dp": 2}, Place.STOCK, Reason.DATA_PARALLEL),
        ({**EAGER, "pcp": 2}, Place.STOCK, Reason.CONTEXT_PARALLEL),
        ({**EAGER, "sequence_parallel": True}, Place.STOCK, Reason.SEQUENCE_PARALLEL),
        ({**EAGER, "batch_overlap": True}, Place.STOCK, Reason.BATCH_OVERLAP),
        ({**EAGER, "skips_padding": True}, Place.STOCK, Reason.SKIPPED_PADDING),
        ({**EAGER, "hidden_padding": 64}, Place.STOCK, Reason.PADDING),
    ],
)  # fmt: skip
def test_decisions(change, path, reason):
    decision = facts.decide(LayerFacts(**change))
    assert (decision.path, decision.reason) == (path, reason)
    assert reason.value in str(decision)


def test_a_measured_loss_keeps_vllms_kernels_at_those_tokens(monkeypatch):
    monkeypatch.setattr(facts, "SLOWER", {(Place.REDUCTION, "cpu"): (Measured(4, 8, True), Measured(16, 32, False))})
    slower = [T for T in (3, 4, 8, 9, 20) if facts.measured_slower(Place.REDUCTION, "cpu", T)]
    assert slower == [4, 8]
    assert not facts.measured_slower(Place.FUSED, "cpu", 4)


class Runner:
    """What a tail asks of its runner."""

    def __init__(self, shared, scale=1.0, workspace=None):
        self.routed_scaling_factor = scale
        self._shared_experts = types.SimpleNamespace(_output_idx=0, _output=[None])
        self.shared, self.workspace, self.reduced, self.shared_runs = shared, workspace, 0, 0

    def run_shared_experts(self, _input):
        self.shared_runs += 1
        self._shared_experts._output[0] = self.shared

    def tail_workspace(self, hidden, dtype):
        return self.workspace

    def reduce_over_ranks(self, y):
        self.reduced += 1
        return y


def tail_of(runner, path):
    tail = Tail(runner, Decision(path, Reason.ALL))
    tail.call = Call(None)
    return tail


class TritonExperts:
    """vLLM 0.26's method."""

    ran = 0

    def moe_sum(self, input, output):  # noqa: A002  vLLM's name
        self.ran += 1
        output.fill_(7)


class MarlinExperts(TritonExperts):
    def moe_sum(self, input, output, topk_ids, expert_map):  # noqa: A002
        self.ran += 1


def inputs(T=5, K=6, H=96):
    return torch.randn(T, K, H).bfloat16(), torch.randn(T, H).bfloat16()


@pytest.mark.parametrize("path, scale", [(Place.REDUCTION, 2.5), (Place.FUSED, 1.0), (Place.FUSED, 2.5)])
def test_weighted_rows(path, scale):
    rows, shared = inputs()
    tail = tail_of(Runner(shared, scale), path)
    experts = TritonExperts()
    assert hooks.attach(experts, tail.take)
    experts.moe_sum(rows, torch.empty(5, 96))
    total = torch.zeros(5, 96)
    for k in range(6):
        total += rows[:, k].float()
    want = total.bfloat16()
    if path is Place.FUSED:
        want = (want if scale == 1 else want * scale) + shared
    assert_same_bits(tail.call.y, want)
    assert (experts.ran, tail.finished) == (0, 1)


def test_outside_a_call_and_with_absent_rows_vllms_reduction_runs():
    rows, shared = inputs()
    tail = tail_of(Runner(shared), Place.FUSED)
    triton, marlin = TritonExperts(), MarlinExperts()
    hooks.attach(triton, tail.take)
    hooks.attach(marlin, tail.take)
    ids = torch.zeros(5, 6, dtype=torch.int32)
    marlin.moe_sum(rows, torch.empty(5, 96), ids, torch.zeros(4, dtype=torch.int32))
    assert marlin.ran == 1 and tail.call.y is None
    tail.call = None
    triton.moe_sum(rows, torch.empty(5, 96))
    assert triton.ran == 1


def test_a_shared_output_of_another_width_is_left_to_vllm():
    rows, _ = inputs()
    tail = tail_of(Runner(torch.zeros(5, 64).bfloat16()), Place.FUSED)
    experts = TritonExperts()
    hooks.attach(experts, tail.take)
    experts.moe_sum(rows, torch.empty(5, 96))
    assert experts.ran == 1 and tail.call.y is None


def moe_unpermute(out, permuted_hidden_states, topk_weights, inv_permuted_idx, expert_first_token_offset=None):
    out.fill_(7)


def deepgemm_unpermute_and_reduce(a, topk_ids, topk_weights, inv_perm, expert_map, output):
    output.fill_(7)


def moe_fused_mul_sum(inputs, topk_weights, outputs=None, topk_ids=None, expert_map=None):
    return outputs.fill_(7)


def run_cutlass_moe_fp8(output, *args):
    moe_unpermute(output, *args)


class DeepGemmExperts:
    def apply(self, output, rows, row_map, weights):
        deepgemm_unpermute_and_reduce(
            a=rows, topk_ids=row_map, topk_weights=weights, inv_perm=row_map, expert_map=None, output=output
        )


class CutlassExpertsFp8:
    def apply(self, output, rows, row_map, weights):
        run_cutlass_moe_fp8(output, rows, weights, row_map, torch.tensor([0, rows.shape[0]]))


class HummingGroupedExperts:
    def apply(self, output, rows, row_map, weights):
        moe_unpermute(output, rows, weights, row_map, None)


class HummingIndexedExperts:
    def apply(self, output, rows, row_map, weights):
        assert row_map.flatten().equal(torch.arange(row_map.numel(), dtype=torch.int32))
        moe_fused_mul_sum(inputs=rows.view(*row_map.shape, -1), topk_weights=weights, outputs=output, topk_ids=row_map)


@pytest.mark.parametrize("kind", [DeepGemmExperts, CutlassExpertsFp8, HummingGroupedExperts, HummingIndexedExperts])
def test_unweighted_rows(kind):
    rows, shared = inputs()
    weights = torch.rand(5, 6)
    row_map = torch.arange(30, dtype=torch.int32)
    if kind is not HummingIndexedExperts:
        row_map = row_map[torch.randperm(30)]
    args = rows.view(30, 96), row_map.view(5, 6), weights
    tail = tail_of(Runner(shared), Place.FUSED)
    experts, other = kind(), kind()
    assert hooks.attach(experts, tail.take)
    assert hooks.attach(experts, tail.take)  # a reload of the weights does it again
    experts.apply(torch.empty(5, 96), *args)
    assert_same_bits(tail.call.y, reference.finalize(*args, shared))
    out = torch.empty(5, 96)
    other.apply(out, *args)  # another layer of the same class, and this module's functions, are as they were
    assert out.eq(7).all()


def test_experts_that_hold_two_others_need_both():
    class TritonOrDeepGemmExperts:
        def __init__(self, second):
            self.experts, self.fallback_experts = TritonExperts(), second

    take = tail_of(Runner(None), Place.FUSED).take
    assert hooks.attach(TritonOrDeepGemmExperts(DeepGemmExperts()), take)
    assert not hooks.attach(TritonOrDeepGemmExperts(object()), take)


def _reduced(group, T):
    workspace = Workspace(group, 4, 96)
    torch.manual_seed(group.rank())
    rows, shared = inputs(T)
    runner = Runner(shared, workspace=workspace)
    tail = tail_of(runner, Place.FUSED_ALL_REDUCE)
    experts = TritonExperts()
    hooks.attach(experts, tail.take)
    experts.moe_sum(rows, torch.empty(T, 96))
    alone = reference.finalize(
        rows.view(-1, 96), hooks.route_major(T, 6, rows.device), None, shared, numerics=Numerics.PREWEIGHTED
    )
    workspace.destroy()
    return tail.call.y, alone, runner.reduced, (tail.finished, tail.summed_by_vllm)


def _plugins_workspace(group):
    workspace = make_workspace(group, group, 96, torch.bfloat16, torch.device("cpu"))
    return workspace.max_tokens


def test_two_ranks_reduce_once_in_our_workspace_or_in_vllm():
    with Ranks(2) as ranks:
        (y, a, reduced, counts), (same, b, _, _) = ranks.run(_reduced, 4)
        assert reduced == 0 and counts == (1, 0)
        assert_same_bits(y, (a.float() + b.float()).bfloat16())
        assert_same_bits(same, y)
        for y, alone, reduced, counts in ranks.run(_reduced, 5):  # more than the workspace holds
            assert reduced == 1 and counts == (0, 1)
            assert_same_bits(y, alone)
        assert ranks.run(_plugins_workspace) == [one_shot_tokens(torch.device("cpu"), 2)] * 2


@pytest.mark.parametrize(
    ("counts", "said"), [((9, 9, 0), "; 9 of 9 calls seen"), ((9, 5, 3), "; 5 of 9 calls seen, 3 more but for vLLM's")]
)
def test_a_report_tells_what_vllms_all_reduce_finished(counts, said):
    tail = tail_of(Runner(None), Place.FUSED_ALL_REDUCE)
    tail.calls, tail.finished, tail.summed_by_vllm = counts
    layer = torch.nn.Module()
    layer.routed_experts, layer.tail = None, tail
    (row,) = vllm.explain(layer)
    assert said in str(row) and (row.calls, row.finished, row.summed_by_vllm) == counts


@pytest.mark.parametrize(
    ("parts", "fails", "code", "last", "ran"),
    [(["bits", "smoke"], "none", 0, "== end", 2), (["bits", "smoke"], "pytest", 1, "failed: bits (exit code 7)", 2),
     (["smoke", "bits", "eager"], "serve", 1, "failed: smoke (exit code 7) eager (exit code 7)", 3),
     (["tp2", "bits"], "nproc-per-node", 1, "failed: tp2 (exit code 7)", 2), (["bits", "other"], "none", 2, "", 0)],
    ids=["none", "the-first", "two-of-three", "behind-torchrun", "unknown"],
)  # fmt: skip
def test_the_gpu_script_says_which_part_failed(tmp_path, parts, fails, code, last, ran):
    """With a python3 that says nothing and fails where its arguments hold `fails`."""
    for name, text in (("python3", f'echo "$*" >> {tmp_path}/ran\ncase "$*" in *{fails}*) exit 7 ;; esac'),
                       ("nvidia-smi", "echo NVIDIA Test")):  # fmt: skip
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "ran").touch()
    script = Path(__file__).parent.parent / "scripts" / "vllm_gpu.sh"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path)}
    done = subprocess.run(["bash", script, *parts], capture_output=True, text=True, env=env)
    said = (done.stdout.strip().splitlines() or [""])[-1]
    assert done.returncode == code and said.startswith(last), done.stdout + done.stderr
    assert len((tmp_path / "ran").read_text().splitlines()) == ran


def test_the_known_releases_have_what_is_needed():
    recorded = json.loads((Path(__file__).parent / "vllm_signatures.json").read_text())
    assert set(recorded) >= {"0.26.0", "0.33.0"}
    for version, names in recorded.items():
        assert set(names) == set(signatures.REQUIRED), f"record {version} again: scripts/vllm_signatures.py"
        for name, have in names.items():
            assert signatures.moved([tuple(p) for p in have], signatures.REQUIRED[name]) == ""


def test_moved_parameters():
    assert signatures.moved([("a", True), ("b", True), ("c", False)], ("a", "b")) == ""
    assert "takes (b, a)" in signatures.moved([("b", True), ("a", True)], ("a", "b"))
    assert "takes (a, b, c)" in signatures.moved([("a", True), ("b", True), ("c", True)], ("a", "b"))


def test_register_without_a_vllm_says_one_line(caplog):
    with caplog.at_level(logging.WARNING):
        vllm.register()
    (record,) = caplog.records
    assert record.getMessage().startswith("moetail: vLLM stays as it is: ModuleNotFoundError")


@dataclass
class TheirUnfinalized:
    gemm2_permuted: torch.Tensor
    expert_weights: torch.Tensor
    expanded_idx_to_permuted_idx: torch.Tensor
    route_major: bool = False


@dataclass
class TheirOutput:
    routed: object
    shared_output: object = None
    routed_scaling_factor: float = 1.0


def test_from_vllm_copies_nothing():
    rows, shared = inputs()
    weights, row_map = torch.rand(5, 6), torch.arange(30, dtype=torch.int32).view(5, 6)
    theirs = TheirOutput(TheirUnfinalized(rows.view(30, 96), weights, row_map, True), shared, 2.5)
    ours = contract.from_vllm(theirs)
    assert ours.routed.rows is theirs.routed.gemm2_permuted and ours.routed.weights is weights
    assert_same_bits(ours.complete(), reference.finalize(rows.view(30, 96), row_map, weights, shared, routed_scale=2.5))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"expanded_idx_to_permuted_idx": torch.zeros(5, 6, dtype=torch.int64)}, "must be int32"),
        ({"expert_weights": torch.zeros(5, 6, dtype=torch.float64)}, "expert_weights must be float32"),
        ({"gemm2_permuted": torch.zeros(29, 96)}, "one row a route, 30"),
    ],
)
def test_from_vllm_refuses(change, message):
    fields = {
        "gemm2_permuted": torch.zeros(30, 96), "expert_weights": torch.zeros(5, 6),
        "expanded_idx_to_permuted_idx": torch.zeros(5, 6, dtype=torch.int32), "route_major": True,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        contract.unfinalized_from_vllm(TheirUnfinalized(**{**fields, **change}))
    with pytest.raises(ValueError, match="routed must be unfinalized"):
        contract.from_vllm(TheirOutput(torch.zeros(5, 96)))


def test_to_vllm_refuses_before_it_takes(monkeypatch):
    import sys

    name = "vllm.model_executor.layers.fused_moe.moe_output"
    monkeypatch.setitem(
        sys.modules, name, types.SimpleNamespace(MoEOutput=TheirOutput, UnfinalizedMoEOutput=TheirUnfinalized)
    )
    for parent in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", name.rpartition(".")[0]):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    rows, shared = inputs()
    rows, weights = rows.view(30, 96), torch.rand(5, 6)
    row_map = torch.arange(30, dtype=torch.int32).view(5, 6)
    good = MoEOutput(UnfinalizedMoEOutput(rows, row_map, weights), shared, TailSpec(routed_scale=2.5))
    theirs = contract.to_vllm(good)
    assert theirs.routed.gemm2_permuted is rows and theirs.shared_output is shared
    assert theirs.routed_scaling_factor == 2.5
    with pytest.raises(RuntimeError, match="taken already"):
        good.complete()
    for routed, tail, message in (
        (UnfinalizedMoEOutput(rows, row_map, None), TailSpec(Numerics.PREWEIGHTED), "weights must be a tensor"),
        (UnfinalizedMoEOutput(rows, row_map.long(), weights), TailSpec(), "row_map must be"),
        (UnfinalizedMoEOutput(rows.t().contiguous().t(), row_map, weights), TailSpec(), "must be contiguous"),
        (UnfinalizedMoEOutput(rows, row_map, weights, torch.tensor([30])), TailSpec(), "num_valid_rows must be None"),
    ):
        output = MoEOutput(routed, shared, tail)
        with pytest.raises(ValueError, match=message):
            contract.to_vllm(output)
        output.take()
