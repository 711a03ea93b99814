#!/usr/bin/env bash
# AddressSanitizer and ThreadSanitizer on the crates that have unsafe code and on those that use them from many threads, and
# valgrind on the library as C programs see it. scripts/sanitize.sh [address|thread|valgrind|short]; docs/hacking.md says what is what.
# `short`, for CI, is AddressSanitizer on terrace-hostmem, terrace-shm and terrace-memory, and valgrind.
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

# A model's threads are not the system's, and the largest one only takes long here.
# The tools have SIGSEGV handlers of their own. Copies of registered memory may fault, and terrace_hostmem's handler has to see
# that first: so the tools leave the signals alone.
address() {
    # Leaks are looked for, too. One test measures the memory of its process, most of which is the tool's; others look at where
    # their stack is, and mean the real one. The stable compiler has the tool, and takes its flag when told that it is being used to
    # bootstrap; that spares a nightly toolchain.
    RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address" CARGO_TARGET_DIR=$directory/address ASAN_OPTIONS=handle_segv=0:handle_sigbus=0:detect_leaks=1:detect_stack_use_after_return=0 \
        LSAN_OPTIONS=suppressions=$PWD/scripts/lsan.supp:print_suppressions=0 \
        cargo test --locked --no-fail-fast --target $target --tests --package "$1" -- --test-threads 2 \
        --skip memory_stays_within_the_budget --skip three_take_it_from_each_other
}

thread() {
    # The standard library has to be built with it, or its locks and channels would look like races. Children of a fork have threads of
    # their own here. Two tests look at which handlers are installed, and the tool installs its own in their place.
    RUSTFLAGS="-Zsanitizer=thread" CARGO_TARGET_DIR=$directory/thread \
        TSAN_OPTIONS="handle_segv=0 handle_sigbus=0 die_after_fork=0" \
        cargo +nightly test --locked --no-fail-fast -Zbuild-std --target $target --tests --package "$1" -- --test-threads 1 \
        --skip a_handler_from_later_gets_them_as_well --skip a_handler_over_ours_that_chains --skip three_take_it_from_each_other
}

# Registers must be right wherever memory is touched, because a fault there is recovered from. What is only reachable at the end is
# the library's for as long as the process lives. valgrind runs one thread at a time: without --fair-sched a program that always finds
# completions keeps the engine from running at all, and its peers run out of retries.
memcheck() {
    build/bin/terrace run --addr 127.0.42.9 -- valgrind --quiet --fair-sched=yes --error-exitcode=9 --trace-children=yes --leak-check=full \
        --errors-for-leak-kinds=definite,indirect --show-leak-kinds=definite,indirect \
        --vex-iropt-register-updates=allregs-at-mem-access --suppressions=scripts/valgrind.supp "$@" </dev/null
}

case $only in
'' | address) crates="terrace-sync terrace-hostmem terrace-shm terrace-memory terrace-tier terrace-fabric terrace-nic" ;;
short) crates="terrace-hostmem terrace-shm terrace-memory" ;;
*) crates= ;;
esac
for crate in $crates; do
    check "address: $crate" address $crate
done
if [ -z "$only" ] || [ "$only" = thread ]; then
    rustup component add rust-src --toolchain nightly >/dev/null 2>&1 || true
    for crate in terrace-sync terrace-hostmem terrace-shm terrace-memory terrace-nic; do
        check "thread: $crate" thread $crate
    done
fi
if [ -z "$only" ] || [ "$only" = valgrind ] || [ "$only" = short ]; then
    command -v valgrind >/dev/null || { echo "sanitize: valgrind is missing (Debian: apt-get install valgrind)" >&2; exit 1; }
    for program in verbs_device verbs_memory verbs_post verbs_qp verbs_queues verbs_xrc; do
        check "valgrind: $program" memcheck build/badinput/programs/$program
    done
    check "valgrind: many" memcheck build/bench/many -q 4 -m 20 -t 1 -e
fi
printf '%s\n' "${failed[@]/#/failed: }"
[ ${#failed[@]} -eq 0 ]
