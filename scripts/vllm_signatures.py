"""Record the parameters that a vLLM has for what moetail's plugin needs, into tests/vllm_signatures.json.

PYTHONPATH=.:$(scripts/vllm_source.sh python 0.33.0) python scripts/vllm_signatures.py
"""

import json
from importlib import metadata
from pathlib import Path

from moetail.integrations.vllm import signatures

target = Path(__file__).resolve().parent.parent / "tests" / "vllm_signatures.json"
recorded = json.loads(target.read_text()) if target.exists() else {}
recorded[metadata.version("vllm")] = {
    name: signatures.parameters(signatures.find(name)) for name in signatures.REQUIRED
}
lines = [f'"{version}": {{\n' + ",\n".join(f"  {json.dumps(name)}: {json.dumps(have)}" for name, have in names.items())
         + "\n}" for version, names in sorted(recorded.items())]  # fmt: skip
target.write_text("{\n" + ",\n".join(lines) + "\n}\n")
print("problems:", signatures.problems())
