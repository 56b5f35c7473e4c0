#!/bin/sh
# Installs the Debian packages that building, testing and the demo need, where they are missing.
# usage: hack/deps.sh [build|runtime|test|deb|fuzz|envtest|machine]...
# Without one: all but fuzz, envtest and machine, which hack/fuzz.sh, hack/envtest.sh and hack/machine.sh ask for.
set -eu

[ $# -gt 0 ] || set -- build runtime test deb

wanted=
for group; do
    case $group in
    build) wanted="$wanted protobuf-compiler:protoc gcc:cc libc6-dev:/usr/include/stdio.h" ;;
    runtime) wanted="$wanted containerd:containerd runc:runc
        containernetworking-plugins:/usr/lib/cni/bridge busybox-static:busybox iptables:iptables
        iproute2:ip util-linux:flock" ;;
    test) wanted="$wanted strace:strace docker-registry:docker-registry debootstrap:debootstrap
        systemd:systemd-analyze mandoc:mandoc curl:curl python3:python3 util-linux:flock zsh:zsh fish:fish" ;;
    deb) wanted="$wanted dpkg-dev:dpkg-shlibdeps binutils:strip util-linux:flock" ;;
    fuzz) wanted="$wanted g++:c++" ;;
    envtest) wanted="$wanted dpkg-dev:dpkg-source make:make rsync:rsync util-linux:flock" ;;
    machine) wanted="$wanted qemu-system-x86:qemu-system-x86_64 qemu-utils:qemu-img mmdebstrap:mmdebstrap cpio:cpio
        e2fsprogs:mkfs.ext4 kmod:modprobe util-linux:flock" ;;
    *) echo "hack/deps.sh: unknown group '$group': build, runtime, test, deb, fuzz, envtest or machine" >&2; exit 2 ;;
    esac
done

PATH=$PATH:/usr/sbin:/sbin
missing=
for pair in $wanted; do
    package=${pair%%:*} sign=${pair#*:}
    case $sign in
    /*) [ -e "$sign" ] || missing="$missing $package" ;;
    *) command -v "$sign" >/dev/null || missing="$missing $package" ;;
    esac
done
# A busybox that needs libraries cannot live alone in an image.
case " $* " in *" runtime "*)
    if command -v busybox >/dev/null && ldd "$(command -v busybox)" >/dev/null 2>&1; then
        missing="$missing busybox-static"
    fi ;;
esac
[ -n "$missing" ] || exit 0

if [ "$(uname -s)" != Linux ]; then
    echo "hack/deps.sh: holdfast needs Linux; this is $(uname -s)" >&2
    exit 1
fi
if ! command -v apt-get >/dev/null; then
    echo "hack/deps.sh: missing:$missing; there is no apt-get here, install them by your own means" >&2
    exit 1
fi
if [ "$(id -u)" != 0 ]; then
    echo "hack/deps.sh: missing:$missing; run as root, or: sudo apt-get install$missing" >&2
    exit 1
fi
echo "installing:$missing"
# Debian starts services at installation; no second container runtime is wanted on this machine.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
fi
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086
apt-get install -y --no-install-recommends $missing >/dev/null 2>&1 || {
    # An installation that was interrupted once makes every later one fail.
    dpkg --configure -a >/dev/null 2>&1 || true
    apt-get update >/dev/null || true
    apt-get install -y --no-install-recommends $missing || {
        echo "hack/deps.sh: apt-get cannot install$missing (see above): mend its sources or the network, or install them by other means" >&2
        exit 1
    }
}
