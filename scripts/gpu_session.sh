#!/usr/bin/env bash
# scripts/gpu_session.sh: the checks that only a GPU can make, each with its own limit, so that a session that is cut off
# has seen as much as possible. The last lines of each are printed; run it in the checkout's root.
#
# Tests that neither poll a peer nor read a clock run side by side (pytest-xdist where it is installed): about 130 s for
# all of them on an H200 with 16 cores, most of it compilation.
set -u
export PYTHONPATH=.:tests PYTHONUNBUFFERED=1
run() {
    local limit=$1
    shift
    echo "== $(date +%T) $*"
    timeout "$limit" "$@" 2>&1 | tail -"${LINES_EACH:-8}"
}
tests() { run "$1" python3 -m pytest -q -p no:cacheprovider -rf --tb=short -W ignore -m "$2" "${@:3}"; }

alone='all_reduce|two_shot|reduce_scatter|quant_out|tails|selftest|timing|kernels|block|profile|forward|transformers_step|deferral'
side_by_side=$(grep -l 'mark.gpu' tests/test_*.py | grep -Ev "$alone")
workers=$(python3 -c 'import xdist' 2>/dev/null && echo "-n 12 --dist worksteal")
tests 200 gpu $workers $side_by_side
tests 60 gpu tests/test_selftest.py tests/test_profile.py tests/test_timing.py tests/test_transformers_step.py tests/test_forward.py
tests 120 gpu tests/test_deferral.py
tests 120 gpu tests/test_finalize_all_reduce_triton.py
tests 240 gpu tests/test_two_shot_triton.py tests/test_finalize_reduce_scatter.py
tests 200 gpu tests/test_all_reduce_norm.py tests/test_finalize_all_reduce_norm.py tests/test_all_reduce_mhc.py tests/test_finalize_all_reduce_mhc.py tests/test_quant_out.py tests/test_tails.py
tests 150 gpu tests/test_block.py tests/test_kernels.py
for op in finalize_norm finalize_mhc finalize_norm_fp8; do
    run 60 python3 -m moetail.cli bench kernels --op $op --l2 warm --shape 1,6,5120 --shape 16,6,5120 --shape 8192,6,5120
done
# The tuned file: `moetail tune --model deepseek-v4.1-flash --tp 2 --time-limit 240 --out FOLDER/nvidia-h200.json`, then with
# --resume until nothing is missing; it belongs in moetail/configs/. MOETAIL_CONFIGS=FOLDER uses it where it is.
LINES_EACH=16 run 100 python3 -m moetail.cli bench kernels --op experts --shape 8 --shape 4096
LINES_EACH=16 run 150 python3 -m moetail.cli bench kernels --op moe_block --shape 8 --shape 4096

[ "$(nvidia-smi -L | wc -l)" -ge 2 ] || exit 0
tests 150 gpu2 tests
# One call of it hung for two minutes on two H200s; since then an arm that does not end is an error with its name.
LINES_EACH=30 run 200 python3 -m torch.distributed.run --nproc-per-node=2 -m moetail.cli bench kernels --op finalize_all_reduce
LINES_EACH=60 run 200 python3 -m torch.distributed.run --nproc-per-node=2 scripts/sweep_two_shot.py none 8192
