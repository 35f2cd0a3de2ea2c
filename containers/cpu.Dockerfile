# For machines without GPUs: sweeps with gloo, analysing results, trackers. From the top of a clone:
#   docker build -f containers/cpu.Dockerfile -t overlap-sweep:cpu .
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheel
COPY . /source
RUN pip wheel --no-deps --wheel-dir /dist /source

FROM python:${PYTHON}-slim
# Where PyTorch's builds without CUDA are; PyPI's have it, and take gigabytes.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=wheel /dist /dist
COPY constraints.txt /dist/
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c /dist/constraints.txt "$(echo /dist/*.whl)[torch,mlflow,wandb]"
# No NVLink multicast, as in the image for GPUs.
ENV UB_SKIPMC=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 \
    CUBLASMP_DISABLE_MULTICAST=1
# Mount a folder of yours here: sweeps are written to multirun/ in it.
WORKDIR /workspace
CMD ["overlap-sweep", "--help"]
