# make demo: the whole story, from nothing to destroyed. make test: all tests. make help: every target.
SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
CACHE := .cache
PYTHON ?= python3.11
STACK ?= local
SECONDS ?= 600

.PHONY: soak help setup venv pulumi lxd image data stack browser gcs demo test lint unit e2e bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: venv pulumi lxd image data stack ## everything that a new machine needs; quick when it is there
	@echo "setup: done. Next: source $(BIN)/activate && pulumi up"

venv: $(VENV)/.done ## Python environment with the versions of constraints.txt

$(VENV)/.done: pyproject.toml constraints.txt setup/constraints-dev.txt setup/requirements-dev.txt trainer/requirements.txt serving/requirements.txt tuner/requirements.txt
	@if ! $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null; then
	  command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] || { echo "venv: install Python 3.11 with its venv module first" >&2; exit 2; }
	  echo "venv: installing Debian's python3-venv"
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3.11 python3.11-venv >/dev/null
	fi
	echo "venv: installing the packages of constraints.txt into $(VENV) (a minute or three, once)"
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	pins="--constraint constraints.txt --constraint setup/constraints-dev.txt"
	$(BIN)/python setup/progress.py venv --log $(CACHE)/venv.log --match '^(?:Collecting|Requirement already satisfied:) (\S+)' \
	  --total "$$(cat constraints.txt setup/constraints-dev.txt | grep -c ==)" -- \
	  $(BIN)/pip install --progress-bar off --disable-pip-version-check $$pins --editable '.[dev]'
	ln -sf ../../setup/pulumi.sh $(BIN)/pulumi
	touch $@

pulumi: venv ## the Pulumi CLI: yours if it is on PATH, else built here
	@setup/pulumi-cli.sh

lxd: venv ## LXD or Incus: yours if it answers, else Debian's, with a storage pool and the limits that 31 hosts need
	@setup/lxd.sh up

image: lxd ## the hosts' image and their Python with TensorFlow, by Ansible
	@if $(BIN)/python -m infra.lxd.image | sed 's/^/image: /'; then exit 0; fi
	echo "image: Ansible is making it (about 2 minutes, once)"
	cd ansible
	export PATH="$(CURDIR)/$(BIN):$$PATH" ANSIBLE_CONFIG=ansible.cfg
	playbook="ansible-playbook image.yml -e cache=$(CURDIR)/$(CACHE)/image"
	$(CURDIR)/$(BIN)/python ../setup/progress.py image --log ../$(CACHE)/image/ansible.log --match 'TASK \[(.*)\]' \
	  --total "$$($$playbook --list-tasks 2>/dev/null | grep -c '^      .*TAGS:')" -- $$playbook
	cd ..
	$(BIN)/python -m infra.lxd.image import $(CACHE)/image | sed 's/^/image: /'

data: venv ## MNIST as TFRecords in .cache/mnist, checked by hash
	@$(BIN)/python -m trainer.records --dest $(CACHE)/mnist

stack: venv pulumi ## Pulumi's stack $(STACK), with a passphrase of its own
	@mkdir -p .pulumi-state
	[ -s .pulumi-state/passphrase ] || (umask 077; head -c 24 /dev/urandom | base64 >.pulumi-state/passphrase)
	if [ -f Pulumi.$(STACK).yaml ] && ls .pulumi-state/.pulumi/stacks/scaletier/$(STACK).json* >/dev/null 2>&1; then
	  $(BIN)/pulumi stack --show-name >/dev/null 2>&1 || $(BIN)/pulumi stack select $(STACK)  # the selection is this user's, by path
	  echo "stack: $(STACK) is there"
	else
	  $(BIN)/pulumi stack select --create $(STACK) >/dev/null
	  echo "stack: made $(STACK)"
	fi

browser: ## Chromium and its driver for the tests of TensorBoard: yours if they are on PATH, else Debian's
	@if command -v chromedriver && { command -v chromium || command -v google-chrome || command -v chrome; }; then exit 0; fi >/dev/null
	command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] || { echo "browser: install Chromium or Chrome, with chromedriver, first" >&2; exit 2; }
	echo "browser: installing Debian's chromium"
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null

gcs: venv ## a double of Google's storage for the tests
	@setup/fake-gcs.sh

demo: setup ## STANDARD_1 up, train MNIST, show its logs, destroy
	@setup/demo.sh

lint: venv ## ruff and mypy --strict
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy

unit: venv ## tests with no network, in seconds, and stack tests under Pulumi's mocks
	@$(BIN)/pytest tests/unit tests/stack

e2e: setup browser ## tests on real hosts
	@$(BIN)/pytest tests/e2e

# Tests on hosts wait for hosts most of the time: all others run beside them, and are shown after them.
test: setup browser gcs lint ## everything: ruff, mypy, unit, contract, simulation, stack and e2e tests
	@log=$(CACHE)/test.log
	(trap 'kill $$! 2>/dev/null; exit 1' TERM
	 code=0
	 for parts in tests/contract "tests/simulation tests/stack tests/unit"; do $(BIN)/pytest $$parts & wait $$! || code=$$?; done
	 exit $$code) >$$log 2>&1 & others=$$!
	trap 'kill $$others 2>/dev/null || true' EXIT
	code=0
	$(BIN)/pytest tests/e2e || code=$$?
	wait $$others || code=$$?
	cat $$log
	exit $$code

soak: venv ## schedules of the simulated world, as many as SECONDS (600) allow
	@$(BIN)/python tests/simulation/soak.py --seconds $(SECONDS) --first $$(date +%s)

bench: setup ## figures against peers, in one run; ONLY=name for one
	@$(BIN)/python -m benchmarks $(ONLY)

clean: ## undo what set-up made, and only that; hosts must be destroyed first
	@setup/clean.sh
