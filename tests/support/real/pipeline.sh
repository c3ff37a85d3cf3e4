#!/bin/sh
# A script as they are written: pipelines in the background, and an end that does not wait for them. When all their
# members live it prints one line with their pids, and apart from them that of the one which ignores SIGTERM:
#
#     {"service": 4700, "members": [4711, 4712, 4713, 4714], "deaf": [4715]}
#
# With the argument `wait` it stays until it is killed.

dir=$(mktemp -d) || exit
mkfifo "$dir/members" || exit
# Read and write, so that opening does not wait for the other side.
exec 3<>"$dir/members"
rm -r "$dir"

member='echo "$0" $$ >&3; exec "$@" 3>&-'

sh -c "$member" members tail -f /dev/null | sh -c "$member" members cat | sh -c "$member" members cat >/dev/null &
nohup sh -c "$member" members sleep 1000 2>/dev/null | (trap '' TERM && exec sh -c "$member" deaf sleep 1000) &

members= deaf=
for _ in 1 2 3 4 5; do
    read -r role pid <&3
    case $role in
        members) members=${members:+$members, }$pid ;;
        deaf) deaf=$pid ;;
    esac
done
echo "{\"service\": $$, \"members\": [$members], \"deaf\": [$deaf]}"

if [ "$1" = wait ]; then
    exec sleep 1000 3>&-
fi
