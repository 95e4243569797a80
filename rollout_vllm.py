"""Sample by vLLM in the trainer's process, with the same three methods as rollout.TorchEngine."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from subprocess import CalledProcessError

import torch
import torch.nn.functional as F
from tqdm import tqdm

from config import ConfigError
from infra import dist
from infra.device import VLLM_VERSION, cache_bytes, used_bytes
from infra.weights import compare_shapes
from model import Decoder, empty_model
from records import EngineSpec, Request, Sample
from settings.loader import in_short

PREFILL_TOKENS = 8192      # prompt tokens that it computes at once, on every card
# FlashInfer's kernels, which nvcc would compile when they are first called, and torch's symmetric memory. So
# NCCL adds up what the ranks of an engine hold; draws need no kernel of FlashInfer's.
SWITCHED_OFF = ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ALLREDUCE_USE_FLASHINFER",
                "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC", "VLLM_ALLREDUCE_USE_SYMM_MEM")


class VLLMEngine:
    """vLLM in the trainer's process: one engine per rank, or one per `tensor_parallel` neighbouring ranks.

    Log-probs are of the sampling distribution, after temperature and the renormalisation of top_p. A sample
    is a function of the weights, its prompt and its seed up to rounding, as in TorchEngine; the two draw
    differently. On the CPU vLLM's generator takes the lowest 32 bits of a seed.
    Its progress bars have names of their own. Raises ConfigError when vLLM is missing, of another version,
    or cannot start with these sizes.
    """

    def __init__(self, spec: EngineSpec):
        if dist.world_size() % spec.tensor_parallel:
            raise ConfigError(f"rollout.tensor_parallel={spec.tensor_parallel} must divide "
                              f"{dist.world_size()}, the number of processes; set 1, or start more")
        self.eos_ids = spec.eos_ids
        self.tensor_parallel = spec.tensor_parallel
        self.stops = list(spec.stops.texts) if spec.stops else []
        self.device = spec.device
        self.dtype = spec.dtype
        self.sleeps = spec.sleeps
        self.quantized = spec.quantization != "none"
        self.peak_bytes = 0  # of the device, as seen before each sleep and each sync
        model = empty_model(spec.folder, spec.dtype)
        self.expected = dict(model.named_hf_tensors())
        cache = cache_bytes(model.shape, spec.dtype.itemsize, spec.slots, spec.max_len, spec.tensor_parallel,
                            spec.cache_gib)
        with undisturbed():
            llm, self.params = import_vllm(spec.device)
            try:
                self.llm = llm(**engine_options(spec, cache))
            except (ValueError, RuntimeError, CalledProcessError) as error:  # the last: of a compiler
                raise ConfigError(
                    f"rollout.engine=vllm cannot start with slots={spec.slots}, sequences of {spec.max_len} "
                    f"tokens, tensor_parallel={spec.tensor_parallel} and {cache / 2**30:.4g} GiB of KV cache "
                    f"(rollout.cache_gib): {in_short(error)}") from error
            # Its finalizer would destroy the trainer's process group, at exit or before.
            self.llm.llm_engine.engine_core._finalizer.detach()
            self.sleep()

    def sync(self, policy: Decoder) -> None:
        """Take over the policy's weights, one layer at a time, and empty the cache of the old ones.

        Names and shapes are compared first: vLLM cannot recover from a failed load.
        """
        if wrong := compare_shapes(self.expected.items(), policy.named_hf_tensors(merged=False)):
            raise ValueError(f"the policy does not fit the engine at {wrong}, in the policy")
        if self.sleeps:
            self.note_peak()
            self.llm.wake_up(["weights"])
        stream = ((name, dist.gather_full(t, self.device, self.dtype))
                  for name, t in policy.named_hf_tensors())
        if self.quantized:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})
        else:  # its weights are as they are stored: one copy each, where a reload makes three
            self.llm.apply_model(lambda model: model.load_weights(stream))
        if self.sleeps:
            self.llm.wake_up(["kv_cache"])
        self.asleep = False
        # The cached prefixes were computed from the old weights.
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache, so it would answer from old weights")

    def sleep(self) -> None:
        """Sample no more until the next `sync`; give up weights and KV cache, unless rollout.sleep=never."""
        self.asleep = True
        if self.sleeps:
            self.note_peak()
            self.llm.sleep(level=2)

    def note_peak(self) -> None:
        """Look at the device's memory. torch counts the engine's as allocated while it is given up."""
        self.peak_bytes = max(self.peak_bytes, used_bytes(self.device))

    def generate(
        self,
        requests: list[Request],
        temperature: float,
        top_p: float = 1.0,
        progress: str | None = None
    ) -> list[Sample]:
        """Sample the new tokens of each request, in order, as TorchEngine.generate.

        With tensor_parallel above 1 all ranks call it: ranks that share an engine sample for each other, in
        lock-step.
        """
        if self.asleep:
            raise RuntimeError("the engine has no weights; sync it first")  # vLLM itself would wait forever
        first = dist.rank() % self.tensor_parallel
        by_rank = [requests]
        if self.tensor_parallel > 1:
            by_rank = dist.gather(by_rank)[dist.rank() - first:][:self.tensor_parallel]
        asked, params = [], []
        for request in chain.from_iterable(by_rank):
            asked.append({"prompt_token_ids": [*request.tokens_before]})
            params.append(self.params(
                seed=request.seed,
                temperature=temperature,
                top_p=top_p,
                max_tokens=request.limit,
                stop_token_ids=sorted(self.eos_ids),
                ignore_eos=True,
                stop=self.stops,
                detokenize=bool(self.stops),
                logprobs=0,
                flat_logprobs=True
            ))
        # False, not a disabled bar: vLLM divides by the seconds that the bar was shown.
        bar = partial(tqdm, leave=False) if progress and sys.stderr.isatty() else False
        try:
            outputs = self.llm.generate(asked, params, use_tqdm=bar)
        except Exception as error:  # vLLM's errors have nothing else in common
            raise RuntimeError(f"vLLM failed while sampling: {error}") from error
        made = [output.outputs[0] for output in outputs]
        samples = [Sample(c.token_ids, c.logprobs.logprobs, c.finish_reason == "stop") for c in made]
        start = sum(map(len, by_rank[:first]))
        return samples[start:start + len(requests)]


def engine_options(spec: EngineSpec, cache: int) -> dict:
    """Return the arguments of vLLM's engine; `cache` is in bytes."""
    options = {
        "model": str(spec.folder),
        "load_format": "dummy",
        "skip_tokenizer_init": not spec.stops,
        "generation_config": "vllm",
        "dtype": str(spec.dtype).removeprefix("torch."),
        "max_model_len": spec.max_len,
        "max_num_seqs": spec.slots,
        "max_num_batched_tokens": max(PREFILL_TOKENS, spec.slots),
        "tensor_parallel_size": spec.tensor_parallel,
        "distributed_executor_backend": "external_launcher",
        "kv_cache_memory_bytes": cache,
        "logprobs_mode": "processed_logprobs",
        "hf_overrides": {"head_dtype": "float32"},  # as the trainer computes its logits
        # The size of the cache is given, so this share only decides whether vLLM finds enough free memory to
        # start beside the trainer.
        "gpu_memory_utilization": 0.01,
    }
    if spec.speculation:
        options["speculative_config"] = spec.speculation
    if spec.quantization == "fp8":  # at each sync; vLLM's own "fp8" is for weights that are stored so
        options["quantization"] = "fp8_per_tensor"
    if spec.tensor_parallel > 1:
        # vLLM's own all-reduce shares memory between processes in a way that expandable segments refuse
        # (infra/device.py, find_device): the processes would exit without a traceback.
        options["disable_custom_all_reduce"] = True
        options["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    if spec.device.type == "cuda":
        return options | {"enable_sleep_mode": spec.sleeps}
    # On the CPU a seeded sample with a prompt split over two batches would rewind its generator, which
    # cannot be rewound.
    return options | {
        "enable_chunked_prefill": False,
        "enforce_eager": True,
        "max_num_batched_tokens": options["max_num_batched_tokens"] + spec.max_len,
    }


def import_vllm(device: torch.device) -> tuple[type, type]:
    """Import vLLM's LLM and SamplingParams for this device. Raises ConfigError if vLLM is missing or of
    another version."""
    try:
        import vllm  # optional, and slow
        from vllm import LLM, SamplingParams
    except (ImportError, RuntimeError, OSError) as error:  # the last two: torchvision of another build
        raise ConfigError(f"rollout.engine=vllm, but vllm cannot be imported ({error}); "
                          "install requirements/gpu.txt, or set rollout.engine=torch") from error
    if vllm.__version__.partition("+")[0] != VLLM_VERSION:
        raise ConfigError(f"rollout.engine=vllm needs vllm {VLLM_VERSION}, the version that is tested, not "
                          f"{vllm.__version__}; install requirements/gpu.txt, or set rollout.engine=torch")
    from vllm.platforms import current_platform

    built_for = current_platform.device_type
    if built_for != device.type:
        raise ConfigError(f"rollout.engine=vllm: this vllm runs on {built_for}, and device={device.type}; "
                          "install the build for it (requirements/gpu.txt for cuda), or set "
                          "rollout.engine=torch")
    if device.type == "cpu":
        # It would compile one function for seconds, and pack Linear weights into a format that a reload does
        # not reach: a tied head would silently stay old. Plain weights are live, as they are on a GPU.
        torch._dynamo.config.disable = True
        import vllm.model_executor.layers.utils as layers

        def keep_linear(layer, remove_weight):
            layer.cpu_linear = F.linear

        layers.dispatch_cpu_unquantized_gemm = keep_linear
    return LLM, SamplingParams


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the state that vLLM changes when it starts and that a run reads: environment (torchrun's
    LOCAL_WORLD_SIZE) and threads."""
    environ = dict(os.environ)
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "RANK": str(dist.rank()), "LOCAL_RANK": "0"}
    needed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= defaults | environ | needed | dict.fromkeys(SWITCHED_OFF, "0")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)


