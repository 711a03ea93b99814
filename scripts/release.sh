#!/bin/sh
# usage: release.sh ARGUMENTS...
#
# `cargo build --release --locked ARGUMENTS`, by the profile that `make profile` has left, if there is one. With TERRACE_PROFILE_INTO=DIR, a
# build whose programs count what they do, into files in DIR.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
flag=
if [ -n "${TERRACE_PROFILE_INTO:-}" ]; then
    flag=-Cprofile-generate=$TERRACE_PROFILE_INTO
else
    # What counts is never to be taken for what was built: an interrupted `make profile` may have left it.
    if [ -e "$here/build/profile/counting" ]; then
        rm -rf "$here/build/bin" "$here/build/lib" "$here/build/bench/peers/native" "$here/build/profile/counting"
    fi
    # A profile's name is that of its contents: cargo does not look into the file to find out whether what it has built is still good.
    profile=$(find "$here/build/profile" -maxdepth 1 -name '*.profdata' 2>/dev/null | head -n 1)
    if [ -n "$profile" ] && [ "$(rustc --version)" != "$(cat "$here/build/profile/rustc" 2>/dev/null)" ]; then
        echo "release.sh: the profile in build/profile was made with another rustc and is not used; 'make profile' makes a new one" >&2
    elif [ -n "$profile" ]; then
        flag=-Cprofile-use=$profile
    fi
fi
# Beside whatever flags the user has, of which cargo takes but one kind.
set -- build --release --locked "$@"
if [ -n "$flag" ] && [ -n "${CARGO_ENCODED_RUSTFLAGS:-}${RUSTFLAGS:-}" ]; then
    separator=$(printf '\037')
    flags=${CARGO_ENCODED_RUSTFLAGS:-$(echo "${RUSTFLAGS:-}" | tr -s ' ' '\037' | tr -d '\n')}
    export CARGO_ENCODED_RUSTFLAGS="$flags$separator$flag"
elif [ -n "$flag" ]; then
    set -- --config "build.rustflags=['$flag']" "$@"
fi
exec cargo "$@"
