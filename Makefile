# `make demo` and every `make test...` first create .venv with the locked requirements and build the extension.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGING := $(VENV)/packaging
MACHINE := $(shell uname -m)
AUDITWHEEL := PATH="$(abspath $(PACKAGING)/bin):$$PATH" auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist
CSRC := $(shell find csrc -name '*.cpp' -o -name '*.h')

# A folder with wheels of pyg-lib, torch_sparse and torch_scatter. `make test` installs them, and tests then fail without them.
SALIENTPP_PEER_WHEELS ?=

.PHONY: deploy-docs demo test test-rare test-site test-quick test-random test-mutations test-faults test-slurm test-simulated test-wheel test-versions test-aarch64 \
	sdist wheel wheel-aarch64 wheel-manylinux check-wheel release-notes lint format sanitize bench score gpu-check paper docs build peers clean

demo: build
	mkdir -p build
	$(BIN)/salientpp demo --plot build/demo.png

# One process per core. Each test has its own files and ports. A test that fails runs once more, alone (tests/run.py).
test: build peers
	$(BIN)/python -m tests.run -n logical --maxprocesses 8 --dist worksteal

# Long tests, and further cases of laws that `make test` checks with fewer.
test-rare: build peers
	$(BIN)/python -m tests.run -n logical --maxprocesses 8 --dist worksteal -m "rare and not simulated"
	$(BIN)/python -m pytest -m "rare and simulated" -n logical --maxprocesses 8 --dist worksteal tests/simulated_device tests/device

# Some tests of each folder, in less than a minute. They compare the sampler and inclusion probabilities with their references. They check the
# digests of batches on 1, 2 and 4 ranks, the communication of two ranks, and the death of a rank.
QUICK := project/test_architecture.py::test_imports_follow_the_table project/test_architecture.py::test_no_files_import_each_other \
	ops/test_ops.py::test_operators_do_not_change_their_inputs graph/test_graph.py ranks/test_partition_book.py ranks/test_placement.py \
	vip/test_inclusion.py partitioning/test_refine.py::test_rows_never_rise_and_no_load_passes_its_limit \
	store/test_tiers.py store/directory/test_directory.py::test_a_split_of_ids_or_masks_replaces_the_masks_of_the_data \
	sampling/test_neighbor_sampler.py sampling/test_schedule.py batch/test_template.py::test_a_single_batch_is_made_from_positions_or_a_mask \
	engine/test_pipeline.py engine/test_same_batches.py ways/lookahead/test_planner.py::test_the_planner_keeps_the_rows_needed_next ways/sums/test_plan.py \
	loader/test_loader.py loader/test_ranks.py::test_measured_communication_is_the_sum_of_distinct_remote_uncached_vertices \
	loader/test_ranks.py::test_a_killed_rank_ends_the_others_without_the_timeout layerwise/test_inference.py::test_rows_equal_the_whole_graphs \
	fullgraph/test_layouts.py::test_a_minimum_cover_covers_and_is_as_large_as_a_maximum_matching \
	analysis/test_volume.py::test_csv_has_a_line_for_every_result launch/test_launch.py::test_a_rank_is_the_same_to_torchrun_and_to_srun \
	datasets/test_datasets.py::test_an_npz_file_is_loaded_as_stored cli/test_cli.py::test_info_describes_the_directory
test-quick: build
	$(BIN)/python -m pytest -q -n logical --maxprocesses 8 --dist worksteal $(addprefix tests/,$(QUICK))

# Random faults under load, for a quarter of an hour. `make test` runs short versions.
test-faults: build peers
	$(BIN)/python -m pytest -m faults -o faulthandler_timeout=3600

# Jobs of a real SLURM, which the tests start on this machine and stop again. Needs root and Debian's slurmctld, slurmd, slurm-client, munge and
# shellcheck. Without them the tests skip, or fail if FAIL_WITHOUT_SLURM is set.
test-slurm: build
	$(BIN)/python -m pytest -m slurm tests/slurm

# Random jobs of loaders, and random models through each conversion. `make test` runs the first hundred jobs and about as many models. A failing case is printed as a script that runs by itself.
# make test-random CASES=10000 FIRST=300 KIND=jobs
CASES ?= 1000
FIRST ?= 0
KIND ?=
test-random: build
	cd tests && ../$(BIN)/python -W ignore -m random_cases.run --cases $(CASES) --first $(FIRST) $(addprefix --kind ,$(KIND))

# Makes single changes in copies of the package, which random cases must find. Takes an hour or more. It exits with 1 if a change survives.
test-mutations: build
	cd tests && ../$(BIN)/python -m random_cases.mutations

# Tests on a simulated accelerator that executes operations late and in unfavourable orders. It cannot be removed from a process, so they run alone.
test-simulated: build peers
	$(BIN)/python -m pytest -m "simulated and not rare" -n logical --maxprocesses 8 --dist worksteal tests/simulated_device tests/device

