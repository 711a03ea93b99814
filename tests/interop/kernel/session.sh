#!/bin/busybox sh
# One connection of the guest's command channel: the first line is the command, whose input and output are the connection.
# The last line that goes out is its exit status.
export PATH=/bin
read -r command || exit 0
sh -c "$command" 2>&1
echo "session: exit status $?"
