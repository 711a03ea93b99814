# Terrace. `make` alone lists the targets. Each target first installs its dependencies (scripts/setup.sh).

PREFIX ?= /usr/local
DESTDIR ?=
PYTHON ?= python3
SEEDS ?= 100000
ROUNDS ?= 200
STRESS_SECONDS ?= 600
FUZZ_RUNS ?= 10000000
MINUTES ?= 1
# Cases of `make conformance` that run at a time.
CASES ?= 2
ONLY ?=
SEED ?=
SIGN ?=

# A shell that was open while rustup was installed does not have cargo in its PATH yet.
export PATH := $(HOME)/.cargo/bin:$(PATH)

TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
HEADERS := crates/ibverbs/include
CFLAGS ?= -O2 -Wall -Wextra -Werror

# scripts/setup.sh installs pytest there. `$(call pytest,NAME) FILES` runs a suite and writes results/junit/NAME.xml; ONLY is an expression of
# its option -k: words that the tests' names contain, with `and`, `or`, `not`.
PYTEST ?= build/tools/bin/pytest
pytest = $(PYTEST) --junit-xml=results/junit/$(1).xml $(if $(ONLY),-k '$(ONLY)')

# Most tests wait for something most of the time: more of them run at once than there are processors.
JOBS := $(shell echo $$(($$(nproc) * 3 / 2)))

# `$(call nextest,NAME) OPTIONS` runs tests of cargo by a profile of .config/nextest.toml, which writes results/junit/NAME.xml.
NEXTEST ?= build/tools/bin/cargo-nextest
nextest = $(NEXTEST) nextest run --locked --profile $(1)

.PHONY: help setup build profile install uninstall packages packages-test negative-programs interop-programs demo test conformance conformance-programs interop interop-swap errors chaos fork crash stress endurance sanitize soak soak-np soak-term fuzz bench bench-many bench-where bench-peers bench-peers-full peers-programs bench-np np-programs bench-filemr bench-pager bench-mount mount-tests mount-tests-short bench-term bench-term-full docs lint clean
.DEFAULT_GOAL := help
# Targets share output directories, and cargo uses all processors by itself.
.NOTPARALLEL:

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Install the dependencies of all targets
	@scripts/setup.sh all

build: ## Build build/bin/terrace and build/lib/terrace/
	@scripts/setup.sh build
	scripts/release.sh --package terrace-ibverbs --package terrace-cli --package terrace-pager-preload
	crates/ibverbs/link.sh build/lib/terrace
	install -D $(TARGET_DIR)/release/libterrace_pager_preload.so build/lib/terrace/libterrace-pager.so
	install -D $(TARGET_DIR)/release/terrace build/bin/terrace

profile: ## PGO build, eight minutes: runs an instrumented build; later release builds in this directory use its profile
	@scripts/setup.sh profile
	$(PYTHON) scripts/profile.py

