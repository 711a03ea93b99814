#!/bin/busybox sh
# The first process of a guest that swaps to its first virtio disk. The kernel's command line says how much memory the
# program uses, and how often: terrace.mib=N terrace.passes=N.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
# shellcheck disable=SC2013 # the command line is words
for word in $(cat /proc/cmdline); do
    case "$word" in
    terrace.mib=*) mib=${word#*=} ;;
    terrace.passes=*) passes=${word#*=} ;;
    esac
done
while read -r module; do
    insmod "/lib/modules/$module.ko" || echo "init: no module $module"
done </lib/modules/boot.list
mkswap /dev/vda && swapon -d /dev/vda || echo "init: no swap"
grep MemTotal /proc/meminfo
swap_pattern "$mib" "$passes"
echo "init: exit status $?"
grep pswp /proc/vmstat
swapoff /dev/vda && echo "init: swap is off"
echo "init: end"
poweroff -f
