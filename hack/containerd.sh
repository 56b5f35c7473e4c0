#!/bin/sh
# A containerd of one's own: root, state, socket, network bridge and log under one directory.
#
#   hack/containerd.sh start DIR        start it (again); with images on the first start
#   hack/containerd.sh stop-daemon DIR  stop the daemon alone; containers run on
#   hack/containerd.sh stop DIR         stop containers and daemon, unmount, delete the bridge and DIR
#
# The socket is DIR/containerd.sock. Environment:
#   CONTAINERD_BIN  directory of containerd, ctr and the shim, when it is not the installed one (hack/debian.sh)
#   CONTAINERD_SNAPSHOTTER  overlayfs (default) or native
set -eu

usage() {
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
}
[ $# = 2 ] || usage
action=$1 dir=$2
hack=$(cd "$(dirname "$0")" && pwd)
PATH=${CONTAINERD_BIN:+$CONTAINERD_BIN:}$PATH:/usr/sbin:/sbin
export PATH

fail() {
    echo "hack/containerd.sh: $*" >&2
    exit 1
}
[ "$(id -u)" = 0 ] || fail "a container runtime needs root"
mkdir -p "$dir"
dir=$(cd "$dir" && pwd -P)
case $dir in / | /usr* | /etc* | /home | /root | /var | /tmp) fail "$dir is not a directory of its own" ;; esac
sock=$dir/containerd.sock
[ ${#sock} -lt 90 ] || fail "$dir is too long a path for a socket"

ctr_() { ctr --address "$sock" --namespace k8s.io "$@"; }

# The daemon's pid, if it lives and is ours.
daemon() {
    [ -f "$dir/containerd.pid" ] || return 1
    pid=$(cat "$dir/containerd.pid")
    [ -n "$pid" ] && tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -qF -- "$dir/config.toml" &&
        echo "$pid"
}

# Pids of the shims that serve our socket.
shims() {
    # One program for all processes, of which there may be hundreds.
    grep -lzxF -- "$sock" /proc/[0-9]*/cmdline 2>/dev/null | while IFS=/ read -r _ _ pid _; do
        { read -r name <"/proc/$pid/comm"; } 2>/dev/null || continue
        case $name in containerd-shim*) echo "$pid" ;; esac
    done
}

descendants() {
    for child in $(cat /proc/"$1"/task/*/children 2>/dev/null); do
        echo "$child"
        descendants "$child"
    done
}

# Waits up to $1 tenths of a second until the command fails.
until_fails() {
    tenths=$1
    shift
    while "$@" >/dev/null 2>&1; do
        [ "$tenths" -gt 0 ] || return 1
        tenths=$((tenths - 1))
        sleep 0.1
    done
}

configure() {
    # A bridge and a subnet that nobody on this machine has, claimed under a lock.
    exec 8>/run/holdfast-network.lock
    flock 8
    number=$(printf %s "$dir" | cksum | cut -d' ' -f1)
    tries=0
    while :; do
        second=$((64 + number / 256 % 64)) third=$((number % 256))
        subnet=10.$second.$third
        bridge=hf$second-$third
        if ! ip -4 addr | grep -qF " $subnet." && ! ip link show "$bridge" >/dev/null 2>&1; then
            break
        fi
        number=$((number + 1)) tries=$((tries + 1))
        [ $tries -lt 1000 ] || fail "no free subnet in 10.64.0.0/10"
    done
    ip link add name "$bridge" type bridge
    # Whose it is, for those who clean up after us.
    ip link set "$bridge" alias "$dir"
    ip addr add "$subnet.1/24" dev "$bridge"
    ip link set "$bridge" up
    flock -u 8
    echo "$bridge" >"$dir/bridge"
    mkdir -p "$dir/cni" "$dir/root" "$dir/state"
    cat >"$dir/cni/10-holdfast.conflist" <<EOF
{"cniVersion": "0.4.0", "name": "$bridge", "plugins": [
  {"type": "bridge", "bridge": "$bridge", "isGateway": true, "ipMasq": false,
   "ipam": {"type": "host-local", "dataDir": "$dir/cni-data",
            "ranges": [[{"subnet": "$subnet.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}
]}
EOF
    said=$(containerd --version)
    major=$(echo "$said" | sed -n 's/^[^ ]* [^ ]* v\{0,1\}\([0-9][0-9]*\)\..*/\1/p')
    [ -n "$major" ] || fail "which version is \"$said\"?"
    if [ "$major" -ge 2 ]; then
        configuration_3 >"$dir/config.toml"
    else
        configuration_2 >"$dir/config.toml"
    fi
}

# What all versions share. It comes before what is in tables of plugins.
common() {
    cat <<EOF
root = "$dir/root"
state = "$dir/state"
disabled_plugins = [
  "io.containerd.differ.v1.erofs",
  "io.containerd.internal.v1.opt",
  "io.containerd.internal.v1.tracing",
  "io.containerd.nri.v1.nri",
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.blockfile",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.erofs",
  "io.containerd.snapshotter.v1.zfs",
  "io.containerd.tracing.processor.v1.otlp",
]

[grpc]
  address = "$sock"
EOF
}

# Of containerd 1.6 and 1.7.
configuration_2() {
    echo 'version = 2'
    common
    cat <<EOF

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "holdfast.local/pause:1"
  # A machine without CAP_SYS_RESOURCE cannot lower a score.
  restrict_oom_score_adj = true
  disable_tcp_service = true
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "${CONTAINERD_SNAPSHOTTER:-overlayfs}"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$dir/cni"
EOF
}

# Of containerd from 2.0 on.
configuration_3() {
    # Newer ones take several directories, and no single one beside them.
    cni_programs='bin_dir = "/usr/lib/cni"'
    if containerd config default | grep -q '^ *bin_dirs *='; then
        cni_programs='bin_dirs = ["/usr/lib/cni"]'
    fi
    echo 'version = 3'
    common
    cat <<EOF

[plugins."io.containerd.cri.v1.images"]
  snapshotter = "${CONTAINERD_SNAPSHOTTER:-overlayfs}"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "holdfast.local/pause:1"

[plugins."io.containerd.cri.v1.runtime"]
  # A machine without CAP_SYS_RESOURCE cannot lower a score.
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.cri.v1.runtime".cni]
    $cni_programs
    conf_dir = "$dir/cni"

[plugins."io.containerd.grpc.v1.cri"]
  disable_tcp_service = true
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
EOF
}

silent() { ! ctr_ version; }
initializing() { ! tail -c +"$((logged + 1))" "$dir/containerd.log" | grep -q 'Start streaming server'; }

start() {
    for tool in containerd ctr runc ip flock busybox; do
        command -v $tool >/dev/null || fail "$tool is missing; run hack/deps.sh runtime"
    done
    [ -x /usr/lib/cni/bridge ] || fail "/usr/lib/cni/bridge is missing; run hack/deps.sh runtime"
    if daemon >/dev/null; then
        return
    fi
    first=
    if [ ! -f "$dir/config.toml" ]; then
        first=1
        configure
    fi
    rm -f "$sock"
    touch "$dir/containerd.log"
    logged=$(stat -c %s "$dir/containerd.log")
    setsid containerd --config "$dir/config.toml" >>"$dir/containerd.log" 2>&1 </dev/null &
    echo $! >"$dir/containerd.pid"
    # CRI answers a little later than the rest; its streaming server comes last.
    if ! until_fails 600 initializing; then
        tail -5 "$dir/containerd.log" >&2
        fail "the CRI plugin does not start; see $dir/containerd.log"
    fi
    if ! until_fails 300 silent; then
        fail "containerd does not answer on $sock; see $dir/containerd.log"
    fi
    if [ -n "$first" ]; then
        image=$("$hack/pack-image.sh")
        ctr_ images import "$image" >/dev/null
        ctr_ images label holdfast.local/pause:1 io.cri-containerd.pinned=pinned >/dev/null
        # CRI takes notice of imported images a moment later.
        if ! until_fails 100 unnoticed; then
            fail "the CRI plugin does not notice the imported images; see $dir/containerd.log"
        fi
    fi
}

unnoticed() { [ "$(ctr_ images ls | grep -c 'io.cri-containerd.image=managed')" -lt 2 ]; }

# Deletes the port forwardings of a network: who would take the port next would not get its packets.
forget_host_ports() {
    iptables -w -t nat -S CNI-HOSTPORT-DNAT 2>/dev/null | grep -F -- "\"$1\\\"" | sed 's/^-A/-D/' |
        while read -r rule; do
            # The rule is quoted for a shell.
            eval "iptables -w -t nat $rule" || true
            chain=${rule##* }
            iptables -w -t nat -F "$chain" && iptables -w -t nat -X "$chain" || true
        done
}

stop_daemon() {
    pid=$(daemon) || return 0
    kill "$pid" 2>/dev/null || true
    until_fails 50 kill -0 "$pid" || kill -9 "$pid" 2>/dev/null || true
    until_fails 50 kill -0 "$pid" || true
    rm -f "$dir/containerd.pid"
}

stop() {
    processes=
    for shim in $(shims); do
        processes="$processes $(descendants "$shim" | tr '\n' ' ')"
    done
    spaces="" cgroups=""
    for pid in $processes; do
        spaces="$spaces $(stat -Lc %i "/proc/$pid/ns/net" 2>/dev/null || true)"
        cgroups="$cgroups $(cut -d: -f3 "/proc/$pid/cgroup" 2>/dev/null | sort -u | tr '\n' ' ')"
    done

    # In order, while the daemon answers: that cleans up after each container.
    if daemon >/dev/null; then
        timeout 5 ctr --address "$sock" --namespace k8s.io tasks ls -q 2>/dev/null |
            xargs -r -P 8 -n 1 timeout 10 ctr --address "$sock" --namespace k8s.io tasks delete --force \
                >/dev/null 2>&1 || true
    fi
    stop_daemon

    # By force, what is left.
    for shim in $(shims); do
        for pid in $(descendants "$shim") "$shim"; do
            kill -9 "$pid" 2>/dev/null || true
        done
        until_fails 50 kill -0 "$shim" || true
    done
    own=$(stat -Lc %i /proc/self/ns/net)
    stat -Lc '%i %n' /run/netns/cni-* 2>/dev/null | while read -r inode file; do
        [ "$inode" != "$own" ] || continue
        case " $spaces " in *" $inode "*)
            umount "$file" 2>/dev/null || true
            rm -f "$file"
            ;;
        esac
    done
    # Innermost first; a container's mounts may be stacked.
    cut -d' ' -f5 /proc/self/mountinfo | grep -aF -- "$dir/" | sort -r | while read -r mount; do
        umount "$mount" 2>/dev/null || umount -l "$mount" 2>/dev/null || true
    done
    for path in $cgroups; do
        case $path in /k8s.io/* | */kubepods/*) ;; *) continue ;; esac
        rmdir /sys/fs/cgroup"$path" /sys/fs/cgroup/*"$path" 2>/dev/null || true
        rm -rf "/run/containerd/runc/k8s.io/${path##*/}"
    done
    for sandbox in "$dir"/root/io.containerd.grpc.v1.cri/sandboxes/*; do
        [ -d "$sandbox" ] || continue
        id=${sandbox##*/}
        rm -f /var/lib/cni/results/cni-loopback-"$id"-*
        # Where a killed shim leaves its socket.
        rm -f /run/containerd/s/"$(printf %s "$sock/k8s.io/$id" | sha256sum | cut -d' ' -f1)"
    done
    if [ -f "$dir/bridge" ]; then
        bridge=$(cat "$dir/bridge")
        ip link del "$bridge" 2>/dev/null || true
        forget_host_ports "$bridge"
        rm -f /var/lib/cni/results/"$bridge"-*
    fi
    if grep -qaF -- " $dir/" /proc/self/mountinfo; then
        fail "something is still mounted under $dir; it is left there"
    fi
    # Not all of DIR: a test's own files may lie beside.
    rm -rf "$dir/root" "$dir/state" "$dir/cni" "$dir/cni-data" "$dir/config.toml" "$dir/bridge" \
        "$dir/containerd.pid" "$dir/containerd.sock" "$dir/containerd.sock.ttrpc"
    rm -f "$dir/containerd.log"
    rmdir "$dir" 2>/dev/null || true
}

case $action in
start) start ;;
stop-daemon) stop_daemon ;;
stop) stop ;;
*) usage ;;
esac
