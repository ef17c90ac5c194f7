# make demo: the whole story, from nothing to destroyed. make test: what a change must pass. make help: every target.
# Each recipe is one command, as GNU make 3.81 has it, which comes with macOS.
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
STACK ?= local
SECONDS ?= 600
COUNT ?= 100
SEED ?= 1
export PYTHON STACK
# They may name another checkout or Python, make errors of warnings, or leave out tests.
unexport CDPATH MYPYPATH PYTHONHOME PYTHONOPTIMIZE PYTHONPATH PYTHONSAFEPATH PYTHONWARNINGS
unexport PYTEST_ADDOPTS PYTEST_DISABLE_PLUGIN_AUTOLOAD PYTEST_PLUGINS
# Parts of set-up that need nothing of one another are made side by side.
TOGETHER = setup/together.sh $(MAKE) -j8
LOCAL := venv pulumi lxd image data stack

.PHONY: help setup cloud venv tensorflow dev pulumi system lxd rootfs runtime image data stack browser gcs demo test test-load test-all lint unit mutants soak fuzz audit versions bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: ## everything that a new machine needs; quick when it is there
	@setup/needs.sh
	@$(TOGETHER) $(LOCAL)
	@echo "setup: done. Next: source $(BIN)/activate && pulumi up"

cloud: STACK = cloud
cloud: ## what hosts on Google Cloud need of this machine: no LXD, no image, no root
	@$(TOGETHER) venv pulumi data stack

venv: ## Python environment with what pulumi up and fab need; PYTHON=python3.12 for another Python
	@setup/venv.sh

tensorflow: venv ## TensorFlow in .venv, to train on this machine
	@setup/venv.sh train

dev: venv ## what the tests need in .venv
	@setup/venv.sh dev

pulumi: ## the Pulumi CLI: yours if it is new enough, else Pulumi's download, else built here
	@setup/pulumi-cli.sh

system: ## what root alone can do for local hosts
	@setup/lxd.sh system

lxd: venv system ## LXD or Incus: yours if it answers, else Debian's, with a storage pool and the limits that 31 hosts need
	@setup/lxd.sh up

rootfs: lxd ## the hosts' image, by Ansible
	@setup/image.sh

runtime: venv ## the hosts' Python with TensorFlow, which local hosts mount
	@setup/runtime.sh

image: rootfs runtime ## the hosts' image and Python
	@:

data: venv ## MNIST as TFRecords in .cache/mnist, checked by hash
	@setup/data.sh

stack: venv pulumi ## the Pulumi stack STACK (local), with its own passphrase; with PULUMI_BACKEND_URL the team's of that name
	@setup/stack.sh

browser: ## Chromium and its driver for the tests of pages: yours if they are on PATH, else Debian's
	@setup/browser.sh

gcs: ## the emulator of Google's storage for the tests
	@setup/fake-gcs.sh

demo: STACK = demo
demo: ## STANDARD_1 up, train MNIST, show its logs, fetch its output, destroy, in a stack of its own
	@setup/demo.sh

lint: dev ## ruff, mypy --strict, and a check that the names that tests use exist
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/python tests/names.py

unit mutants: PULUMI_BACKEND_URL =
unit: dev stack ## tests with no network, in seconds, and stack tests under Pulumi's mocks; PYTEST="-k cancel" or PYTEST=FILES for some
	@$(BIN)/pytest -n auto --dist worksteal -m "not full" $(if $(filter tests/%,$(firstword $(PYTEST))),,tests/unit tests/stack) $(PYTEST)

test: ## what a change must pass: lint, tests without hosts, and one story on real hosts
	@SET_UP="$(TOGETHER) $(LOCAL) dev" setup/test.sh test

test-load: ## make test beside two busy loops a core
	@SET_UP="$(TOGETHER) $(LOCAL) dev" setup/test.sh test --load 2

test-all: ## every test, by shards (tests/shards.py); SHARD=serving for one
	@SET_UP="$(TOGETHER) $(LOCAL) dev" setup/test.sh all $(addprefix --shard ,$(SHARD))

mutants: dev stack ## how many of COUNT (100) changed lines, drawn by SEED (1), make test detects
	@$(BIN)/python tests/mutants.py --count $(COUNT) --seed $(SEED)

soak: dev ## schedules of the simulated world, as many as SECONDS (600) allow
	@$(BIN)/python tests/simulation/soak.py --seconds $(SECONDS) --first $$(date +%s)

fuzz: dev ## malformed inputs for every parser of foreign data, for SECONDS (600)
	@$(BIN)/python tests/fuzz/fuzz.py --seconds $(SECONDS)

audit: venv ## known vulnerabilities of the pinned versions, by pip-audit; it needs PyPI itself
	@setup/audit.sh

versions: dev ## the library's tests with each supported TensorFlow
	@setup/versions.sh

bench: PULUMI_BACKEND_URL =
bench: setup dev ## figures against peers, in one run; ONLY=name for one
	@PYTHONPATH=tests $(BIN)/python -m benchmarks $(ONLY)

clean: ## undo what set-up made, and only that; hosts must be destroyed first
	@setup/clean.sh
