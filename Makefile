# Each target sets up what it needs (scripts/setup.sh): nothing but Python has to be there.
.PHONY: demo test test-vllm check readme

# The main job on this machine, GPU or not: a transformers MoE model before and after. It shows a loss and does not fail
# for one: a gate is `moetail bench forward` by itself.
demo:
	@python=$$(scripts/setup.sh transformers,cpu,bench) && PYTHONPATH=. "$$python" -m moetail.cli bench forward \
	    --model glm4-moe-mini --case prefill=512 --case 'decode=8*1@512' --fail-if implausible

# The tests that need no GPU: two processes, whose OpenMP threads sleep rather than spin on each other's cores, then
# those that time things. On a GPU machine, one process: make test MARK=gpu
CPU = not gpu and not gpu2 and not vllm
test:
ifdef MARK
	@python=$$(scripts/setup.sh dev) && PYTHONPATH=. "$$python" -m pytest -m '$(MARK)'
else
	@python=$$(MODULES_TOO=xdist scripts/setup.sh dev) && export PYTHONPATH=. \
	    && OMP_WAIT_POLICY=passive "$$python" -m pytest -n 2 --dist loadfile -m '$(CPU) and not alone' \
	    && "$$python" -m pytest -m '$(CPU) and alone'
endif

# The plugin against vLLM's own code, on a CPU: its wheel's .py files, no GPU packages. Another release: VLLM=0.33.0
VLLM = 0.26.0
test-vllm:
	@python=$$(scripts/setup.sh dev) && site=$$(scripts/vllm_source.sh "$$python" $(VLLM)) \
	    && PYTHONPATH=.:$$site "$$python" -m pytest -m vllm tests/test_vllm_real.py

check:
	@python=$$(MODULES_TOO="ruff mypy" scripts/setup.sh dev) && "$$python" -m ruff check . \
	    && "$$python" -m ruff format --check . && "$$python" -m mypy

# The README's tables and picture, from the records under results/.
readme:
	@python=$$(scripts/setup.sh dev) && PYTHONPATH=. "$$python" -m moetail.cli bench readme
