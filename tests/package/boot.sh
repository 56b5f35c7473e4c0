#!/bin/bash
# Boots a root directory: systemd is PID 1 of namespaces of its own (mounts, processes, network, cgroups), so that nothing
# of the machine is reached but the directory. Ends when it is killed, and takes all of it along.
# usage: boot.sh ROOT CGROUP   (CGROUP: a directory of cgroup v2 that was made for it)
set -euo pipefail

root=$1 cgroup=$2
echo $$ >"$cgroup/cgroup.procs"
exec unshare --cgroup --mount --pid --uts --ipc --net --fork --kill-child --propagation private \
    bash -euo pipefail -c '
root=$1
mount --bind "$root" "$root"
mount --make-rshared "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for node in null zero full random urandom tty; do
    touch "$root/dev/$node"
    mount --bind "/dev/$node" "$root/dev/$node"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
PATH=$PATH:/sbin:/usr/sbin ip link set lo up
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    chroot "$root" /lib/systemd/systemd --log-target=journal --show-status=no
' - "$root"
