#!/bin/busybox sh
# The first process of a guest that swaps: to its first virtio disk, or to a file of `terrace swap-device` below a loop device.
# The kernel's command line has
#   terrace.mib=N terrace.passes=N   how much memory the program uses, and how often
#   terrace.node=ADDRESS:PORT        the memory node of a file, which has 192 MiB. The program alone is short of memory then, in a
#                                    control group of 64 MiB: the file's process has to have some (docs/swap-device.md, "Deadlocks")
#   terrace.reserve=KIB              all of the guest is short of memory instead, and the kernel has this reserve
#   terrace.kills=1                  the file's process is killed when the program has verified its memory once
/bin/busybox --install -s /bin
export PATH=/bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
node='' reserve='' kills='' disk=/dev/vda
# shellcheck disable=SC2013 # the command line is words
for word in $(cat /proc/cmdline); do
    case "$word" in
    terrace.mib=*) mib=${word#*=} ;;
    terrace.passes=*) passes=${word#*=} ;;
    terrace.node=*) node=${word#*=} ;;
    terrace.reserve=*) reserve=${word#*=} ;;
    terrace.kills=*) kills=${word#*=} ;;
    esac
done
while read -r module; do
    # A module that is there already is what another one needed before.
    grep -q "^$module " /proc/modules || insmod "/lib/modules/$module.ko" || echo "init: no module $module"
done </lib/modules/boot.list

serve_file() {
    ip link set lo up
    ip link set eth0 mtu 9000 up
    ip addr add 192.0.2.2/24 dev eth0
    mkdir /disk
    : >/tmp/device
    # With a reserve, its packets are to have a part of that.
    ${reserve:+/bin/chrt --rr 1} terrace swap-device --memory-node "$node" --size 192M --mount /disk >/tmp/device 2>&1 &
    device=$!
    until grep -q '^swap device of' /tmp/device || ! kill -0 $device; do
        sleep 0.1
    done
    cat /tmp/device
    # The shell of busybox prefers its own, which knows no direct IO.
    disk=$(/bin/losetup --find --show --direct-io=on /disk/swap) || echo "init: no loop device"
    mkdir /cgroup
    mount -t cgroup2 cgroup /cgroup
    echo +memory >/cgroup/cgroup.subtree_control
    mkdir /cgroup/program
    if [ -n "$reserve" ]; then
        echo "$reserve" >/proc/sys/vm/min_free_kbytes
        echo 0 >/proc/sys/vm/watermark_boost_factor
    else
        echo 64M >/cgroup/program/memory.max
    fi
}

run_program() {
    sh -c "[ -z '$node' ] || echo \$\$ >/cgroup/program/cgroup.procs; exec swap_pattern $mib $passes"
}

run_and_kill_device() {
    run_program >/tmp/program &
    program=$!
    until grep -q 'pass 1: verified' /tmp/program; do
        sleep 0.1
    done
    kill -9 $device
    wait $program
}

[ -z "$node" ] || serve_file
mkswap "$disk" && swapon -d "$disk" || echo "init: no swap"
grep MemTotal /proc/meminfo
if [ -n "$kills" ]; then
    run_and_kill_device
else
    run_program
fi
echo "init: exit status $?"
grep pswp /proc/vmstat
swapoff "$disk" && echo "init: swap is off"
if [ -n "$node" ]; then
    /bin/losetup --detach "$disk"
    kill -USR1 $device && sleep 1 && kill $device && wait $device && echo "init: the device has ended"
    tail -n +2 /tmp/device
fi
echo "init: end"
poweroff -f
