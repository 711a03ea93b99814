#!/usr/bin/env bash
# Profiles the server's network thread while a plan's points are measured: shares of its samples, by perf, and its system calls
# per second. Requires root and perf (Debian: linux-perf).
#
#   bench/term/profile.sh PLAN.toml [SECONDS AFTER THE SERVER'S START] [SECONDS OF SAMPLING]
set -euo pipefail
plan=${1:?a plan, preferably with a single point}
after=${2:-5} during=${3:-4}
terrace=$(dirname "$0")/../../build/bin/terrace
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$terrace" bench "$plan" --out "$work" >"$work/log" 2>&1 &
bench=$!
until server=$(pgrep --parent "$bench" --full 'terrace serve' | head -1) && [ -n "$server" ]; do
    kill -0 "$bench" 2>/dev/null || { cat "$work/log"; exit 1; }
    sleep 0.1
done
sleep "$after"
engine=
for task in "/proc/$server/task/"*; do
    [ "$(cat "$task/comm" 2>/dev/null)" = terrace-engine ] && engine=$(basename "$task")
done
if [ -z "$engine" ]; then
    echo "the server has ended early:" >&2
    wait "$bench" || true
    cat "$work/log" >&2
    exit 1
fi
calls=syscalls:sys_enter_sendmsg,syscalls:sys_enter_sendto,syscalls:sys_enter_recvmsg,syscalls:sys_enter_io_uring_enter,syscalls:sys_enter_futex,syscalls:sys_enter_ppoll
perf stat --tid "$engine" --event "$calls" --output "$work/calls" sleep "$during"
perf record --quiet --freq 2000 -g --tid "$engine" --output "$work/samples" sleep "$during" >/dev/null 2>&1
wait "$bench" || true
grep 'ops/s' "$work/log" || cat "$work/log"

echo "system calls of the engine per second:"
awk -v seconds="$during" '/sys_enter/ { gsub(",", "", $1); sub(".*sys_enter_", "", $2); printf "  %-16s %8.0f\n", $2, $1 / seconds }' "$work/calls"
echo "shares of the engine's samples, in per cent:"
perf report --input "$work/samples" --children --call-graph none --stdio 2>/dev/null | awk '
    $NF == "__sys_sendmsg" || $NF == "__sys_sendto" { sent += $1 }
    $NF == "__sys_recvmsg" { received = $1 + 0 }
    $NF == "__do_sys_io_uring_enter" { submitted = $1 + 0 }
    $NF == "vp_notify" { kicked = $1 + 0 }
    $NF == "__x64_sys_futex" { woken = $1 + 0 }
    $NF == "entry_SYSCALL_64_after_hwframe" { kernel = $1 + 0 }
    $NF == "asm_common_interrupt" || $NF == "asm_sysvec_apic_timer_interrupt" { interrupted += $1 }
    $NF == "asm_exc_page_fault" { faults = $1 + 0 }
    END {
        printf "  %-44s %5.1f\n", "sending packets", sent
        printf "  %-44s %5.1f\n", "receiving packets", received
        printf "  %-44s %5.1f\n", "submitting to the disk (io_uring_enter)", submitted
        printf "  %-44s %5.1f\n", "  of that: notifying the virtual disk", kicked
        printf "  %-44s %5.1f\n", "waking other threads", woken
        printf "  %-44s %5.1f\n", "other system calls", kernel - sent - received - submitted - woken
        printf "  %-44s %5.1f\n", "page faults", faults
        printf "  %-44s %5.1f\n", "interrupts", interrupted
        printf "  %-44s %5.1f\n", "own code and others", 100 - kernel - interrupted - faults
    }'
