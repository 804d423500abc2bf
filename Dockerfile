# The project with its pinned versions, for NVIDIA GPUs: docs/gpus.md, "In a container".
#
# Torch's wheels bring CUDA's libraries, and the host has the driver, so this base serves all of torch's builds. The
# compiler is for DeepSpeed's extension and for Triton.
FROM python:3.12-slim-trixie

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# Which torch, and where pip looks besides PyPI. By default PyPI's build of the pinned one.
ARG TORCH=
ARG TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
COPY constraints.txt /opt/constraints.txt
RUN if [ -n "$TORCH" ]; then sed -i "s/^torch==.*/torch==$TORCH/" /opt/constraints.txt; fi \
    && pip install -c /opt/constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
WORKDIR /opt/four-engine-rlhf
COPY . .
RUN pip install -c /opt/constraints.txt -e .

ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /data
CMD ["four-engine-rlhf"]
