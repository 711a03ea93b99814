#!/bin/sh
# usage: release.sh ARGUMENTS...
#
# `cargo build --release --locked ARGUMENTS`, by the profile that `make profile` has left, if there is one.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
# A profile's name is that of its contents: cargo does not look into the file to find out whether what it has built is still good.
profile=$(find "$here/build/profile" -maxdepth 1 -name '*.profdata' 2>/dev/null | head -n 1)
case "${RUSTFLAGS:-}" in
*-Cprofile-generate*) profile= ;;
esac
if [ -n "$profile" ]; then
    if [ "$(rustc --version)" = "$(cat "$here/build/profile/rustc" 2>/dev/null)" ]; then
        export RUSTFLAGS="${RUSTFLAGS:-} -Cprofile-use=$profile"
    else
        echo "release.sh: the profile in build/profile was made with another rustc and is not used; 'make profile' makes a new one" >&2
    fi
fi
exec cargo build --release --locked "$@"
