#!/bin/sh
# usage: release.sh ARGUMENTS...
#
# Runs `cargo build --release --locked ARGUMENTS` with the profile of `make profile`, if there is one. With
# TERRACE_PROFILE_INTO=DIR, builds instrumented programs, which write their counts to files in DIR. With
# TERRACE_BUILDER=PROGRAM, runs that program in place of cargo: maturin has the same options.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
flag=
if [ -n "${TERRACE_PROFILE_INTO:-}" ]; then
    flag=-Cprofile-generate=$TERRACE_PROFILE_INTO
else
    # An interrupted `make profile` may have left an instrumented build, which must not be used.
    if [ -e "$here/build/profile/instrumented" ]; then
        rm -rf "$here/build/bin" "$here/build/lib" "$here/build/bench/peers/native" "$here/build/profile/instrumented"
    fi
    # A profile's name is a hash of its contents: cargo rebuilds if the name changes, but does not read the file.
    profile=$(find "$here/build/profile" -maxdepth 1 -name '*.profdata' 2>/dev/null | head -n 1)
    if [ -n "$profile" ] && [ "$(rustc --version)" != "$(cat "$here/build/profile/rustc" 2>/dev/null)" ]; then
        echo "release.sh: the profile in build/profile is from another rustc and is not used; 'make profile' creates a new one" >&2
    elif [ -n "$profile" ]; then
        flag=-Cprofile-use=$profile
    fi
fi
# The user's flags are kept. cargo reads only one of the variables and options for flags.
set -- build --release --locked "$@"
if [ -n "$flag" ] && [ -n "${CARGO_ENCODED_RUSTFLAGS:-}${RUSTFLAGS:-}" ]; then
    separator=$(printf '\037')
    flags=${CARGO_ENCODED_RUSTFLAGS:-$(echo "${RUSTFLAGS:-}" | tr -s ' ' '\037' | tr -d '\n')}
    export CARGO_ENCODED_RUSTFLAGS="$flags$separator$flag"
elif [ -n "$flag" ]; then
    set -- "$@" --config "build.rustflags=['$flag']"
fi
exec "${TERRACE_BUILDER:-cargo}" "$@"
