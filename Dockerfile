# UNTESTED: this file has never been built, and nothing of this project has ever run on a GPU.
#
#     docker build --tag megatron_cp .
#     docker run --rm --gpus all --ipc=host megatron_cp                  # doctor: what this machine can run
#     docker build --tag megatron_cp:dev --build-arg EXTRAS=dev .        # with what the tests need
#     docker run --rm --gpus all --ipc=host megatron_cp:dev bash tools/gpu_check.sh --only smoke
#
# The image has Python 3.12 and torch with CUDA, and nvcc, since kernels of other packages may have to be compiled.
FROM pytorch/pytorch:2.11.0-cuda12.8-cudnn9-devel

# The combination of extras that the tests have.
ARG EXTRAS=megatron,fla,transformers
WORKDIR /workspace/megatron_cp
COPY . .
# The constraint keeps the torch of the image. Its Python belongs to the system, into which pip has to be told to install.
RUN echo "torch==2.11.0" > /tmp/constraints.txt \
    && python -m pip install --break-system-packages --no-cache-dir --constraint /tmp/constraints.txt ".[${EXTRAS}]" \
    && megatron-cp check --cp 3 --lengths 7,1,130,64,2 --dtype float64
CMD ["megatron-cp", "doctor"]
