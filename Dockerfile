# palm_ds with all it needs, from the same pins as `make`: pretraining, fine-tuning, serving, ONNX.
#
#   docker build -t palm_ds .                                                                   # CPU and GPU
#   docker build -t palm_ds --build-arg TORCH_INDEX=URL .                                       # CPU only, smaller
#   docker build -t palm_ds --build-arg BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04 .             # with nvcc
#
# torch from the package index carries its own CUDA libraries, so the plain image runs on GPUs, too; the
# one with nvcc also compiles DeepSpeed's operators. TORCH_INDEX is the index of PyTorch's builds for CPUs.
# Training needs shared memory: docker run --gpus all --shm-size 16g ... (launch/k8s/pretrain.yaml).
ARG BASE=ubuntu:24.04
FROM ${BASE}

ARG TORCH_INDEX=
ENV PATH=/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    DEBIAN_FRONTEND=noninteractive

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# gcc and Python's headers are for Triton, which compiles its launchers when training starts
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc libc6-dev libaio-dev && \
    rm -rf /var/lib/apt/lists/*

WORKDIR /palm_ds
COPY constraints.txt pyproject.toml setup.py README.md LICENSE ./
RUN python3 -m venv /venv && \
    pip install -c constraints.txt setuptools wheel && \
    if [ -n "$TORCH_INDEX" ]; then pip install -c constraints.txt --no-deps --index-url "$TORCH_INDEX" torch; fi && \
    pip install -c constraints.txt torch

COPY palm_ds palm_ds
COPY launch launch
COPY ds_configs ds_configs
COPY tools tools
RUN DS_BUILD_OPS=0 pip install -c constraints.txt --no-build-isolation -e '.[dedup,lora,onnx,serve]' && \
    palm-ds --help > /dev/null

CMD ["palm-ds", "--help"]
