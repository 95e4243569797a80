"""Run by test_vllm_arguments.py: what vLLM's CUDA build makes of our arguments, on a machine with or without a GPU.

    python tests/vllm_configuration.py OPTIONS_AS_JSON RANKS

torch and NVML are told of eight H100s. Without a driver libcuda.so.1 is a stub that finds no device. So this shows what
vLLM decides, and not what a GPU does.
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

GIB = 2**30
H100 = SimpleNamespace(total_memory=80 * GIB, multi_processor_count=132, major=9, minor=0, warp_size=32,
                       name="NVIDIA H100 80GB HBM3", is_integrated=False, shared_memory_per_block_optin=232448,
                       gcnArchName="")
# Functions of the driver that vLLM's libraries link to; 100 says that there is no device.
DRIVER = ("cuGetProcAddress_v2 cuPointerGetAttribute cuTensorMapEncodeTiled cuCtxGetCurrent cuCtxSetCurrent "
          "cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuGetErrorString cuMemAddressFree cuMemAddressReserve "
          "cuMemCreate cuMemGetAllocationGranularity cuMemMap cuMemRelease cuMemSetAccess cuMemUnmap cuInit "
          "cuDriverGetVersion cuDeviceGetCount cuGetProcAddress cuDeviceGet").split()


def stand_in_for_the_driver() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
        return
    except OSError:
        pass
    with tempfile.TemporaryDirectory() as folder:
        library, source = Path(folder) / "libcuda.so.1", "".join(f"int {name}() {{ return 100; }}\n" for name in DRIVER)
        command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=source, text=True, check=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def stand_in_for_gpus() -> None:
    answers = {"is_available": True, "device_count": 8, "_device_count_nvml": 8, "get_device_capability": (9, 0),
               "get_device_properties": H100, "get_device_name": H100.name, "current_device": 0,
               "mem_get_info": (79 * GIB, 80 * GIB)}
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *given, answer=answer: answer)
    from vllm.utils.import_utils import import_pynvml

    memory = SimpleNamespace(total=80 * GIB, free=79 * GIB, used=GIB)
    answers = {"Init": None, "Shutdown": None, "DeviceGetCount": 8, "DeviceGetHandleByIndex": "h",
               "DeviceGetName": H100.name, "DeviceGetMemoryInfo": memory, "DeviceGetCudaComputeCapability": (9, 0),
               "DeviceGetUUID": "GPU-0", "DeviceGetP2PStatus": 0, "DeviceGetNumaNodeId": 0}
    for name, answer in answers.items():
        setattr(import_pynvml(), f"nvml{name}", lambda *given, answer=answer: answer)


def main() -> None:
    options, ranks = json.loads(sys.argv[1]), sys.argv[2]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": ranks, "VLLM_LOGGING_LEVEL": "WARNING",
                   "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    stand_in_for_the_driver()
    stand_in_for_gpus()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.abstract import Executor

    made = EngineArgs(**options).create_engine_config(UsageContext.LLM_CLASS)
    compilation, model = made.compilation_config, made.model_config
    print(json.dumps({
        "platform": current_platform.device_type,
        "v2_model_runner": made.use_v2_model_runner,
        "async_scheduling": made.scheduler_config.async_scheduling,
        "max_num_batched_tokens": made.scheduler_config.max_num_batched_tokens,
        "disable_custom_all_reduce": made.parallel_config.disable_custom_all_reduce,
        "fuse_allreduce_rms": bool(compilation.pass_config.fuse_allreduce_rms),
        "sleep_mode": model.enable_sleep_mode,
        "head_dtype": str(model.head_dtype),
        "quantization": model.quantization,
        "graphs": len(compilation.cudagraph_capture_sizes or []),
        "executor": Executor.get_class(made).__name__,
    }))


if __name__ == "__main__":
    main()
