"""vLLM alone, without any of our processes, connector or executor: reads `{"config", "prompts", "count"}` as JSON from
standard input and writes its answers. For tests, which start it as a process of its own."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import msgspec

from p2pserve.node.engine import protocol
from p2pserve.node.engine.vllm_program.backend import VLLM


def answers(config: protocol.EngineConfig, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The likeliest `count` tokens after each prompt, all asked at once."""
    from vllm import LLM, SamplingParams

    from p2pserve.node.engine.vllm_program.arguments import engine_arguments

    llm: Any = LLM(**engine_arguments(config))
    sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def main() -> None:
    """The program."""
    os.environ.update(VLLM.environment)
    asked = json.load(sys.stdin)
    found = answers(msgspec.convert(asked["config"], protocol.EngineConfig), asked["prompts"], asked["count"])
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
