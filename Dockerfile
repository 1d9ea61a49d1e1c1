# The server for a GPU, or for none with `--build-arg VARIANT=cpu`: docs/serving.md, "In a container".
# Packages of Python are those of image/*.txt, by their hashes (`make lock`). Debian's and Ubuntu's are not pinned: an image
# is built for its security updates too.
ARG VARIANT=cuda
# "base" suffices: image/cuda.txt brings CUDA's libraries and nvcc. "runtime" and "devel" would bring them a second time.
ARG CUDA_BASE=nvidia/cuda:13.0.1-base-ubuntu24.04@sha256:f8ef28f579ea42a44b415d2c5d46f788e6a9b395c6c83f2929416e1fc192c143
ARG CPU_BASE=debian:bookworm-slim@sha256:abd67ffcfa541b485a3dff59865ab629aa048a6c613e639d36e7456b0b229241

FROM ${CUDA_BASE} AS cuda
# The kernel is compiled at its first use: g++ and Python's headers.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates g++ python3-dev \
 && rm -rf /var/lib/apt/lists/*

FROM ${CPU_BASE} AS cpu
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates python3 \
 && rm -rf /var/lib/apt/lists/*

FROM ${VARIANT} AS wheels
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv
WORKDIR /build
COPY image/build.txt ./
RUN python3 -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --no-compile --require-hashes --requirement build.txt
COPY pyproject.toml README.md LICENSE ./
COPY qwen_megakernel qwen_megakernel
COPY qwen_check qwen_check
COPY csrc csrc
COPY packages/spoken-text packages/spoken-text
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-index --no-build-isolation --wheel-dir /wheels \
    . packages/spoken-text

FROM ${VARIANT} AS packages
ARG VARIANT
# For the CPU: the address of PyTorch's index of CPU builds.
ARG PIP_EXTRA_INDEX_URL
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /build
COPY image/build.txt image/${VARIANT}.txt ./
# Python compiles what is imported; compiling all would add a quarter to the image.
RUN python3 -m venv /opt/venv \
 && pip install --no-cache-dir --no-compile --require-hashes --requirement build.txt \
 && pip install --no-cache-dir --no-compile --require-hashes --no-build-isolation --requirement "$VARIANT.txt"
# Our own wheels come from a stage of their own: a change of our code installs nothing else anew.
COPY --from=wheels /wheels ./wheels
RUN pip install --no-cache-dir --no-compile --no-deps --no-index ./wheels/*.whl \
 && pip check \
 && pip uninstall --yes pip
# The image for the CPU stays below 1 GB without torch's headers and programs and the packages' tests.
RUN test "$VARIANT" != cpu || find /opt/venv/lib -depth \
    \( -path "*/torch/include/*" -o -path "*/torch/test/*" -o -path "*/torch/bin/*" -o -path "*/tests/*" \) \
    ! -name torch_shm_manager -delete

FROM ${VARIANT}
LABEL org.opencontainers.image.title="qwen-megakernel" \
      org.opencontainers.image.description="Text to speech with Qwen3-TTS: a server with OpenAI's speech API" \
      org.opencontainers.image.licenses="BSD-2-Clause"
RUN groupadd --gid 10001 tts && useradd --create-home --uid 10001 --gid 10001 tts
COPY --from=packages /opt/venv /opt/venv
# Models and the compiled kernel are kept in the cache; everything else may be read-only, with /tmp in memory.
ENV PATH=/opt/venv/bin:$PATH XDG_CACHE_HOME=/home/tts/cache QWEN_MEGAKERNEL_HOST=0.0.0.0
USER 10001:10001
WORKDIR /home/tts
RUN mkdir cache voices
VOLUME /home/tts/cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=10m \
  CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
# QWEN_MEGAKERNEL_TOKEN or _KEYS_FILE must be set: it listens to everybody.
ENTRYPOINT ["qwen-megakernel", "serve"]
CMD ["--model", "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice"]