# The wheel and the quickstart, in an empty environment away from the sources.
test-wheel: wheel
	tests/wheel.sh $(BIN)/python dist/*_$(MACHINE).whl

# The source release, in dist/. Wheels are built from it, in a folder of their own, so a file that it lacks is missed.
sdist: $(VENV)/installed
	rm -f dist/*.tar.gz
	$(BIN)/python setup.py --quiet sdist --dist-dir dist

# One wheel with several versions of torch and Python; writes the table in CONTRIBUTING.md. make test-versions VERSIONS="2.10:3.10 ..."
VERSIONS ?=
test-versions: wheel
	$(BIN)/python -m tests.versions dist/*_$(MACHINE).whl $(VERSIONS)

# A wheel in dist/ whose manylinux tag names the oldest glibc that it runs on. It does not contain libtorch; the installed torch provides it.
wheel: sdist $(PACKAGING)/installed
	rm -f build/wheel/*_$(MACHINE).whl dist/*_$(MACHINE).whl
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel dist/*.tar.gz
	$(AUDITWHEEL) build/wheel/*_$(MACHINE).whl

# The wheel for aarch64, cross-compiled; a warning is an error. Needs Debian's g++-aarch64-linux-gnu.
wheel-aarch64: sdist $(PACKAGING)/installed
	rm -f build/wheel/*_aarch64.whl dist/*_aarch64.whl
	packaging/wheel_aarch64.sh $(BIN)/python build/wheel dist/*.tar.gz
	$(AUDITWHEEL) build/wheel/*_aarch64.whl

# The wheel for aarch64 under emulation: it must give the batches of x86-64. Needs Debian, its qemu-user, and a quarter of an hour.
test-aarch64: $(VENV)/installed
	tests/aarch64.sh $(BIN)/python dist/*_aarch64.whl

# The wheel of a release, in the manylinux container of this machine's architecture. Needs docker or podman.
wheel-manylinux: $(PACKAGING)/installed
	rm -f dist/*_$(MACHINE).whl
	$(PACKAGING)/bin/cibuildwheel --output-dir dist

# Checks of the files in dist/: tags, ABIs, sizes, contents, and the description that an index shows. All must have the version VERSION, if it is given.
check-wheel: $(PACKAGING)/installed
	$(PACKAGING)/bin/python packaging/check.py dist $(VERSION)

# The section of CHANGELOG.md on VERSION, with links that lead to the tag.
release-notes:
	@$(PYTHON) packaging/release_notes.py "$(VERSION)"

$(PACKAGING)/installed: packaging/requirements.txt
	$(PYTHON) -m venv $(PACKAGING)
	$(PACKAGING)/bin/python -m pip install --quiet --requirement packaging/requirements.txt
	touch $@

# Style, types, English and workflows, with the versions of tools that requirements.txt and packaging/requirements.txt fix.
lint: $(VENV)/installed $(PACKAGING)/installed
	$(BIN)/python tests/prose.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --python-executable $(BIN)/python
	$(BIN)/clang-format --dry-run --Werror $(CSRC)
	$(PACKAGING)/bin/actionlint -shellcheck= -pyflakes=

format: $(VENV)/installed
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC)

# The C++ under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer (GCC), in build/address and build/thread.
sanitize: build
	tests/sanitizers/run.sh address
	tests/sanitizers/run.sh thread

# Kernels, loaders and training, compared with the installed peers on graphs of up to 105 M edges. Then the tables and plots.
bench: build
	for name in sampler typed gather lookup loader small start parts batch train growth; do $(BIN)/python benchmarks/bench_$$name.py || exit 1; done
	$(BIN)/python benchmarks/bench_vip.py --repeats 3
	$(BIN)/python benchmarks/bench_growth.py --long 5000
	$(BIN)/python benchmarks/draw.py

# Every installed loader on one graph, in one run: docs/results/score.md. benchmarks/score.py --help has the options.
score: build peers
	$(BIN)/python benchmarks/score.py
	$(BIN)/python benchmarks/draw.py

# For a machine with a GPU and a Python (PYTHON=...) that has torch, torch_geometric, Triton and pytest. Builds, tests and measures. It downloads nothing,
# takes at most ten minutes, and ends with a summary.
gpu-check:
	$(PYTHON) benchmarks/gpu_check.py

# The paper's tables on emulated hosts, then docs/results/paper.md and its figures. Needs root and iproute2. make paper GRAPHS="generated npz:FILE ..."
GRAPHS ?= generated
paper: build
	$(BIN)/python benchmarks/paper.py --graphs $(GRAPHS)
	$(BIN)/python benchmarks/draw_paper.py

# The documentation as a site in site/. A broken link is an error.
docs: $(VENV)/docs/installed
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build

# Publishes the documentation of VERSION on the branch gh-pages, in a folder of its own. The version `dev` shows the main branch.
deploy-docs: $(VENV)/docs/installed
	NO_MKDOCS_2_WARNING=1 packaging/deploy_docs.sh $(VENV)/docs/bin "$(VERSION)"

$(VENV)/docs/installed: docs/requirements.txt
	$(PYTHON) -m venv $(VENV)/docs
	$(VENV)/docs/bin/python -m pip install --quiet --requirement docs/requirements.txt
	touch $@

# Every page of the site, and pages of reports, in Debian's chromium, as on a desktop and on a phone. Without chromium the tests skip, or fail if FAIL_WITHOUT_BROWSER is set.
test-site: build docs
	$(BIN)/python -m pytest -m browser tests/project/test_site.py tests/report

build: $(VENV)/built

peers: $(if $(SALIENTPP_PEER_WHEELS),$(VENV)/peers)

$(VENV)/peers: $(VENV)/installed $(wildcard $(SALIENTPP_PEER_WHEELS)/*.whl)
	$(BIN)/python -m pip install --quiet --no-deps --no-index $(SALIENTPP_PEER_WHEELS)/*.whl
	touch $@

$(VENV)/installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	touch $@

$(VENV)/built: $(VENV)/installed setup.py pyproject.toml $(CSRC)
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

clean:
	rm -rf build dist *.egg-info salientpp/*.so $(VENV)/built
