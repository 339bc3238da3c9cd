#!/usr/bin/env bash
# scripts/vllm_source.sh PYTHON [VERSION]: print a folder with vLLM's .py files and the few packages they import on a CPU.
#
# vLLM's own requirements are a CUDA torch and several GB of GPU packages. Its Python code imports without them.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
version=${2:-0.26.0}
site=$PWD/.vllm/$version
newer=()  # what releases after 0.26 import besides
[ "$version" = 0.26.0 ] || newer=(xgrammar apache-tvm-ffi fastapi starlette opentelemetry-api opentelemetry-sdk
    opentelemetry-semantic-conventions partial-json-parser llguidance einops)
if [ ! -e "$site/.done" ]; then
    mkdir -p "$site"
    "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: \
        --platform manylinux_2_28_x86_64 -d "$site" "vllm==$version" >&2
    "$python" - "$site" <<'PY'
import pathlib, sys, zipfile
site = pathlib.Path(sys.argv[1])
for wheel in site.glob("vllm-*.whl"):
    with zipfile.ZipFile(wheel) as content:
        content.extractall(site, [n for n in content.namelist() if n.endswith(".py") or ".dist-info/" in n])
    wheel.unlink()
PY
    "$python" -m pip install -q --disable-pip-version-check --no-deps --target "$site" \
        pydantic==2.14.4 pydantic-core==2.50.5 annotated-types==0.8.0 typing-inspection==0.4.5 msgspec==0.23.0 \
        cbor2==6.3.0 pyzmq==27.3.0 aiohttp==3.14.5 aiosignal==1.4.0 aiohappyeyeballs==2.7.1 attrs==26.1.0 \
        frozenlist==1.8.0 multidict==7.2.1 propcache==0.5.4 yarl==1.25.1 requests==2.34.2 urllib3==2.8.0 idna==3.20 certifi==2026.10.19.post1 \
        openai==3.57.0 openai-harmony==0.0.8 httpx2==2.16.2 sniffio==1.3.1 pybase64==1.5.1 cachetools==8.0.2 \
        cloudpickle==3.1.3 uvloop==0.23.0 py-cpuinfo==9.0.0 prometheus_client==0.26.0 ${newer[@]+"${newer[@]}"} >&2
    touch "$site/.done"
fi
echo "$site"
