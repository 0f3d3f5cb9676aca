# What to run, and where things go. 'make' alone says what there is.

# Where cargo builds.
TARGET := $(or $(CARGO_TARGET_DIR),target)
# Where 'make install' puts the program; DESTDIR as usual for packagers.
PREFIX := /usr/local
# 'make run ARGS="--duration 30s"' passes these on to 'homenode run'.
ARGS :=
# 'make testbed CASE=name' runs one case or group, without it all; 'make xen CASE=name' one of a Xen host.
CASE :=

# 'make fuzz TARGETS=units' fuzzes these, without it all; SECONDS is for each.
TARGETS :=
SECONDS := 60

# 'make deb-check SUITE=trixie' takes a fresh Debian 13, without it 12.
SUITE := bookworm

# 'make soak RUNS="32x1d 100x1h"' runs these, without it 32 VMs for a week and 1000 for an hour.
RUNS :=

# Every recipe gets its toolchain from here: installed if it is missing, never silently.
SETUP := scripts/setup.sh

.DEFAULT_GOAL := help
.PHONY: help build release run test ci all wheel reproduction testbed xen xen-all http integrations page sweeps site fuzz soak bench deb deb-check deb-boot dist tarball install

help: ## Show this
	@echo 'make TARGET, where TARGET is one of'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 14 | sed 's/^/  /'

build: ## Build the homenode program and the emulator's plugin, as the tests use them (4 minutes on two idle cores)
	@echo '== building homenode and the plugin of homenode profile (a first build takes some 4 minutes on two idle cores)'
	@$(SETUP) cargo build --package homenode-cli --package homenode-qemu-plugin
	@$(SETUP) scripts/guest-load.sh debug

release: ## Build them with all optimisations, a fifth faster (10 minutes on two idle cores)
	@echo '== building homenode and the plugin of homenode profile (release)'
	@$(SETUP) cargo build --release --package homenode-cli --package homenode-qemu-plugin
	@$(SETUP) scripts/guest-load.sh release
	@scripts/strip.sh $(TARGET)/release/homenode

run: build ## Build, then run the agent on its built-in simulated host, with its page; ends by itself or on Ctrl-C
	@echo '== running the agent on the twin of two EPYC 7763 with a stock kernel; Ctrl-C ends it with a summary'
	@$(TARGET)/debug/homenode run --host twin:epyc-services --web $(ARGS)

test: ## Run all checks and tests of the code itself (README says how long)
	@echo '== running all checks and tests'
	@$(SETUP) cargo xtask check

ci: ## Run what CI runs: test and all suites below up to reproduction; of the last three what changed since it passed
	@$(SETUP) cargo xtask ci

all: ## The same with every case of testbed, Xen and reproduction
	@$(SETUP) cargo xtask ci --all

http: ## Have Prometheus and schemathesis ask an agent on the twin, and Perfetto read traces
	@$(SETUP) cargo xtask http

integrations: ## Have Nova, Kubernetes' extender client and a cluster of Incus ask agents on twins (as root)
	@$(SETUP) cargo xtask integrations

page: ## Open the page of an agent on the twin in Chromium and use it as an operator does
	@$(SETUP) cargo xtask page

sweeps: ## Have a Slurm of its own on this machine make a sweep, and compare the bytes
	@$(SETUP) cargo xtask sweeps

site: ## Run the notebooks, build the documentation as a site into TARGET/site, and run its tutorial
	@$(SETUP) cargo xtask site

testbed: ## Run the testbed: real guests on an emulated 4-node host; CASE=name for one case or group
	@$(SETUP) cargo xtask testbed $(CASE)

xen: ## Run the testbed's cases on an emulated 4-node Xen host (as root); CASE=name for a case or group
	@$(SETUP) cargo xtask $(if $(CASE),testbed $(CASE),xen)

xen-all: ## The same with those that take minutes: moves, credit1, waiting, permits, the service
	@$(SETUP) cargo xtask xen
	@$(SETUP) cargo xtask testbed xen-long xen-service xen-counted

reproduction: ## Make docs/REPRODUCTION.md again and compare it
	@$(SETUP) cargo xtask reproduction

wheel: ## Build the Python package into TARGET/wheels, install it in an environment of its own and test it
	@$(SETUP) cargo xtask wheel

fuzz: ## Fuzz all that reads what others wrote (a minute for each of 23 targets); TARGETS=names, SECONDS=n
	@echo '== fuzzing for $(SECONDS) seconds each: $(or $(TARGETS),all targets)'
	@$(SETUP) cargo xtask fuzz --seconds $(SECONDS) $(TARGETS)

soak: ## Run the agent on the twin for a week with 32 VMs and an hour with 1000 (40 minutes); RUNS=32x1d for others
	@echo '== deciding for days of simulated time: $(or $(RUNS),32x7d 1000x1h)'
	@$(SETUP) cargo run --release --package homenode-control --example soak -- $(RUNS)

bench: ## Run the benchmarks
	@echo '== running the benchmarks'
	@$(SETUP) cargo bench --workspace --bench '*'

deb: ## Build Debian packages from the committed sources into TARGET/deb (8 minutes on 2 cores): agent, numad drop-in, guest's side
	@echo '== building packages into $(TARGET)/deb'
	@$(SETUP) scripts/deb.sh

deb-check: deb tarball ## Install, upgrade, downgrade, remove and purge them on a fresh Debian (3 minutes, as root); SUITE=trixie for Debian 13
	@echo '== trying the packages on a fresh Debian ($(SUITE))'
	@scripts/deb-check.sh $(SUITE)

deb-boot: deb ## Boot a Debian 12 with systemd, libvirt and guests, and start, kill, upgrade and purge them there (20 minutes, as root)
	@echo '== trying the packages under systemd, while guests run'
	@scripts/deb-boot.sh

dist: ## Build what packages ship: smaller than 'release' makes it, which takes twice as long
	@echo '== building homenode and the plugin of homenode profile as packages have them'
	@$(SETUP) cargo build --profile dist --package homenode-cli --package homenode-qemu-plugin
	@$(SETUP) scripts/guest-load.sh dist
	@scripts/strip.sh $(TARGET)/dist/homenode

tarball: dist ## Pack the program, its manual, completions and service for other distributions into TARGET
	@scripts/tarball.sh $(TARGET)

install: release ## Install homenode to PREFIX/bin (default /usr/local), with sudo if that needs it
	@bin='$(DESTDIR)$(PREFIX)/bin'; lib='$(DESTDIR)$(PREFIX)/lib/homenode'; sudo=; \
	nearest="$$bin"; while [ ! -e "$$nearest" ]; do nearest=$$(dirname "$$nearest"); done; \
	if [ ! -w "$$nearest" ]; then sudo=sudo; fi; \
	echo "== installing homenode to $$bin, its plugin for QEMU to $$lib"; \
	$$sudo install -D -m 755 $(TARGET)/release/homenode "$$bin/homenode" && \
	$$sudo install -D -m 644 $(TARGET)/release/libhomenode_plugin.so "$$lib/libhomenode_plugin.so" && \
	if [ -f $(TARGET)/release/homenode-guest-load-static ]; then $$sudo install -D -m 755 $(TARGET)/release/homenode-guest-load-static "$$lib/guest-load"; fi && \
	echo "Not installed: the numad drop-in. Link $(PREFIX)/bin/homenode as 'numad' where libvirt looks for it to use it."
