# An image for GPU boxes: docker build -t p2pserve .
#
# Neither built nor run on a GPU yet. The box that runs it needs a driver for CUDA 13.0 (580 or newer); building needs
# no GPU. Compiler and Python.h stay in it: Triton compiles while an engine starts.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        build-essential ca-certificates git make python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/p2pserve
COPY . .
RUN make setup DEVICE=cuda DRIVER=later PYTHON=python3.12

ENV PATH=/opt/p2pserve/.venv/bin:$PATH
# The one port, and the token, model and prices come as variables of the instance: docs/renting.md.
EXPOSE 4001
ENTRYPOINT ["p2pserve"]
CMD ["--help"]
