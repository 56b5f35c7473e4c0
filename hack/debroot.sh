#!/bin/sh
# Prints the paths of archives with the root of a clean Debian, made by debootstrap from the mirror that apt uses here and
# kept in the cache. usage: hack/debroot.sh minbase|systemd...
# minbase has nothing but what every Debian has, systemd can boot.
set -eu
cd "$(dirname "$0")/.."
. hack/lock.sh

suite=bookworm
[ $# -gt 0 ] || set -- ""
for kind; do
    case $kind in minbase | systemd) ;; *) echo "usage: hack/debroot.sh minbase|systemd..." >&2; exit 2 ;; esac
done
if [ "$(id -u)" != 0 ]; then
    echo "hack/debroot.sh: needs root, since debootstrap does" >&2
    exit 1
fi
hack/deps.sh test >&2

cache=${HOLDFAST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/holdfast}/debootstrap
work=
trap '[ -z "$work" ] || rm -rf "$work"' EXIT
for kind; do
    archive=$cache/$suite-$kind.tar
    include=
    [ "$kind" = minbase ] || include=systemd,systemd-sysv,dbus
    hold "$archive.lock" "the making of $archive" 600
    if [ ! -e "$archive" ]; then
        mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' "Codename: $suite" 2>/dev/null | head -n 1)
        mirror=${mirror:-http://deb.debian.org/debian}
        echo "making $archive with debootstrap from $mirror (a minute or two, once)" >&2
        # What a killed run left; we hold the lock.
        rm -rf "$cache/making-$kind".*
        work=$(mktemp -d "$cache/making-$kind.XXXXXX")
        if ! debootstrap --variant=minbase ${include:+"--include=$include"} "$suite" "$work/root" "$mirror" >"$work/log" 2>&1; then
            tail -n 20 "$work/log" >&2
            echo "hack/debroot.sh: debootstrap failed (see above); the package cannot be tested without a clean Debian" >&2
            exit 1
        fi
        rm -rf "$work/root/var/cache/apt/archives" "$work/root/var/lib/apt/lists"
        mkdir -p "$work/root/var/cache/apt/archives/partial" "$work/root/var/lib/apt/lists/partial"
        tar -C "$work/root" --numeric-owner --xattrs -cf "$work/tar" .
        mv "$work/tar" "$archive"
        rm -rf "$work"
        work=
    fi
    release
    echo "$archive"
done
