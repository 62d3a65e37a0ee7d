# Each target does its own set-up and may be repeated. JOBS=n limits the build.
JOBS ?= $(shell nproc)
# Asked again in each recipe, since the set-up may have installed it. Without NVRTC the GPU rooms are left out.
NVRTC = $(shell scripts/nvrtc.sh)
PRESET = $(if $(NVRTC),ci,cpu)
BUILD = $(if $(NVRTC),build,build-cpu)
# Without the Python packages of .venv the Python package is left out.
PYTHON = $(shell scripts/python.sh)
PYTHON_FLAGS = $(if $(PYTHON),-DTWOSTEP_PYTHON=ON -DPython_EXECUTABLE=$(PYTHON),-DTWOSTEP_PYTHON=OFF)
SOURCES = $(shell find include src kernels cli tests bench examples python -name '*.h' -o -name '*.cpp' -o -name '*.cuh')

.PHONY: build setup configure test vllm-setup test-vllm demo device python-device bench-cpu format format-check clean

build: configure
	cmake --build --preset $(PRESET) --parallel $(JOBS)

setup:
	@scripts/setup.sh

configure: setup
	cmake --preset $(PRESET) $(PYTHON_FLAGS)

test: build
	TWOSTEP_NVRTC=$(NVRTC) ctest --preset $(PRESET) --parallel $(JOBS)

# Opt-in, for the package is large: the tested vLLM, without a GPU. 4 GB to download, 8 GB in .venv-vllm.
vllm-setup:
	@scripts/setup_vllm.sh

test-vllm: configure vllm-setup
	cmake --build --preset $(PRESET) --parallel $(JOBS) --target _twostep _twostep_package
	PYTHONPATH=$(CURDIR)/$(BUILD)/python .venv-vllm/bin/python -m pytest -q -rA --show-capture=no -p no:cacheprovider tests/vllm

demo: configure
	cmake --build --preset $(PRESET) --parallel $(JOBS) --target twostep_cli --target example_kda_layer
	$(BUILD)/bin/twostep synth --preset tiny --out demo/tiny
	TWOSTEP_NVRTC=$(NVRTC) $(BUILD)/bin/twostep draft --checkpoint demo/tiny --requests 2 --draft-tokens 3 --device cpu
	$(BUILD)/bin/example_kda_layer

# What a bare GPU machine needs, in one small folder: build-device/stage/bin.
device: setup
	cmake --preset device
	cmake --build --preset device --parallel $(JOBS)
	install -D --strip -t build-device/stage/bin build-device/bin/twostep build-device/bin/twostep_gpu_tests build-device/bin/twostep_multi_tests
	scripts/check_needed.sh --static build-device/stage/bin/*

# The package's source with all that it builds with, for a machine where nothing can be downloaded; docs/python.md
# says how it is installed there.
python-device: setup
	scripts/python_device.sh build-device/python

bench-cpu: configure
	cmake --build --preset $(PRESET) --parallel $(JOBS) --target twostep_bench_cpu
	$(BUILD)/bench/twostep_bench_cpu

format: setup
	@clang-format-14 -i $(SOURCES)

format-check: setup
	@clang-format-14 --dry-run --Werror $(SOURCES)

clean:
	rm -rf build build-cpu build-cuda build-device build-sanitize build-fuzz build-wheel demo
