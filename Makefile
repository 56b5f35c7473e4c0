# Tasks of holdfast; `make` alone lists them.

PREFIX ?= /usr/local
DESTDIR ?=
CARGO ?= cargo
# Tools and runtimes that tests need and no package manager keeps for us; may be deleted at any time.
HOLDFAST_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/holdfast
export HOLDFAST_CACHE

# CARGO_TARGET_DIR and cargo's own configuration are respected.
target = $(shell $(CARGO) metadata --format-version 1 --no-deps --offline 2>/dev/null | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')

.DEFAULT_GOAL := help
.PHONY: help gate build check words fmt clippy doc deny docs quick test sim fuzz vmtest envtest bench mutants weakened figures demo demo-stop install uninstall deb clean

help: ## List the tasks
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## Build the release binary
	@hack/deps.sh build
	$(CARGO) build --release --locked
	@echo "built $(target)/release/holdfast"

gate: ## All that a change has to pass (root); FAST=1 leaves out what takes long, FRESH=1 takes a clone of HEAD
	@FAST=$(FAST) FRESH=$(FRESH) hack/gate.sh

check: words fmt clippy doc deny ## Words, formatting, lints, documentation, dependencies

words:
	@hack/words.sh

fmt:
	$(CARGO) fmt --all -- --check

clippy:
	@hack/deps.sh build
	$(CARGO) clippy --workspace --all-targets --all-features --locked -- -D warnings

doc:
	@hack/deps.sh build
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --document-private-items --locked

deny:
	@hack/deny.sh

docs: ## Build the documentation site in target/book/html, and check its links
	@hack/docs.sh

quick: ## Every pure and simulated test: before each commit
	@hack/quick.sh

test: ## All tests, on real containerd and kube-apiserver; installs what they need (root)
	@hack/test.sh

sim: ## Schedules of the simulated node: how long everything takes, what fails, where the agent dies (SEEDS=…, or MINUTES=3)
	@hack/sim.sh "$(SEEDS)" "$(MINUTES)" "$(FROM)"

fuzz: ## Inputs made up by coverage for every parser (MINUTES=1 for each, or EXECUTIONS=…; NAME=… runs those alone)
	@hack/fuzz.sh "$(MINUTES)" "$(EXECUTIONS)" $(NAME)

vmtest: ## Whole machines under QEMU that reboot and lose power (root; NAME=… runs those with it in their name, KEEP=1 leaves one up with a shell)
	@hack/vmtest.sh $(NAME)

envtest: ## Provide etcd, kube-apiserver and kubectl for the tests (KUBEBUILDER_ASSETS, else built once)
	@hack/envtest.sh

bench: ## Benchmarks, as ratios to bare disk and peers
	@hack/deps.sh build
	$(CARGO) bench --locked --bench '*'

mutants: ## Which changes of the decisions in src/core the tests notice, every sixteenth (SHARD=k/n; 0/1: all, many hours)
	@hack/mutants.sh $(SHARD)

weakened: ## Promises of the store taken out of the code one at a time: which test notices (some minutes)
	@hack/weakened.sh

figures: ## What 100 pods of an API server cost, and what a hostile tenant costs others, with the release binary; draws docs/pictures (root; HOLDFAST_FIGURES=10,50,200, HOLDFAST_FAIRNESS=probes,log)
	@hack/figures.sh

demo: ## Run pods, kill -9 the agent, show what the restart cost (root; KEEP=1 leaves it running)
	@hack/demo.sh

demo-stop: ## End a demo that KEEP=1 or a kill left running
	@hack/demo.sh stop

install: build ## Install binary, completions, manual pages, documents, systemd unit (PREFIX, DESTDIR)
	@hack/install.sh "$(target)/release/holdfast" "$(DESTDIR)" "$(PREFIX)"

uninstall: ## Remove what `make install` installed (PREFIX, DESTDIR)
	@hack/install.sh uninstall "$(DESTDIR)" "$(PREFIX)"

deb: build ## Make the Debian package, in target/debian
	@hack/deb.sh "$(target)/release/holdfast"

clean: ## Remove what was built here (not the cache)
	$(CARGO) clean
