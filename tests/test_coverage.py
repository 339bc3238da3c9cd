"""Coverage: the list is what the ops look up, every call is answered, and the command says what is not covered."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from ranks import Ranks
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

import moetail
from moetail import cli, coverage, plan, tuning
from moetail.models import ExpertsFacts, ModelFacts, deepseek_v41_facts
from moetail.models.context import Packed
from moetail.models.deepseek_v41 import Decoder
from moetail.models.deepseek_v41_config import small
from moetail.models.parallel import TensorParallel
from moetail.models.tails import ARMS
from moetail.ops import finalize_triton, grouped_gemm_triton, permute_triton, route_triton
from moetail.ops import grouped_gemm as gemm_op
from moetail.ops import permute as permute_op
from moetail.plan import LayerFacts
from moetail.routing import Router
from moetail.tuning import Bucket

FLASH = deepseek_v41_facts.facts()
GPU, TRITON = "NVIDIA Test", "3.6.0"


def run(*args):
    return CliRunner().invoke(cli.app, ["coverage", *map(str, args)])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MOETAIL_CONFIGS", str(tmp_path))
    monkeypatch.setattr(tuning, "PACKAGED", tmp_path / "none")
    tuning.forget()
    yield tmp_path
    tuning.forget()


def write(folder, launches, max_T=None, **changes):
    """A file that measured each tunable launch at its first T and its last, at most max_T; `changes` to its keys."""
    entries = []
    for one in launches:
        if one.tunable:
            key = replace(coverage.key_of(one.shape, GPU, TRITON), **changes)
            last = one.max_T if max_T is None else min(one.max_T, max_T)
            buckets = [(Bucket(one.min_T, last - 1, one.min_T, ()), {}), (Bucket(last, last, last, ()), {})]
            entries.append(tuning.entry(key, buckets))
    (folder / "gpu.json").write_text(json.dumps({"schema": tuning.SCHEMA, "entries": entries}))
    tuning.forget()


@pytest.mark.parametrize("max_tokens", [1, 682, 683, 8192, 100_000])
def test_every_call_has_one_block(max_tokens):
    for E, K in ((384, 6), (128, 3), (1, 1), (8, 2)):
        ranges = gemm_op.block_ranges(K, E, max_tokens)
        assert ranges[0][1] == 1 and ranges[-1][2] == max_tokens
        assert all(a[2] + 1 == b[1] for a, b in itertools.pairwise(ranges))
        for block, first, last in ranges:
            assert {gemm_op.block_for(T, K, E) for T in (first, (first + last) // 2, last)} == {block}


def test_the_list_is_what_the_kernels_ask_for(monkeypatch):
    """A small model's launches in the interpreter, at every block: the shapes they look up are the list's."""
    kind = ExpertsFacts(E=4, K=2, H=64, I=32, router=Router(2, "sqrtsoftplus", renormalize=True))
    facts = ModelFacts("small", (LayerFacts(0, can_stop=True, has_shared_experts=True),), 2, 64, experts=(kind,))
    asked = set()
    monkeypatch.setattr(tuning, "tuned", lambda kind, device, shape, source, T: asked.add((shape, T)))
    tuning.forget()
    up, down = torch.randn(4, 64, 64).bfloat16(), torch.randn(4, 64, 32).bfloat16()
    tokens = (1, 5, 20, 90)
    for T in tokens:
        hidden, logits = torch.randn(T, 64).bfloat16(), torch.randn(T, 4)
        weights, ids = torch.empty(T, 2), torch.empty(T, 2, dtype=torch.int32)
        route_triton.launch(logits, None, kind.router, weights, ids)
        block = moetail.block_for(T, 2, 4)
        p = permute_op._new(ids, 4, block)
        permute_triton.launch(ids, None, 4, block, *p)
        row_map, source, block_expert = p[:3]
        h, rows = torch.empty(source.numel(), 32).bfloat16(), torch.empty(source.numel(), 64).bfloat16()
        place = (None, source, block_expert, T, 2, block)
        grouped_gemm_triton.launch(hidden, up, *place, True, "swiglu", None, h)
        grouped_gemm_triton.launch(h, down, *place, False, None, None, rows)
        finalize_triton.launch(rows, row_map, weights, hidden, None, None, 1.0, moetail.Numerics.TRTLLM, hidden.clone())
    tuning.forget()
    launches = coverage.launches(facts, tp=1, max_tokens=100)
    assert all(one.tunable for one in launches) and len(launches) == 1 + 3 * 3 + 1
    assert asked == {(one.shape, T) for one in launches for T in tokens if one.min_T <= T <= one.max_T}


class Seen(TorchDispatchMode):
    """The ops of ours that ran, without those inside another."""

    def __init__(self):
        super().__init__()
        self.ops = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, op = func.name().partition("::")
        if namespace == "moetail":
            self.ops.add(op.partition(".")[0].removesuffix("_out"))
        return func(*args, **(kwargs or {}))


SMALL = small()
LIMIT = 20  # tokens that a boundary takes unfinalized


def launched(group, T, slots):
    """The ops of one step of T tokens, the drafter's layer among them."""
    tp = None if group is None else TensorParallel.of(group, 64, SMALL.hidden_size, torch.device("cpu"))
    decoder = Decoder(SMALL, torch.device("cpu"), tp, with_drafter=True, facts=small_facts(slots).layers)
    step = Packed.of([torch.arange(T) % 250])
    with Seen() as seen:
        stream = decoder.forward_stage(step, decoder.context([T]), ARMS["fused"])
        decoder.forward(step, decoder.context([T]), ARMS["fused"])
        decoder.forward_drafter(step, decoder.drafter_context([T]), ARMS["fused"], stream.S)
    return seen.ops


