# Each target sets up what it needs (scripts/setup.sh): nothing but Python has to be there.
.PHONY: demo test check readme

# The main job on this machine, GPU or not: a transformers MoE model before and after. It shows a loss and does not fail
# for one: a gate is `moetail bench forward` by itself.
demo:
	@python=$$(scripts/setup.sh transformers,cpu,bench) && PYTHONPATH=. "$$python" -m moetail.cli bench forward \
	    --model glm4-moe-mini --case prefill=512 --case 'decode=8*1@512' --fail-if implausible

# The tests that need no GPU. On a GPU machine: make test MARK=gpu
MARK = not gpu and not gpu2
test:
	@python=$$(scripts/setup.sh dev) && PYTHONPATH=. "$$python" -m pytest -m '$(MARK)'

check:
	@python=$$(MODULES_TOO="ruff mypy" scripts/setup.sh dev) && "$$python" -m ruff check . \
	    && "$$python" -m ruff format --check . && "$$python" -m mypy

# The README's tables and picture, from the records under results/.
readme:
	@python=$$(scripts/setup.sh dev) && PYTHONPATH=. "$$python" -m moetail.cli bench readme
