#!/bin/sh
# Makes what a test machine boots from, and prints the directory: `vmlinuz`, `initrd.gz` and `base.raw`, a Debian 12 with systemd,
# logind, pure cgroup v2 and containerd. All of it comes from Debian packages and is kept in the cache.
# Needs root, QEMU and mmdebstrap (hack/deps.sh machine), and the mirror of Debian that apt uses here.
set -eu
cd "$(dirname "$0")/.."
. hack/lock.sh

fail() {
    echo "hack/machine.sh: $*" >&2
    exit 1
}
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "test machines are x86_64 Linux; this is $(uname -s) on $(uname -m)"
[ "$(id -u)" = 0 ] || fail "needs root, since mmdebstrap does"
hack/deps.sh build runtime machine >&2

suite=bookworm
cache=${HOLDFAST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/holdfast}/machine
# Another script, other images or another QEMU make another machine.
images=$(hack/pack-image.sh)
second=$(hack/debian.sh forky containerd)
key=$({ cat "$0"; echo "$images $second"; qemu-system-x86_64 --version; } | sha256sum | cut -c -16)
out=$cache/$suite-$key
mkdir -p "$cache"
hold "$cache/lock" "the making of a test machine" 600
if [ -e "$out/base.raw" ]; then
    echo "$out"
    exit
fi
# The disk and its copies: a full disk is named here, and not by whichever tool notices.
free=$(df -Pk "$cache" | awk 'NR == 2 { print $4 }')
[ "$free" -gt 4000000 ] || fail "$cache has $((free / 1024)) MiB free; a test machine needs 4 GiB there: make room, or set HOLDFAST_CACHE"