def small_facts(slots):
    K, H, I = SMALL.num_experts_per_tok, SMALL.hidden_size, SMALL.moe_intermediate_size  # noqa: E741
    drafter_E, drafter_K = SMALL.dspark_n_routed_experts, SMALL.dspark_num_experts_per_tok
    experts = (
        ExpertsFacts(SMALL.n_routed_experts, K, H, I, replace(Router.DEEPSEEK_V4, top_k=K)),
        ExpertsFacts(drafter_E, drafter_K, H, I, replace(Router.DEEPSEEK_V4, top_k=drafter_K), is_drafter=True),
    )
    layers = deepseek_v41_facts.layers(SMALL, LIMIT, LIMIT)
    return ModelFacts("small", layers, K, H, experts=experts, hc=SMALL.hc_mult).with_shared_slots(slots)


@pytest.mark.parametrize("slots", [0, 1])
@pytest.mark.parametrize("T", [LIMIT, LIMIT + 1])
def test_the_list_is_what_the_decoder_runs(two, T, slots):
    """Its experts' GEMMs are torch's, and its ranks sum what no MoE layer does: nothing else differs."""
    for tp, ran in ((1, launched(None, T, slots)), (2, two.run(launched, T, slots)[0])):
        listed = {one.shape.op for one in coverage.launches(small_facts(slots), tp, 64) if one.min_T <= T <= one.max_T}
        assert ran == listed - {"grouped_gemm"}


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


def test_shared_slots_are_experts_and_slots_of_every_launch_but_the_routers():
    found = coverage.launches(FLASH.with_shared_slots(2), 2, 64)
    sizes = {(one.shape.op, dict(one.shape.dims).get("E"), dict(one.shape.dims).get("K")) for one in found}
    assert sizes >= {("route", 384, 6), ("permute", 386, 8), ("grouped_gemm", 386, 8), ("finalize_all_reduce", None, 8)}
    assert {(op, E, K) for op, E, K in sizes if K == 6} == {("route", 384, 6)}
    assert FLASH.with_shared_slots(0) == FLASH
    none = replace(FLASH, layers=tuple(replace(layer, has_shared_experts=False) for layer in FLASH.layers))
    with pytest.raises(ValueError, match=r"^shared_slots must be 0 for deepseek-v4\.1-flash, which has no shared"):
        none.with_shared_slots(1)


def test_one_launch_a_shape_and_interval():
    """At one rank a boundary with a limit leaves two kinds of layers: their calls overlap, and `tune` would twice."""
    for slots, tp in ((0, 1), (1, 1), (0, 2)):
        found = coverage.launches(small_facts(slots), tp, 64)
        for a, b in itertools.combinations(found, 2):
            assert a.shape != b.shape or a.max_T + 1 < b.min_T or b.max_T + 1 < a.min_T, (a, b)
    (finalized,) = [one for one in coverage.launches(small_facts(0), 1, 64) if one.shape.op == "finalize_mhc"]
    assert (finalized.min_T, finalized.max_T) == (1, LIMIT)


def test_every_tuned_op_has_a_hash_of_its_own():
    launches = [one for one in coverage.launches(FLASH, 2, 64) if one.tunable]
    launches += coverage.launches_of("finalize_norm", (6, 5120), 64) + coverage.launches_of(
        "finalize_mhc", (6, 5120, 4), 64
    )
    hashes = {one.shape.op: coverage.key_of(one.shape, GPU, TRITON).source for one in launches}
    assert len(set(hashes.values())) == len(hashes) == 6


def test_the_plan_knows_every_word():
    assert plan.COVERAGE == tuning.HOW


def test_the_packaged_files_are_of_these_kernels():
    """After an edit of a kernel its entries are dead weight: tune it again, or take them out."""
    for path in tuning.PACKAGED.glob("*.json"):
        for entry in tuning.read(path):
            shape = tuning.shape_of(entry)
            assert entry["source"] == coverage.key_of(shape, entry["gpu"], entry["triton"]).source, (
                f"{path.name}: {shape}"
            )


