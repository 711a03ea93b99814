#!/bin/sh
# Runs each fuzz target for a number of executions: scripts/fuzz.sh RUNS [TARGET...]
#
# libFuzzer's instrumentation needs compiler flags that the stable compiler only takes when told that it is being used to
# bootstrap; that spares a second, nightly toolchain.
set -eu
cd "$(dirname "$0")/../fuzz"
runs=$1
shift
export RUSTC_BOOTSTRAP=1
[ $# -gt 0 ] || set -- $(cargo fuzz list --fuzz-dir .)
for target in "$@"; do
    echo "fuzz: $target, $runs executions"
    # A target's committed seeds are read from seeds/; what the run discovers is kept in corpus/ for the next one.
    mkdir -p "corpus/$target"
    cargo fuzz run --fuzz-dir . "$target" -- -runs="$runs" -max_len=9216 -print_final_stats=1
done