echo "making a machine in $out (a minute or two, once)" >&2
# Machines of former versions of this script.
rm -rf "$cache/$suite"-* "$cache"/making.*
work=$(mktemp -d "$cache/making.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
root=$work/root

packages=systemd,systemd-sysv,dbus,udev,containerd,runc,containernetworking-plugins,iproute2,iptables,kmod,ca-certificates
packages=$packages,procps,e2fsprogs,nfs-kernel-server,nfs-common,tgt,open-iscsi
# The kernel is unpacked, not installed: its scripts would make an initrd that nobody boots. It has no version of its own in the
# name of the package, so the one that the meta package wants is asked for.
# shellcheck disable=SC2016
if ! mmdebstrap --quiet --variant=minbase --mode=root --include="$packages" \
    --aptopt='Acquire::Retries "3"' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --customize-hook='mkdir -p "$1/kernel" && chroot "$1" sh -c "cd /kernel && apt-get -q download \
        \$(apt-cache depends linux-image-cloud-amd64 | sed -n \"s/.*Depends: \(linux-image-[0-9][^ ]*\)$/\1/p\")"' \
    "$suite" "$root" >"$work/log" 2>&1; then
    tail -n 20 "$work/log" >&2
    fail "mmdebstrap failed (see above); there is no machine without a Debian"
fi
set -- "$root"/kernel/linux-image-*.deb
[ -e "$1" ] || fail "Debian $suite has no kernel linux-image-cloud-amd64 for a test machine"
dpkg-deb -x "$1" "$work/kernel"
rm -rf "$root/kernel" "$root/var/lib/apt/lists" "$root/var/cache/apt"
mkdir -p "$root/var/lib/apt/lists/partial" "$root/var/cache/apt/archives/partial"
version=$(ls "$work/kernel/lib/modules")
cp "$work/kernel/boot/vmlinuz-$version" "$work/vmlinuz"
# Clean roots have /lib as a link; modprobe looks below the directory it is told.
depmod -b "$work/kernel" "$version"

# Modules: those that are named, and what they need. All others stay away, which saves half of the disk.
modules_of() {
    for module; do
        modprobe -d "$work/kernel" -S "$version" --show-depends "$module" 2>/dev/null | awk '$1 == "insmod" { print $2 }' || true
    done | awk '!seen[$0]++'
}
into=$root/usr/lib/modules/$version
mkdir -p "$into"
modules_of virtio_blk virtio_pci virtio_net virtio_console virtio_rng virtio_balloon overlay veth bridge br_netfilter \
    nf_tables nft_compat nft_chain_nat nf_nat xt_comment xt_MASQUERADE xt_mark xt_multiport xt_conntrack xt_addrtype \
    ip_tables iptable_nat iptable_filter loop xfs dm-mod dm-flakey fuse nfs nfsv4 nfsd iscsi_tcp scsi_debug sd_mod ext4 autofs4 \
    qemu_fw_cfg i6300esb softdog button evdev psmouse i8042 zram efivarfs configfs |
    while read -r file; do
        to=$into/${file#*/modules/"$version"/}
        mkdir -p "${to%/*}"
        cp "$file" "$to"
    done
cp "$work/kernel/lib/modules/$version/modules.builtin" "$work/kernel/lib/modules/$version/modules.builtin.modinfo" \
    "$work/kernel/lib/modules/$version/modules.order" "$into/"
depmod -b "$root" "$version"

etc=$root/etc
# The options above are for the making: packages that tests install keep their documents.
rm -f "$etc/dpkg/dpkg.cfg.d/99mmdebstrap"
echo vmnode >"$etc/hostname"
printf '127.0.0.1 localhost vmnode\n' >"$etc/hosts"
printf '/dev/vda / ext4 defaults,errors=remount-ro 0 1\n' >"$etc/fstab"
# Fixed: a machine-id that is set at the first boot would be one more write of it.
echo c0ffee00c0ffee00c0ffee00c0ffee00 >"$etc/machine-id"
chroot "$root" passwd -d root >/dev/null 2>&1
# Nothing goes on by itself in a machine that is watched.
for unit in apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer e2scrub_all.timer e2scrub_reap.service \
    systemd-timesyncd.service getty@tty1.service motd-news.timer logrotate.timer man-db.timer; do
    ln -sfn /dev/null "$etc/systemd/system/$unit"
done
# Started by the tests that want them.
for unit in nfs-server nfs-blkmap nfs-idmapd nfs-mountd nfsdcld rpcbind rpcbind.socket rpc-statd rpc-statd-notify tgt open-iscsi iscsid \
    iscsid.socket containerd systemd-networkd-wait-online; do
    chroot "$root" systemctl disable "$unit" >/dev/null 2>&1 || true
done
chroot "$root" systemctl enable containerd systemd-networkd >/dev/null 2>&1
mkdir -p "$etc/systemd/journald.conf.d" "$etc/systemd/network" "$root/var/log/journal" "$etc/systemd/system.conf.d"
# The journal survives a power cut as far as it got: half of what one wants to know afterwards.
printf '[Journal]\nStorage=persistent\nForwardToConsole=no\nSyncIntervalSec=5s\nRateLimitBurst=0\n' >"$etc/systemd/journald.conf.d/machine.conf"
cat >"$etc/systemd/network/10-machine.network" <<'E'
[Match]
Name=en* eth*
[Network]
Address=10.0.2.15/24
Gateway=10.0.2.2
LinkLocalAddressing=no
E

# The way in: one line in is a script in base64, one line out is its exit code and its output in base64.
cat >"$root/usr/local/sbin/machine-control" <<'E'
#!/bin/bash
exec 3<>/dev/virtio-ports/control
echo HELLO >&3
while IFS= read -r line <&3; do
    [ -n "$line" ] || continue
    out=$(printf %s "$line" | base64 -d | /bin/bash 2>&1 3>&- | base64 -w0; exit "${PIPESTATUS[2]}")
    echo "R $? $out" >&3
done
E
chmod 755 "$root/usr/local/sbin/machine-control"
cat >"$etc/systemd/system/machine-control.service" <<'E'
[Unit]
DefaultDependencies=no
After=dev-virtio\x2dports-control.device systemd-remount-fs.service
Requires=dev-virtio\x2dports-control.device
IgnoreOnIsolate=yes
[Service]
ExecStart=/usr/local/sbin/machine-control
Restart=always
OOMScoreAdjust=-1000
KillMode=process
TasksMax=infinity
Environment=HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
[Install]
WantedBy=sysinit.target
E
chroot "$root" systemctl enable machine-control >/dev/null 2>&1

# containerd as on bookworm, and the one of two major versions later beside it: `machine-containerd 2` changes over.
mkdir -p "$etc/cni/net.d" "$etc/containerd" "$root/opt/containerd-2"
cp -a "$second" "$root/opt/containerd-2/bin"
cat >"$etc/containerd/config.toml" <<'E'
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "holdfast.local/pause:1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = true
E
cat >"$etc/containerd/config-2.toml" <<'E'
version = 3
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "holdfast.local/pause:1"
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["/usr/lib/cni"]
  conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
    SystemdCgroup = true
E
cat >"$root/usr/local/sbin/machine-containerd" <<'E'
#!/bin/sh
# usage: machine-containerd 1|2: which containerd the service runs; images are imported into it.
set -e
drop=/etc/systemd/system/containerd.service.d
rm -rf $drop
if [ "$1" = 2 ]; then
    mkdir -p $drop
    printf '[Service]\nExecStart=\nExecStart=/opt/containerd-2/bin/containerd --config /etc/containerd/config-2.toml\nEnvironment=PATH=/opt/containerd-2/bin:/usr/sbin:/usr/bin:/sbin:/bin\n' >$drop/two.conf
fi
systemctl daemon-reload
systemctl restart containerd
ctr -n k8s.io images import /root/images.tar >/dev/null
E
chmod 755 "$root/usr/local/sbin/machine-containerd"
cat >"$etc/cni/net.d/10-machine.conflist" <<'E'
{"cniVersion": "0.4.0", "name": "machine", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false,
   "ipam": {"type": "host-local", "subnet": "10.88.0.0/24", "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}
]}
E
cp "$images" "$root/root/images.tar"

# The first steps: modules of the disk, and over to it.
ird=$work/initrd
mkdir -p "$ird/bin" "$ird/m" "$ird/dev" "$ird/proc" "$ird/root"
cp -L "$(command -v busybox)" "$ird/bin/busybox"
modules_of virtio_pci virtio_blk ext4 | while read -r file; do
    cp "$file" "$ird/m/"
    basename "$file" >>"$ird/m/order"
done
cat >"$ird/init" <<'E'
#!/bin/busybox sh
/bin/busybox mount -t devtmpfs d /dev
/bin/busybox mount -t proc p /proc
while read -r module; do /bin/busybox insmod "/m/$module"; done </m/order
tries=0
while [ ! -b /dev/vda ] && [ $tries -lt 500 ]; do
    tries=$((tries + 1))
    /bin/busybox usleep 20000
done
/bin/busybox mount -t ext4 -o rw /dev/vda /root || { echo "THE DISK CANNOT BE MOUNTED"; /bin/busybox poweroff -f; }
/bin/busybox umount /proc
/bin/busybox mount --move /dev /root/dev
exec /bin/busybox switch_root /root /sbin/init
E
chmod 755 "$ird/init"
(cd "$ird" && find . | cpio --quiet -o -H newc | gzip -1) >"$work/initrd.gz"

truncate -s 2G "$work/base.raw"
mkfs.ext4 -q -F -E lazy_itable_init=1,lazy_journal_init=1 -L root -d "$root" "$work/base.raw" ||
    fail "mkfs.ext4 could not write the disk"
rm -rf "$root" "$work/kernel" "$ird"
mkdir "$out.new"
mv "$work/vmlinuz" "$work/initrd.gz" "$work/base.raw" "$out.new/"
mv "$out.new" "$out"
echo "$out"