def test_ranks_split_the_experts():
    gemms = {
        (one.shape["N"], one.shape["Kd"]) for one in coverage.launches(FLASH, 2, 64) if one.shape.op == "grouped_gemm"
    }
    assert gemms == {(2304, 5120), (5120, 1152)}
    with pytest.raises(ValueError, match=r"^tp must divide the experts' 2304 columns, got 5"):
        coverage.launches(FLASH, 5, 64)
    with pytest.raises(ValueError, match=r"^model must have experts"):
        coverage.launches(replace(FLASH, experts=()), 2, 64)


def test_a_covered_model(folder):
    write(folder, coverage.launches(FLASH, 2, 8192))
    result = run("deepseek-v4.1-flash", "--tp", 2, "--max-tokens", 8192, "--gpu", "test")
    assert result.exit_code == cli.OK, result.output
    text = " ".join(result.output.split())
    assert f"on {GPU}, Triton {TRITON}" in text and "heuristic 0.0%, stale 0.0%" in text
    assert (
        "grouped_gemm E=384 K=6 N=2304 Kd=5120 block=16 gather=1 swiglu=1 transposed=0 1-682 bucket measured at 1, 682"
        in text
    )
    for op in ("finalize_all_reduce K=6 H=5120 1-8192", "finalize_all_reduce_mhc K=6 H=5120 hc=4 1-256"):
        assert f"{op} fixed nothing to tune" in text
    main, drafter = text.split(" the drafter's alone: ")
    assert "all_reduce H=5120 1-8192 fixed" in drafter and "E=128" in drafter and "E=128" not in main
    assert " mhc H=5120 hc=4 1-8192 fixed" in main and "not covered" not in text


def test_what_to_do_about_it_is_a_command_that_works(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write(folder, coverage.launches(FLASH, 1, 64))
    args = ("deepseek-v4.1-flash", "--max-tokens", 100, "--shared-slots", 1)
    result = run(*args, "--gpu", "test")
    assert result.exit_code == cli.SLOWER and "this shape was never tuned" in result.output
    command = result.output.split("moetail tune ")[1].split(" measures it")[0]
    assert command == "--model deepseek-v4.1-flash --tp 1 --max-tokens 100 --shared-slots 1 --out FOLDER/gpu.json"
    said = CliRunner().invoke(cli.app, ["tune", *command.replace("FOLDER", str(folder)).split()]).output
    assert "tune needs a CUDA GPU" in said  # behind all that its arguments could be wrong in


@pytest.mark.parametrize(
    ("made", "says", "allow"),
    [({"max_T": 4096}, "4097-8192 heuristic above the largest bucket, 4096", "heuristic"),
     ({"source": "edited"}, "stale gpu.json: tuned with kernel edited", "stale")],
    ids=["above-the-largest-bucket", "after-a-kernel-edit"],
)  # fmt: skip
def test_what_is_not_covered_fails(folder, made, says, allow):
    write(folder, coverage.launches(FLASH, 2, 8192), **made)
    args = ("deepseek-v4.1-flash", "--tp", 2, "--gpu", "test")
    result = run(*args)
    assert result.exit_code == cli.SLOWER and says in " ".join(result.output.split())
    assert run(*args, "--allow", allow).exit_code == cli.OK
    other = {"heuristic": "stale", "stale": "heuristic"}[allow]
    assert run(*args, "--allow", other).exit_code == cli.SLOWER


def test_another_size_is_not_covered(folder):
    write(folder, coverage.launches(FLASH, 2, 8192))
    result = run("deepseek-v4.1-flash", "--tp", 4, "--gpu", "test")
    assert result.exit_code == cli.SLOWER and "this shape was never tuned" in result.output


def test_a_transformers_model(folder):
    from moetail.bench import models
    from moetail.integrations import layer_facts

    facts = layer_facts.from_config("glm4-moe-mini", models.load_config("glm4-moe-mini", ""))
    assert facts.experts == (ExpertsFacts(64, 8, 2048, 512),)
    write(folder, coverage.launches(facts, 1, 300))
    assert run("glm4-moe-mini", "--max-tokens", 300, "--gpu", "test").exit_code == cli.OK


@pytest.mark.parametrize(
    ("args", "says"),
    [(["nothing", "--gpu", "test"], "model must be"), (["deepseek-v4.1-flash"], "gpu must name"),
     (["deepseek-v4.1-flash", "--gpu", "h900"], "gpu must name one GPU of the config files (NVIDIA Test"),
     (["deepseek-v4.1-flash", "--gpu", "test", "--allow", "all"], "allow must be a list of heuristic, stale")],
)  # fmt: skip
def test_bad_input(folder, args, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write(folder, coverage.launches(FLASH, 2, 64))
    result = run(*args)
    assert result.exit_code == cli.USAGE and says in " ".join(result.output.split())
