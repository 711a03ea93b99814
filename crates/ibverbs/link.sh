#!/bin/sh
# Links libibverbs.so.1 and libibverbs.so into OUTPUT_DIR from the static library of `cargo build -p terrace-ibverbs`.
#
# usage: link.sh OUTPUT_DIR [STATICLIB]
#
# A Rust cdylib cannot have symbol versions, so the C linker executes the last step. The whole static library is linked
# into one object. The implementations get the names in exports.map and private_nodes.txt. Every other symbol except the
# interposed functions of the C library (interposed.txt) becomes local, and unreachable sections are dropped.
set -eu
if [ $# -lt 1 ]; then
    echo "usage: link.sh OUTPUT_DIR [STATICLIB]" >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
out=$1
target=${CARGO_TARGET_DIR:-$here/../../target}
library=${2:-$target/release/libterrace_ibverbs.a}
if [ ! -f "$library" ]; then
    echo "link.sh: no $library; run cargo build --release -p terrace-ibverbs first" >&2
    exit 1
fi
mkdir -p "$out"
work=$(mktemp -d "$out/.link.XXXXXX")
trap 'rm -rf "$work"' EXIT

# The public nodes come first, then the private ones.
{
    cat "$here/exports.map"
    awk '
        $1 == "nodes" { for (i = 2; i <= NF; i++) nodes[++count] = $i; next }
        /^#/ || NF < 3 { next }
        {
            for (i = 1; i <= count; i++) {
                node = nodes[i]; name = $1; sub(/NODE$/, node, name)
                if (node >= $3 + 0 && (NF < 4 || node <= $4 + 0)) text[i] = text[i] "        " name ";\n"
            }
        }
        END { for (i = 1; i <= count; i++) printf "\nIBVERBS_PRIVATE_%s {\n    global:\n%s};\n", nodes[i], text[i] }
    ' "$here/private_nodes.txt"
} >"$work/exports.map"

awk '
    /^(IBVERBS|TERRACE)_[A-Z0-9_.]+ *\{/ { node = $1; next }
    /^ *[a-z_A-Z0-9]+;/ {
        name = $1; sub(/;.*/, "", name)
        names[++count] = name; nodes[count] = node
        if (node !~ /PRIVATE/) latest[name] = node
    }
    END {
        for (i = 1; i <= count; i++) {
            name = names[i]; node = nodes[i]; suffix = node
            sub(/^IBVERBS_/, "", suffix); gsub(/\./, "_", suffix)
            # Only one node may be the default of a name, so private nodes are not default: providers name their node.
            if (node ~ /PRIVATE/) print tolower(suffix) "__" name, name "@" node
            else if (latest[name] != node || name == "ibv_register_driver")
                print "compat_" suffix "__" name, name "@" node
            else print name, name "@@" node
        }
    }' "$work/exports.map" >"$work/rename"
{ cut -d' ' -f2 "$work/rename"; grep -v '^#' "$here/interposed.txt"; } >"$work/keep"

ld -r --whole-archive "$library" -o "$work/all.o"
objcopy --redefine-syms="$work/rename" --keep-global-symbols="$work/keep" "$work/all.o" "$work/renamed.o"
gcc -shared -o "$work/libibverbs.so.1" "$work/renamed.o" \
    -Wl,--version-script="$work/exports.map" -Wl,-soname,libibverbs.so.1 \
    -Wl,--gc-sections -Wl,-z,nodelete -Wl,-z,relro,-z,now -Wl,--no-undefined -lgcc_s -lpthread -ldl -lm -lc

# Without this check a name in the maps without implementation would fail only in the program that needs it.
readelf --dyn-syms -W "$work/libibverbs.so.1" | awk '$7 != "UND" { print $8 }' | sed 's/@@/@/' | sort >"$work/have"
missing=$(sed 's/@@/@/' "$work/keep" | sort | comm -23 - "$work/have")
if [ -n "$missing" ]; then
    echo "link.sh: exports.map, private_nodes.txt and interposed.txt promise symbols that nothing implements:" >&2
    echo "$missing" >&2
    exit 1
fi

# Programs that load libibverbs by itself open the name without a version first. The library of that name is empty and
# needs the other one. A symbolic link would become a second copy of the NIC wherever files are installed or packed
# without links.
gcc -shared -nostdlib -o "$work/libibverbs.so" -Wl,--no-as-needed "$work/libibverbs.so.1" -Wl,-rpath,'$ORIGIN'
mv "$work/libibverbs.so.1" "$work/libibverbs.so" "$out/"
