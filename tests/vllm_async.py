"""CUDA's scheduler in vLLM's CPU build, which switches it off: steps are planned before the last one has ended."""

import torch

from rollout_vllm import import_vllm


def switch_on() -> list[int]:
    """Patch vLLM before its engine starts. The list gets the length of the queue of steps at each step."""
    import_vllm(torch.device("cpu"))  # our own patches come first
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.engine.core import EngineCore

    lengths: list[int] = []
    as_shipped, step = CpuPlatform.check_and_update_config, EngineCore.step_with_batch_queue

    def check_and_update_config(cls, vllm_config):
        as_shipped(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    def counted(core):
        lengths.append(len(core.batch_queue))
        return step(core)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    EngineCore.step_with_batch_queue = counted
    return lengths
