"""Two vLLM engines in one process: the same model and weights, the plugin off and on.

Both live at once, so that their steps can alternate. What vLLM keeps once a process (its workspace) is handed to the
engine whose turn it is. Imports vLLM when an engine is made.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARMS = ("stock", "moetail")


@dataclass(frozen=True)
class Options:
    """`max_len`: the longest request. `batches`: the decode batches that get a CUDA graph. `extra`: LLM() arguments."""

    folder: Path
    max_len: int
    batches: tuple[int, ...]
    world_size: int = 1
    eager: bool = False
    memory: float = 0.4
    extra: dict[str, Any] = field(default_factory=dict)


class Engine:
    """One engine; `step()` is one step of it, which ends with the sampled tokens on the host."""

    def __init__(self, arm: str, options: Options) -> None:
        # Engine and workers in this process, or no profiler sees their kernels. FlashInfer's sampler is random anyway.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM
        from vllm.v1.worker import workspace

        self.arm = arm
        sizes = sorted(set(options.batches))
        self.llm = LLM(
            model=str(options.folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
            enforce_eager=options.eager, max_model_len=options.max_len, max_num_seqs=max(*sizes, 8),
            max_num_batched_tokens=max(8192, options.max_len), gpu_memory_utilization=options.memory,
            enable_prefix_caching=False, disable_log_stats=True, async_scheduling=False,
            tensor_parallel_size=options.world_size,
            distributed_executor_backend="external_launcher" if options.world_size > 1 else None,
            **({} if options.eager else {"compilation_config": {"cudagraph_capture_sizes": sizes}}),
            additional_config={"moetail": "off"} if arm == "stock" else {},
            **options.extra,
        )  # fmt: skip
        self._workspaces = workspace
        self._workspace = workspace._manager
        self.tokens: dict[str, list[tuple[int, float]]] = {}

    def use(self) -> None:
        """Before a run of this engine, wherever the other one may have run."""
        self._workspaces._manager = self._workspace

    def add(self, prompts: list[list[int]], max_tokens: int, name: str, logprobs: bool = False) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=1 if logprobs else None
        )  # fmt: skip
        for i, prompt in enumerate(prompts):
            self.llm.llm_engine.add_request(f"{name}-{i}", TokensPrompt(prompt_token_ids=prompt), params)

    def step(self) -> None:
        for out in self.llm.llm_engine.step():
            said = out.outputs[0]
            if said.logprobs is None:
                self.tokens[out.request_id] = [(token, 0.0) for token in said.token_ids]
            else:
                pairs = zip(said.token_ids, said.logprobs, strict=True)
                self.tokens[out.request_id] = [(token, chosen[token].logprob) for token, chosen in pairs]

    def finish(self) -> None:
        while self.llm.llm_engine.has_unfinished_requests():
            self.step()

    def layers(self) -> list[str]:
        """What every MoE layer runs and why: `moetail.integrations.vllm.explain`."""
        from moetail.integrations import vllm

        return [str(row) for rows in self.llm.apply_model(vllm.explain) for row in rows]


def prompts(count: int, length: int, seed: int = 1) -> list[list[int]]:
    """Random token ids, the same on every rank."""
    draw = random.Random(seed)
    return [[draw.randrange(10, 32000) for _ in range(length)] for _ in range(count)]


def generate(engine: Engine, count: int, length: int, tokens: int) -> dict[str, float]:
    """Prompts through an engine at once: time to the first token, tokens a second; the tokens are in its `tokens`.

    With log-probabilities: they show a difference that the argmax of random weights hides.
    """
    engine.use()
    engine.tokens.clear()
    start = time.perf_counter()
    engine.add(prompts(count, length), tokens, "g", logprobs=True)
    engine.step()
    first = time.perf_counter()
    engine.finish()
    seconds = time.perf_counter() - start
    return {"ttft_ms": (first - start) * 1e3, "tokens_per_s": count * tokens / seconds}


def differing(a: Engine, b: Engine) -> int:
    """Tokens, with their log-probabilities, that two engines did not say alike."""
    total = 0
    for name in a.tokens.keys() | b.tokens.keys():
        x, y = a.tokens.get(name, []), b.tokens.get(name, [])
        both = min(len(x), len(y))
        total += sum(p != q for p, q in zip(x[:both], y[:both], strict=True)) + abs(len(x) - len(y))
    return total
