"""What a table says of a bandwidth, and of an op that is its definition on a CPU."""

import pytest
from rich.console import Console

from moetail.bench import tables

INTERVAL = {"value": 0.4, "low": 0.39, "high": 0.41}


def printed(table):
    console = Console(width=240)
    with console.capture() as out:
        console.print(table)
    return " ".join(out.get().split())


def block_row(op, device):
    return {
        "op": op, "device": device, "case": "T=8", "us": 1000.0, "tb_per_s": 12.3e-6, "tflop_per_s": 0.0,
        "share_of_copy": 0.01, "share_of_floor": 0.01, "bound_by": "bytes", "copy_tb_per_s": 0.0095,
        "matmul_tflop_per_s": 0.0612, "aa": {"b_over_a": 1.0}, "ratios": {"transformers": INTERVAL},
        "arms": {"moetail": {"p90_us": 1.0}, "transformers": {}},
    }  # fmt: skip


def kernels_row(op, device):
    return {
        "op": op, "device": device, "T": 4, "K": 2, "H": 8, "mode": "chained", "l2": "warm", "us": 30.0,
        "tb_per_s": 4.31, "share_of_copy": 0.05, "over_part_us": None, "aa": {"b_over_a": 1.0},
        "ratios": {"torch eager": INTERVAL}, "arms": {"moetail TRTLLM": {"p90_us": 1.0}, "torch eager": {}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tera", "says"),
    [(4.312, "4.31 TB/s"), (1.0, "1 TB/s"), (0.9996, "1 TB/s"), (0.9994, "999 GB/s"), (0.0095, "9.5 GB/s"),
     (12.3e-6, "0.0123 GB/s"), (2250.4, "2250 TB/s"), (None, "-"), (0.0, "-")],
)  # fmt: skip
def test_a_rate_is_never_a_zero(tera, says):
    assert tables.rate(tera, "B/s") == says


def test_the_tables_print_rates_that_can_be_read():
    text = printed(tables.block_table([block_row("route", "cpu")]))
    assert "0.0123 GB/s" in text and "the copy's 9.5 GB/s or FLOPs at the matmul's 61.2 GFLOP/s" in text
    assert " 0.00 " not in text and "TB/s" not in text
    assert "4.31 TB/s" in printed(tables.kernels_table([kernels_row("finalize", "cuda")]))
    assert "TB/s" not in printed(tables.kernels_table([kernels_row("finalize", "cuda") | {"tb_per_s": None}]))


@pytest.mark.parametrize("op", ["route", "permute", "grouped_gemm", "experts", "fused_experts", "moe_block"])
def test_a_definition_on_a_cpu_is_called_one(op):
    says = "but the definition in torch"
    assert says in printed(tables.block_table([block_row(op, "cpu")]))
    assert says not in printed(tables.block_table([block_row(op, "cuda")]))


@pytest.mark.parametrize(("op", "defined"), [("finalize", False), ("finalize_norm", False), ("finalize_mhc", True)])
def test_what_has_a_kernel_on_a_cpu_is_not(op, defined):
    assert ("the definition in torch" in printed(tables.kernels_table([kernels_row(op, "cpu")]))) == defined


MACHINE = {"gpu": "NVIDIA H200", "threads": 16, "date": "2026-12-01", "commit": "abc"}


def test_a_readme_has_the_losses_against_vllms_experts():
    row = {
        "op": "fused_experts", "E": 8, "K": 2, "T": 1, "aa": {"b_over_a": 1.0, "low": 0.999, "high": 1.001},
        "ratios": {"torch": {"value": 2.0, "low": 2.0, "high": 2.0},
                   "vllm fused_experts": {"value": 0.8, "low": 0.75, "high": 0.8}},
        "arms": {"moetail": {"median_us": 50.0}, "torch": {"median_us": 100.0}, "control": {"median_us": 50.0},
                 "vllm fused_experts": {"median_us": 40.0}},
    }  # fmt: skip
    without = {**row, "ratios": {"torch": row["ratios"]["torch"]}}
    made = tables.markdown_table([{"kind": "kernels", "machine": MACHINE, "rows": [row, without]}])
    lines = [line for line in made.splitlines() if line.startswith("| experts")]
    assert lines == [
        "| experts of E=8 K=2 | NVIDIA H200 | fused_experts | 1 | 0.040 | 0.050 | 1.250 [1.250, 1.333] | - | slower |"
    ]


def test_a_readme_has_vllms_steps():
    ratio = {"b_over_a": 0.99, "low": 0.98, "high": 1.0}
    row = {
        "case": "decode8", "T": 8, "ratio": ratio, "differing_bits": 0, "verdict": "same",
        "arms": {"stock": {"median_us": 1000.0}, "control": {"median_us": 1001.0}, "moetail": {"median_us": 990.0},
                 "repeat": {"median_us": 991.0}},
    }  # fmt: skip
    settings = {"model": "qwen1.5-moe", "layers": 8}
    tokens = {"case": "tokens8x512", "T": 8, "arms": {}, "verdict": "same"}
    made = tables.markdown_table(
        [{"kind": "serve", "machine": MACHINE, "settings": settings, "rows": [tokens, row]}]
    )  # fmt: skip
    assert made.splitlines()[2:4] == [
        "| vLLM, qwen1.5-moe, 8 layers | NVIDIA H200 | decode8 | 8 | 1.000 | 0.990 | 0.990 [0.980, 1.000] | 0 | same |",
        "",
    ]
