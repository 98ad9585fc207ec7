"""Runs vLLM on prompts, in a process of its own: python -m tests.integrations.vllm_engine ANSWER.

The request is JSON on standard input: `engine`, the keywords of `vllm.LLM`, `rounds`, lists of prompts that are given
at the same time, and `new_tokens`. The file ANSWER gets JSON: the `tokens` of every prompt, and vLLM's counts of
`preemptions` and of tokens found in the prefix cache, `hits`. `graphs` and `breaks` are counted by torch.compile.
"""

import json
import os
import sys
from pathlib import Path


def main() -> None:
    # The engine in this process, unless it has ranks; a small cache; no thread is bound to a core.
    request = json.load(sys.stdin)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int("tensor_parallel_size" in request["engine"]))
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from torch._dynamo.utils import counters as dynamo
    from vllm import LLM, SamplingParams

    llm = LLM(**{"enforce_eager": True} | request["engine"], skip_tokenizer_init=True, disable_log_stats=False)
    sampling = SamplingParams(temperature=0, max_tokens=request["new_tokens"], ignore_eos=True, detokenize=False)
    tokens = []
    for prompts in request["rounds"]:
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        tokens.append([list(answer.outputs[0].token_ids) for answer in answers])
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    answer = {"tokens": tokens, "preemptions": counts["vllm:num_preemptions"], "hits": counts["vllm:prefix_cache_hits"]}
    stats, breaks = dynamo["stats"]["unique_graphs"], sum(dynamo["graph_break"].values())
    Path(sys.argv[1]).write_text(json.dumps(answer | {"graphs": stats, "breaks": breaks}))


if __name__ == "__main__":
    main()