# `sudo make install` must not build: root has no cargo, and its files in target/ would be in the user's way.
install: $(if $(wildcard build/bin/terrace),,build) ## Install what is built below PREFIX (default /usr/local)
	install -D build/bin/terrace $(DESTDIR)$(PREFIX)/bin/terrace
	mkdir -p $(DESTDIR)$(PREFIX)/lib/terrace
	install build/lib/terrace/* $(DESTDIR)$(PREFIX)/lib/terrace/
	install -D --mode 644 --target-directory $(DESTDIR)$(PREFIX)/include $(HEADERS)/*.h
	install -D --mode 644 --target-directory $(DESTDIR)$(PREFIX)/include/infiniband $(HEADERS)/infiniband/*.h
	install -D --mode 644 packaging/terrace.pc $(DESTDIR)$(PREFIX)/lib/pkgconfig/terrace.pc
	sed -i "s/@VERSION@/$$(build/bin/terrace --version | cut -d ' ' -f 2)/" $(DESTDIR)$(PREFIX)/lib/pkgconfig/terrace.pc

uninstall: ## Remove the files of install below PREFIX
	rm -f $(DESTDIR)$(PREFIX)/bin/terrace
	rm -rf $(DESTDIR)$(PREFIX)/lib/terrace
	rm -f $(DESTDIR)$(PREFIX)/lib/pkgconfig/terrace.pc
	rm -f $(DESTDIR)$(PREFIX)/include/terrace.h $(DESTDIR)$(PREFIX)/include/terrace_export.h $(DESTDIR)$(PREFIX)/include/infiniband/terrace_*.h
	rmdir --ignore-fail-on-non-empty $(DESTDIR)$(PREFIX)/include/infiniband $(DESTDIR)$(PREFIX)/lib/pkgconfig 2>/dev/null || true

packages: build ## Build a Debian package, a tarball, a Python wheel, an SBOM and SHA256SUMS in build/packages/ (SIGN=KEY signs with an SSH key)
	@scripts/setup.sh packages
	scripts/release.sh --package terrace-cli --example manual
	$(PYTHON) packaging/build.py $(if $(SIGN),--sign $(SIGN)) build/packages

packages-test: packages ## Unpack the packages, install and remove them below a temporary folder, run them, and build them again: the same bytes
	$(call pytest,packages) -v --timeout 3600 tests/packages

# Plain verbs programs, linked with the system's libibverbs.
build/examples/%: examples/%.c $(wildcard $(HEADERS)/*.h $(HEADERS)/infiniband/*.h)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -I$(HEADERS) -o $@ $< -libverbs

# With Terrace's own verbs.
build/examples/condition: examples/condition.c crates/ibverbs/include/infiniband/terrace_exp.h | build
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -I crates/ibverbs/include -o $@ $< -L build/lib/terrace -l:libibverbs.so.1

build/examples/export_client: examples/export_client.c $(HEADERS)/terrace_export.h | build
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -I$(HEADERS) -o $@ $< -L build/lib/terrace -l:libibverbs.so.1

build/bench/%: bench/%.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -D_GNU_SOURCE -o $@ $< -libverbs -lpthread

# One program for each peer of `make bench-peers`; peer.c is shared.
PEERS_SHARED := bench/peers/peer.c bench/peers/peer.h bench/peers/clock.h
PEERS_PROGRAMS := $(patsubst bench/peers/peer_%.c,build/bench/peers/%,$(wildcard bench/peers/peer_*.c))

build/bench/peers/%: bench/peers/peer_%.c $(PEERS_SHARED)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -D_GNU_SOURCE -o $@ $< bench/peers/peer.c $(LIBRARIES) -lpthread

build/bench/peers/verbs: LIBRARIES := -libverbs
build/bench/peers/ucx: LIBRARIES := -lucp -lucs
build/bench/peers/fabric: LIBRARIES := -lfabric
build/bench/peers/nbd: LIBRARIES := -lnbd

build/bench/peers/native: $(TARGET_DIR)/release/examples/libpeer_native.a $(PEERS_SHARED)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -D_GNU_SOURCE -o $@ bench/peers/peer.c $< $(NATIVE_LIBRARIES) -lpthread -ldl -lm -lgcc_s

# The ends of `make bench-np`.
build/bench/np/np: $(wildcard bench/np/*.c bench/np/*.h) bench/peers/clock.h $(HEADERS)/terrace.h
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -D_GNU_SOURCE -I$(HEADERS) -o $@ $(filter %.c,$^) -libverbs -lpthread -lm

build/bench/np/mpi_sort: bench/np/programs/mpi_sort.c
	@mkdir -p $(@D)
	mpicc -O2 -Wall -Wextra -Werror -o $@ $<

build/bench/filemr/regions: bench/filemr/regions.c bench/times.h $(HEADERS)/terrace.h
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -D_GNU_SOURCE -I$(HEADERS) -o $@ $< -libverbs

build/bench/filemr/local: bench/filemr/local.c bench/times.h
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -D_GNU_SOURCE -o $@ $< -lpmemlog

build/bench/pager/%: bench/pager/%.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -D_GNU_SOURCE -o $@ $< -lm

peers-programs: $(PEERS_PROGRAMS) build/bench/peers/native

build/interop/programs/%: tests/interop/programs/%.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -D_GNU_SOURCE -I$(HEADERS) -o $@ $< $(LIBRARIES) -libverbs -lpthread

# Runs in a guest without libraries.
build/interop/programs/swap_pattern: tests/interop/programs/swap_pattern.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -static -o $@ $<

build/interop/programs/cm_talk: LIBRARIES := -lrdmacm

# With Terrace's own verbs, as build/examples/condition.
build/interop/programs/offloaded_broadcast: tests/interop/programs/offloaded_broadcast.c crates/ibverbs/include/infiniband/terrace_exp.h | build
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -D_GNU_SOURCE -I$(HEADERS) -o $@ $< -L build/lib/terrace -l:libibverbs.so.1

build/interop/programs/mpi_check: tests/interop/programs/mpi_check.c
	@mkdir -p $(@D)
	mpicc $(CFLAGS) -o $@ $<

build/interop/programs/gloo_check: tests/interop/programs/gloo_check.cc
	@mkdir -p $(@D)
	$(CXX) $(CFLAGS) -o $@ $< -lgloo -libverbs -lpthread

# Programs with intentional mistakes; env.c is shared.
NEGATIVE_SHARED := $(wildcard tests/negative/programs/env.*) tests/negative/programs/check.h
NEGATIVE_PROGRAMS := $(patsubst tests/%.c,build/%,$(filter-out %/env.c,$(wildcard tests/negative/programs/*.c)))

build/negative/programs/%: tests/negative/programs/%.c $(NEGATIVE_SHARED) $(wildcard $(HEADERS)/*.h)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -D_GNU_SOURCE -I$(HEADERS) -o $@ $< tests/negative/programs/env.c -libverbs -lpthread

# The constructor of libraries/waiting.so calls a function of the program.
build/negative/programs/fork_load: CFLAGS += -rdynamic

build/negative/libraries/%.so: tests/negative/libraries/%.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -shared -fPIC -o $@ $< -lpthread

negative-programs: $(NEGATIVE_PROGRAMS) build/negative/libraries/waiting.so build/negative/libraries/stopping.so build/negative/libraries/guarded.so build/examples/remote_file build/examples/own_swap build/examples/export_client

build/endurance/programs/%: tests/endurance/programs/%.c $(NEGATIVE_SHARED)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -D_GNU_SOURCE -Itests/negative/programs -o $@ $< tests/negative/programs/env.c -libverbs -lpthread

# Programs for both ends of `make interop`.
interop-programs: build/negative/programs/endpoint build/interop/programs/mad build/interop/programs/cm_talk build/examples/file_region

demo: build ## Run unmodified RDMA programs, and READ a file larger than the server's memory
	@scripts/setup.sh demo
	@$(MAKE) --no-print-directory build/examples/file_region
	@$(PYTHON) scripts/demo.py
	@build/bin/terrace bench demo-term

test: build ## Run the tests, including 2,000 seeds of the simulation
	@scripts/setup.sh test
	PYTHON=$(abspath build/tools/bin/python) $(call nextest,cargo) --workspace --test-threads $(JOBS)
	cargo test --workspace --locked --doc
	$(call pytest,words) -q tests/words
	$(call pytest,setup) -q tests/setup
	$(call pytest,sim) -q tests/sim
	$(call pytest,wireshark) -q tests/wireshark
	$(call pytest,models) -q tests/models
	$(call pytest,interop-harness) -q tests/interop/test_harness.py
	$(call pytest,chaos-harness) -q tests/chaos/test_bystanders.py
	$(call pytest,endurance-harness) -q tests/endurance
	@$(MAKE) --no-print-directory negative-programs build/interop/programs/cm_talk
	$(call pytest,negative) -q --durations=5 -n $(JOBS) -m 'not alone' tests/negative
	$(call pytest,negative-alone) -q -m alone tests/negative
	$(call pytest,bench-peers) -q bench/peers
	$(call pytest,bench-np) -q bench/np
	$(call pytest,bench-filemr) -q bench/filemr
	$(call pytest,bench-pager) -q bench/pager

conformance: build ## Run real RDMA programs on Terrace: perftest, pingpongs, qperf, UCX, pyverbs (ONLY=WORDS for a part)
	@scripts/setup.sh conformance
	@$(MAKE) --no-print-directory build/examples/file_region build/examples/resilient_send build/interop/programs/append_stress build/interop/programs/paged_stress \
	    build/interop/programs/mpi_check build/examples/condition build/interop/programs/offloaded_broadcast
	$(call pytest,conformance) -v -n $(CASES) --dist loadgroup tests/interop/test_conformance.py tests/interop/test_readme.py

conformance-programs: build ## Run further programs on Terrace, from PyPI, crates.io, Maven Central and Debian: NIXL, Mooncake, Valkey, Ceph, fabtests, JUCX, gloo (installs 1 GB below build/)
	@scripts/setup.sh conformance-programs
	@$(MAKE) --no-print-directory build/interop/programs/gloo_check
	$(call pytest,conformance-programs) -v tests/interop/test_published.py

interop: build ## Run Terrace against the Linux kernel's Soft-RoCE in a guest (ONLY=WORDS for a part)
	$(PYTHON) tests/interop/kernel/run.py -v --junit-xml=results/junit/interop.xml $(if $(ONLY),-k '$(ONLY)')

interop-swap: build ## Swap to memory nodes from a Linux guest that has too little memory
	@scripts/setup.sh interop
	@$(MAKE) --no-print-directory build/interop/programs/swap_pattern
	$(call pytest,interop-swap) -v tests/interop/swap

errors: build ## Compare the errors of paged and ordinary memory in over 5,000 combinations of control operations and requests (ONLY=WORDS for some, NIC=commodity for NP-RDMA)
	@scripts/setup.sh pytest
	@$(MAKE) --no-print-directory negative-programs
	$(if $(NIC),TERRACE_NIC=$(NIC) TERRACE_NP_ORDER=strict) $(call pytest,errors) -q -n 2 --dist loadscope tests/errors

chaos: build ## Attack a live node and live programs while well-behaved peers continue (ONLY=WORDS for a part)
	@scripts/setup.sh conformance
	@$(MAKE) --no-print-directory negative-programs build/interop/programs/cm_talk
	$(call pytest,chaos) -v tests/chaos/test_attacks.py

fork: build ## Fork 2,000 times while threads call every interposed function, and as often while they use devices, and check that no child hangs
	@scripts/setup.sh pytest
	@$(MAKE) --no-print-directory negative-programs
	TERRACE_FORKS=2000 $(call pytest,fork) -v tests/negative/test_fork.py

crash: ## Kill memory nodes ROUNDS=n times, and clients half as often, and check that no acknowledged data is lost; kill same-host peers 5 times as often, and stop them; kill and stop exports and writers of replicated files
	@scripts/setup.sh nextest
	TERRACE_STOP_ROUNDS=$(ROUNDS) TERRACE_KILL_ROUNDS=$$(($(ROUNDS) * 5)) TERRACE_CRASH_ROUNDS=$(ROUNDS) TERRACE_CRASH_DROP_CACHES=1 \
	    TERRACE_REPLICA_ROUNDS=$$(($(ROUNDS) / 20 + 1)) $(call nextest,crash) --workspace --test stop --test kill --test crash --test replicas

stress: build ## Run pairs of programs that verify paged memory, with losses, evictions and stops, for MINUTES=n (SEED=k for other settings)
	@scripts/setup.sh conformance
	@$(MAKE) --no-print-directory build/interop/programs/paged_stress
	TERRACE_STRESS_SECONDS=$$((60 * $(MINUTES))) $(if $(SEED),TERRACE_SEED=$(SEED)) $(call pytest,stress) -v -s -o timeout=0 tests/stress

endurance: build ## Run mixed load, faults and kills on eight processes for MINUTES=n (SEED=k for other events)
	@$(MAKE) --no-print-directory build/endurance/programs/worker
	scripts/release.sh --package terrace-node --example endurance_client
	$(PYTHON) tests/endurance/endurance.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

mount-tests: build ## Run pjdfstest, fsx, fio, SQLite, git and a build over `terrace mount`, with restarts of the server (ONLY=SUITE for one; XFSTESTS=DIRECTORY: also xfstests, built there)
	@scripts/setup.sh mount-tests
	@$(if $(XFSTESTS),scripts/setup.sh xfstests)
	$(PYTEST) --junit-xml=results/junit/mount.xml -v tests/mount
	unshare --net sh -c 'ip link set lo up && $(PYTHON) tests/mount/suites.py $(ONLY)'

mount-tests-short: build ## The part of mount-tests that CI runs, under three minutes
	@scripts/setup.sh mount-tests
	$(PYTEST) --junit-xml=results/junit/mount.xml -v tests/mount
	unshare --net sh -c 'ip link set lo up && $(PYTHON) tests/mount/suites.py --short $(ONLY)'

sanitize: build ## Run AddressSanitizer, ThreadSanitizer and valgrind on unsafe code (ONLY=address, thread, valgrind or short)
	@scripts/setup.sh sanitize
	@$(MAKE) --no-print-directory negative-programs build/bench/many
	scripts/sanitize.sh $(ONLY)

soak: ## Run the simulation with SEEDS=n seeds, or replay SEED=k alone
	@scripts/setup.sh build
	cargo run --release --locked --package terrace-sim -- $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

soak-np: ## Run the simulation of NP-RDMA with SEEDS=n seeds, or replay SEED=k alone
	@scripts/setup.sh build
	cargo run --release --locked --package terrace-sim -- --np $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

soak-term: build ## Stress regions larger than memory for STRESS_SECONDS=n each, natively and by verbs (SEED=k for other accesses)
	@scripts/setup.sh conformance
	@$(MAKE) --no-print-directory build/interop/programs/paged_stress
	@scripts/setup.sh nextest
	TERRACE_STRESS_SECONDS=$(STRESS_SECONDS) $(if $(SEED),TERRACE_SEED=$(SEED)) $(call nextest,soak-term) --workspace --test stress
	TERRACE_STRESS_SECONDS=$(STRESS_SECONDS) $(if $(SEED),TERRACE_SEED=$(SEED)) $(PYTEST) --junit-xml=results/junit/soak-term-programs.xml -v \
	    tests/interop/test_conformance.py -k paged/stress

fuzz: ## Run every fuzz target for FUZZ_RUNS=n executions
	@scripts/setup.sh fuzz
	scripts/fuzz.sh $(FUZZ_RUNS)

bench: build ## Measure against raw UDP: latency, bandwidth, rates, registration
	@scripts/setup.sh bench
	scripts/release.sh --package terrace-fabric --example udp_reference
	@$(MAKE) --no-print-directory build/bench/reg_mr
	TERRACE_PATH=udp $(PYTHON) bench/bench.py

bench-many: build ## Measure the growth of costs with queue pairs, regions and processes
	@scripts/setup.sh bench
	@$(MAKE) --no-print-directory build/bench/many
	TERRACE_PATH=udp $(PYTHON) bench/many.py

bench-where: ## Show the distribution of a READ's time over UDP, at both ends
	@scripts/setup.sh bench
	scripts/release.sh --package terrace-nic --example speed
	scripts/release.sh --package terrace-fabric --example udp_reference
	$(PYTHON) bench/where.py

bench-peers: build ## Compare with memcpy, UCX, libfabric, Redis, memcached and NBD on this machine: three minutes (ONLY=PATTERN for some)
	@scripts/setup.sh bench-peers
	scripts/release.sh --package terrace-nic --example peer_native
	-@$(MAKE) --no-print-directory --keep-going peers-programs
	$(PYTHON) bench/peers/peers.py $(if $(ONLY),--only '$(ONLY)')

bench-peers-full: build ## As bench-peers, with all sizes and more rounds, into bench/peers/results, which is committed
	@scripts/setup.sh bench-peers
	scripts/release.sh --package terrace-nic --example peer_native
	-@$(MAKE) --no-print-directory --keep-going peers-programs
	$(PYTHON) bench/peers/peers.py --full --out bench/peers/results

bench-np: build ## Measure memory that is not pinned as NP-RDMA does, beside ordinary memory and a model of on-demand paging: six minutes
	@scripts/setup.sh bench
	@$(MAKE) --no-print-directory build/bench/np/np
	$(PYTHON) bench/np/np.py

np-programs: build ## Programs with registered memory of four times their budget: Open MPI's exchange, a store, 64 GiB; data are verified
	@scripts/setup.sh np-programs
	@$(MAKE) --no-print-directory build/bench/np/np build/bench/np/mpi_sort
	$(PYTHON) bench/np/programs.py
	$(PYTHON) bench/np/np.py --only store
	$(PYTHON) bench/np/np.py --only registration

bench-filemr: build ## Regions that are files: translation caches (a model, on recorded traces), registration, rates, latency: five minutes (needs root)
	@scripts/setup.sh bench-filemr
	@$(MAKE) --no-print-directory build/bench/filemr/regions build/bench/filemr/local
	scripts/release.sh --package terrace-log --example turns
	$(PYTHON) bench/filemr/filemr.py
	$(PYTHON) bench/filemr/regions.py
	unshare --net sh -c 'ip link set lo up && $(PYTHON) bench/filemr/latency.py'

bench-pager: build ## Programs whose memory is on a memory node, beside ODRP's baselines, a swap file and zram: forty minutes (needs root; ONLY=NAME for some)
	@scripts/setup.sh bench-pager
	@$(MAKE) --no-print-directory $(addprefix build/bench/pager/,quicksort kmeans touches etc)
	$(PYTHON) bench/pager/pager.py $(if $(ONLY),--only '$(ONLY)')

bench-mount: build ## Compare `terrace mount` with SSHFS and the local file system: sequential and random IO (needs root)
	@scripts/setup.sh bench-mount
	unshare --net sh -c 'ip link set lo up && $(PYTHON) bench/mount/mount.py'

bench-term: build ## Measure regions larger than memory as TeRM does: all figures, in a short run (TRANSPORT=local: over shared memory)
	@scripts/setup.sh bench
	build/bin/terrace bench --short $(if $(TRANSPORT),--path $(TRANSPORT)) bench/term/*.toml
	build/bin/terrace bench flush $(if $(TRANSPORT),--path $(TRANSPORT))

bench-term-full: build ## As bench-term, with all points, into bench/term/results, which is committed
	@scripts/setup.sh bench
	build/bin/terrace bench --full $(if $(TRANSPORT),--path $(TRANSPORT)) --out bench/term/results bench/term/*.toml
	build/bin/terrace bench flush $(if $(TRANSPORT),--path $(TRANSPORT))

docs: ## Build the documentation as a book, build/docs/html/index.html
	@scripts/setup.sh docs
	$(PYTHON) scripts/docs.py

lint: ## Run rustfmt, clippy and cargo-deny
	@scripts/setup.sh lint
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- --deny warnings
	cargo deny check bans licenses sources

clean: ## Remove all build outputs
	cargo clean
	rm -rf build results
