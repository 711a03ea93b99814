#!/bin/sh
# Runs each fuzz target for a number of executions: scripts/fuzz.sh RUNS [TARGET...]
#
# libFuzzer's instrumentation needs compiler flags that the stable compiler accepts only with RUSTC_BOOTSTRAP. That
# avoids a second, nightly toolchain.
set -eu
cd "$(dirname "$0")/.."
runs=$1
shift
export RUSTC_BOOTSTRAP=1
[ $# -gt 0 ] || set -- $(cargo fuzz list)
for target in "$@"; do
    echo "fuzz: $target, $runs executions"
    # The run writes new inputs to the first directory. The committed corpus in the second is only read.
    discovered=fuzz/target/discovered/$target
    mkdir -p "$discovered"
    cargo fuzz run "$target" "$discovered" "fuzz/corpus/$target" -- -runs="$runs" -max_len=9216 -print_final_stats=1
done
