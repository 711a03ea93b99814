#!/usr/bin/env bash
# AddressSanitizer and ThreadSanitizer on the crates with unsafe code and on their multithreaded users, and valgrind on
# C programs with the library. scripts/sanitize.sh [address|thread|valgrind|short]; see docs/hacking.md. `short`, for
# CI, runs AddressSanitizer on terrace-hostmem, terrace-shm and terrace-memory, and valgrind.
set -uo pipefail
cd "$(dirname "$0")/.."
only=${1:-}
failed=()
target=x86_64-unknown-linux-gnu
directory=${CARGO_TARGET_DIR:-target}/sanitize

# check NAME COMMAND...
check() {
    local name=$1
    shift
    printf '== %s\n' "$name"
    "$@" || { failed+=("$name"); printf '== %s: FAILED\n' "$name"; }
}

# The largest loom model is skipped: its threads are not the system's, and it only takes long. The tools have SIGSEGV
# handlers. Copies of registered memory may fault, and terrace_hostmem's handler must get the fault first, so the tools'
# handlers are disabled.
address() {
    # Leaks are detected, too. One test is skipped because it measures the memory of its process, most of which is the
    # tool's. Fake stacks are disabled because some tests use the address of their stack. RUSTC_BOOTSTRAP makes the
    # stable compiler accept the flag, which avoids a nightly toolchain.
    RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address" CARGO_TARGET_DIR=$directory/address ASAN_OPTIONS=handle_segv=0:handle_sigbus=0:detect_leaks=1:detect_stack_use_after_return=0 \
        LSAN_OPTIONS=suppressions=$PWD/scripts/lsan.supp:print_suppressions=0 \
        cargo test --locked --no-fail-fast --target $target --tests --package "$1" -- --test-threads 2 \
        --skip memory_stays_within_the_budget --skip three_threads_revoke_each_others_bias
}

# thread PACKAGE [TESTS...]: all tests of a package, or those that cargo's options name.
thread() {
    local package=$1
    shift
    # The standard library has to be instrumented, or its locks and channels would be reported as races. Children of a
    # fork start threads in these tests. Two tests are skipped because they check the installed signal handlers, which
    # the tool replaces. A process ends with its first race: nodes that the tests kill would report theirs to nobody.
    RUSTFLAGS="-Zsanitizer=thread" CARGO_TARGET_DIR=$directory/thread \
        TSAN_OPTIONS="halt_on_error=1 handle_segv=0 handle_sigbus=0 die_after_fork=0" \
        cargo +nightly test --locked --no-fail-fast -Zbuild-std --target $target --package "$package" "${@:---tests}" -- --test-threads 1 \
        --skip a_handler_from_later_gets_them_as_well --skip a_handler_over_ours_that_chains --skip three_threads_revoke_each_others_bias
}

# Registers must be correct at every memory access, because faults are recovered from. Memory that is reachable at exit
# belongs to the library for the life of the process. valgrind runs one thread at a time: without --fair-sched a program
# that always finds completions starves the engine, and its peers exhaust their retries.
memcheck() {
    build/bin/terrace run --addr 127.0.42.9 -- valgrind --quiet --fair-sched=yes --error-exitcode=9 --trace-children=yes --leak-check=full \
        --errors-for-leak-kinds=definite,indirect --show-leak-kinds=definite,indirect \
        --vex-iropt-register-updates=allregs-at-mem-access --suppressions=scripts/valgrind.supp "$@" </dev/null
}

case $only in
'' | address) crates="terrace-sync terrace-hostmem terrace-shm terrace-memory terrace-baseline terrace-pages terrace-fabric terrace-nic" ;;
short) crates="terrace-hostmem terrace-shm terrace-memory" ;;
*) crates= ;;
esac
for crate in $crates; do
    check "address: $crate" address $crate
done
if [ -z "$only" ] || [ "$only" = thread ]; then
    rustup component add rust-src --toolchain nightly >/dev/null 2>&1 || true
    for crate in terrace-sync terrace-hostmem terrace-shm terrace-memory terrace-pages terrace-nic terrace-node; do
        check "thread: $crate" thread $crate
    done
    check "thread: killed nodes" thread terrace-cli --test crash
fi
if [ -z "$only" ] || [ "$only" = valgrind ] || [ "$only" = short ]; then
    command -v valgrind >/dev/null || { echo "sanitize: valgrind is missing (Debian: apt-get install valgrind)" >&2; exit 1; }
    for program in verbs_device verbs_memory verbs_post verbs_qp verbs_queues verbs_xrc; do
        check "valgrind: $program" memcheck build/negative/programs/$program
    done
    check "valgrind: many" memcheck build/bench/many -q 4 -m 20 -t 1 -e
fi
printf '%s\n' "${failed[@]/#/failed: }"
[ ${#failed[@]} -eq 0 ]
