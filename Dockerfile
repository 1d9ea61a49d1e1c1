# The server, from a wheel: `make wheel` first. CUDA's compiler is needed, because the kernel is compiled at first use.
# Versions are not pinned: an image is built for its security updates too.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ libsndfile1 ninja-build python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 tts
USER 10001
WORKDIR /home/tts
ENV VIRTUAL_ENV=/home/tts/venv PATH=/home/tts/venv/bin:$PATH \
    HF_HOME=/home/tts/cache/huggingface TORCH_EXTENSIONS_DIR=/home/tts/cache/extensions
RUN python3 -m venv "$VIRTUAL_ENV" && mkdir --parents cache voices

COPY --chown=tts dist/*.whl ./
# hadolint ignore=DL3013
RUN set -- ./*.whl && pip install --no-cache-dir "$1[serve,wyoming]" && rm ./*.whl

# Models and the compiled kernel outlive the container.
VOLUME /home/tts/cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=10m \
  CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
# QWEN_MEGAKERNEL_TOKEN must be set: it listens to everybody.
ENTRYPOINT ["qwen-megakernel", "serve", "--host", "0.0.0.0"]
CMD ["--model", "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice"]
