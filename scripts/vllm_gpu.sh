#!/usr/bin/env bash
# The vLLM plugin on a GPU machine, from a checkout, nothing installed: scripts/vllm_gpu.sh PART...
#
#   bits      vLLM's reduction kernels against our numerics
#   eager     plugin off and on without a compiler: finalize + add in one kernel
#   smoke     512 greedy tokens of 8 prompts, compiled and with CUDA graphs
#   bench     decode 1, 8, 32, 128 and prefill 2048, 8192 (with MODEL, LAYERS, QUANT, ROUNDS)
#   tp2       the same on two GPUs
#
# VLLM_SITE: any folder that holds vLLM, where it is not installed. OUT: where records go (default: results).
# Exit code: 0; 1 where a part failed, and the last line says which, with its own exit code (1 from bench serve: slower, or
# other tokens); the other parts have run. 2 for an unknown part, before any runs.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-results}
plugin=$(mktemp -d)
# vLLM finds a plugin by its metadata; this folder is all that pip would have written.
mkdir "$plugin/moetail-0.1.0.dist-info"
printf 'Metadata-Version: 2.1\nName: moetail\nVersion: 0.1.0\n' > "$plugin/moetail-0.1.0.dist-info/METADATA"
printf '[vllm.general_plugins]\nmoetail = moetail.integrations.vllm:register\n' > "$plugin/moetail-0.1.0.dist-info/entry_points.txt"
export PYTHONPATH="$PWD:$plugin${VLLM_SITE:+:$VLLM_SITE}:$PWD/tests"
# No network, no FlashInfer, engines in this process; compiled graphs in one folder.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 \
    VLLM_ENABLE_V1_MULTIPROCESSING=0 TVM_FFI_DISABLE_TORCH_C_DLPACK=1 TOKENIZERS_PARALLELISM=false \
    VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo NCCL_NVLS_ENABLE=0 VLLM_ALLREDUCE_USE_SYMM_MEM=0 \
    VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-/tmp/moetail-vllm}
model=${MODEL:-deepseek-v2-lite}
args=(--model "$model" --layers "${LAYERS:-8}" ${QUANT:+--quant "$QUANT"})
name=serve-$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | tr 'A-Z ' 'a-z-')-$model${QUANT:+-$QUANT}
cases=(--case decode=1 --case decode=8 --case decode=32 --case decode=128 --case prefill=2048 --case prefill=8192)
# Of vLLM's log only what the plugin says and what went wrong.
quiet() { { grep -a --line-buffered "moetail\|tokens\|busy\|rror\|calls seen" || true; } | cut -c1-420; }
serve() { python3 -m moetail.cli bench serve "$@" 2>&1 | quiet; }
for part in "$@"; do
    case $part in bits | eager | smoke | bench | tp2) ;; *) echo "unknown part $part" >&2; exit 2 ;; esac
done
failed=()
for part in "$@"; do
    echo "== $part $(date +%T)"
    case $part in
        bits) timeout 120 python3 -m pytest -q -m vllm tests/test_vllm_bits.py -p no:cacheprovider 2>&1 | tail -15 ;;
        eager) serve "${args[@]}" --eager --tokens 64 --rounds 4 --case decode=8 --json "$out/$name-eager.json" ;;
        smoke) serve "${args[@]}" --tokens 512 --rounds 4 --case decode=8 --json "$out/$name-smoke.json" ;;
        bench) serve "${args[@]}" --tokens 512 --rounds "${ROUNDS:-8}" "${cases[@]}" --profile-dir "$out/$name" --json "$out/$name.json" ;;
        tp2) python3 -m torch.distributed.run --nproc-per-node=2 -m moetail.cli bench serve "${args[@]}" --tokens 512 \
            --rounds "${ROUNDS:-8}" "${cases[@]}" --json "$out/$name-tp2.json" 2>&1 | quiet ;;
    esac || failed+=("$part (exit code $?)")
done
echo "== end $(date +%T)"
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
