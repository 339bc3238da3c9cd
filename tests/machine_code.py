"""A Triton kernel's machine code for sm_90, compiled here without a GPU.

A test's script runs in a process of its own, because Triton's interpreter is chosen when a kernel is defined:

    code = sm_90(kernel, pointers, constants, options, aligned)     in the script, which prints json of what it looks at
    results = run(SCRIPT)                                           in the test
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass

WAIT = "griddepcontrol.wait"


@dataclass(frozen=True)
class Code:
    ptx: str
    registers: int
    stack: int
    local: int
    shared: int  # bytes of shared memory
    sass: str

    def count(self, pattern):
        return len(re.findall(pattern, self.ptx))

    @property
    def vectors(self):
        """32-bit registers that loads from global memory fill two or four at a time."""
        load = r"ld\.global(?:\.\w+)*"
        return 4 * self.count(load + r"\.v4\.b32") + 2 * self.count(load + r"\.v2\.b32")

    @property
    def load_batches(self):
        """How often, before the first reduction, 16-byte loads follow arithmetic: each may wait for memory."""
        kinds = re.findall(r"\s(LDG\.E\.\S*128|FFMA|REDUX)\S*\s", self.sass.split("REDUX")[0])
        order = "".join("L" if kind.startswith("LDG") else "F" for kind in kinds)
        return len(re.findall("L+", order))

    @property
    def before_wait(self):
        """Accesses to global memory above the wait for the kernel before."""
        return len(re.findall(r"(?:ld|st|atom)(?:\.volatile)?\.global|cp\.async", self.ptx.split(WAIT)[0]))


def sm_90(kernel, pointers, constants, options, aligned=(), unaligned=None):
    """`pointers`: argument -> "*bf16" and the like, all aligned to 16 bytes, as the numbers named in `aligned` are;
    `unaligned`: pointers that are not. The other arguments that are not constants are int32, or fp32 by their names."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {
        n: "fp32" if n in ("scale", "eps", "routed_scale", "limit") else "i32" for n in names if n not in constants
    }
    types |= {n: kind for n, kind in {**pointers, **(unaligned or {})}.items() if n in names}
    places = {n: (names.index(n),) for n in names}
    source = ASTSource(
        kernel,
        {n: types.get(n, "constexpr") for n in names},
        {places[n]: value for n, value in constants.items() if n in names},
        {places[n]: [["tt.divisibility", 16]] for n in (*pointers, *aligned) if n in names},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    asm = made.asm
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(asm["cubin"])
        cubin.flush()
        dump = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", "-sass", cubin.name]
        dumped = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    numbers = (int(re.search(rf"{what}:(\d+)", dumped)[1]) for what in ("REG", "STACK", "LOCAL"))
    return Code(asm["ptx"], *numbers, made.metadata.shared, dumped)


def run(script):
    """What the script prints, from json."""
    path = os.pathsep.join((".", "tests", os.environ.get("PYTHONPATH", "")))  # which may bring another Triton
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
