#!/usr/bin/env bash
# scripts/gpu_session.sh: the checks that only a GPU can make, shortest first, each with its own limit, so that a session
# that is cut off has seen as much as possible. The last lines of each are printed; run it in the checkout's root.
set -u
export PYTHONPATH=.:tests
run() {
    local limit=$1
    shift
    echo "== $(date +%T) $*"
    timeout "$limit" "$@" 2>&1 | tail -"${LINES_EACH:-6}"
}
tests() { run "$1" python3 -m pytest -q -p no:cacheprovider -rf -m 'gpu or gpu2' "${@:2}"; }

tests 60 tests/test_selftest.py tests/test_profile.py tests/test_contract.py tests/test_guards.py tests/test_layer.py
tests 180 tests/test_finalize_all_reduce_triton.py -k 'not two_gpus'
tests 240 tests/test_two_shot_triton.py -k 'not two_gpus'
tests 120 tests/test_all_reduce_norm.py tests/test_finalize_all_reduce_norm.py tests/test_all_reduce_mhc.py tests/test_finalize_all_reduce_mhc.py
tests 120 tests/test_finalize_norm.py tests/test_finalize_norm_triton.py tests/test_finalize_mhc.py tests/test_finalize_mhc_triton.py
tests 60 tests/test_epilogue.py tests/test_kernels.py
tests 120 tests/test_quant_out.py
tests 120 tests/test_route.py tests/test_route_triton.py tests/test_permute.py tests/test_permute_triton.py tests/test_tuning.py
tests 120 tests/test_grouped_gemm.py tests/test_grouped_gemm_triton.py tests/test_experts.py
tests 150 tests/test_tune.py tests/test_block.py tests/test_transformers_triton.py
tests 120 tests/test_mhc.py tests/test_mhc_collapse.py tests/test_mhc_mixes.py tests/test_tails.py
tests 120 tests/test_deepseek_v41.py tests/test_deepseek_v41_step.py tests/test_moe_block.py
tests 240 tests/test_deferral.py
run 60 python3 -m moetail.cli bench kernels --op finalize_norm --l2 warm --shape 1,6,5120 --shape 16,6,5120 --shape 8192,6,5120
run 60 python3 -m moetail.cli bench kernels --op finalize_mhc --l2 warm --shape 1,6,5120 --shape 16,6,5120 --shape 8192,6,5120
run 60 python3 -m moetail.cli bench kernels --op finalize_norm_fp8 --l2 warm --shape 1,6,5120 --shape 16,6,5120 --shape 8192,6,5120
# The tuned file: `run 260 moetail tune --model deepseek-v4.1-flash --tp 2 --time-limit 240 --out FOLDER/nvidia-h200.json`, then with
# --resume until nothing is missing; it belongs in moetail/configs/. MOETAIL_CONFIGS=FOLDER uses it where it is.
LINES_EACH=16 run 100 python3 -m moetail.cli bench kernels --op experts --shape 8 --shape 4096
LINES_EACH=16 run 150 python3 -m moetail.cli bench kernels --op moe_block --shape 8 --shape 4096
