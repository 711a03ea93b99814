#!/bin/busybox sh
# The guest's first process: brings up one interface with rxe on it, and serves commands over TCP (session.sh).
# The kernel's command line says with which addresses and MTU: terrace.ipv4=A/N terrace.ipv6=A/N terrace.mtu=N.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
ulimit -l unlimited
# shellcheck disable=SC2013 # the command line is words
for word in $(cat /proc/cmdline); do
    case "$word" in
    terrace.ipv4=*) ipv4=${word#*=} ;;
    terrace.ipv6=*) ipv6=${word#*=} ;;
    terrace.mtu=*) mtu=${word#*=} ;;
    esac
done
while read -r module; do
    # A module that is there already is what another one needed before.
    grep -q "^$module " /proc/modules || insmod "/lib/modules/$module.ko" || echo "init: no module $module"
done </lib/modules/boot.list
# Nobody else is on this network: an address may be used at once.
echo 0 >/proc/sys/net/ipv6/conf/eth0/accept_dad
echo 0 >/proc/sys/net/ipv6/conf/eth0/accept_ra
ip link set lo up
ip link set eth0 mtu "$mtu" up
ip addr add "$ipv4" dev eth0
ip addr add "$ipv6" dev eth0
rdma link add rxe0 type rxe netdev eth0 || echo "init: no rxe"
echo "init: ready"
exec nc -ll -p 7000 -e /bin/session
