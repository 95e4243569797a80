# Winnow in a container, as a user without rights over it:
#   docker build --tag winnow .                        # for a GPU (driver 580 or newer), with vLLM
#   docker build --tag winnow:cpu --target cpu .       # for a CPU
#   docker run --gpus all --ipc host -v "$PWD/runs:/home/winnow/winnow/runs" -v "$HOME/.cache/huggingface:/home/winnow/.cache/huggingface" \
#     -e HF_TOKEN -e WANDB_API_KEY winnow torchrun --nproc_per_node 8 train.py --config cppo_gsm8k.yaml
# Both folders must be there, and writable for user 1000; the second keeps what is downloaded. --ipc host: NCCL between
# GPUs wants shared memory.

FROM python:3.11-slim-bookworm AS cpu
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends git make && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 winnow
USER 1000
WORKDIR /home/winnow/winnow
COPY --chown=winnow Makefile requirements.txt ./
COPY --chown=winnow requirements requirements
RUN make .venv/run PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1
COPY --chown=winnow . .
ENV PATH=/home/winnow/winnow/.venv/bin:$PATH
CMD ["python", "train.py", "--config", "cppo_toy.yaml"]

# Triton, for vLLM, needs a C compiler and Python's headers while it runs.
# torch's wheels bring CUDA's libraries.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS gpu
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc git libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* && userdel --remove ubuntu && useradd --create-home --uid 1000 winnow
USER 1000
WORKDIR /home/winnow/winnow
COPY --chown=winnow requirements.txt ./
COPY --chown=winnow requirements requirements
RUN python3 -m venv .venv && .venv/bin/pip install --no-cache-dir pip==26.3 \
    && .venv/bin/pip install --no-cache-dir -c requirements/constraints-hashed.txt -r requirements/gpu.txt
COPY --chown=winnow . .
ENV PATH=/home/winnow/winnow/.venv/bin:$PATH
CMD ["python", "train.py", "--config", "cppo_gsm8k.yaml", "--check"]
