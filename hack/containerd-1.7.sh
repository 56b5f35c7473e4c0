#!/bin/sh
# Unpacks containerd 1.7 of Debian 13 beside whatever is installed, into a cache, and prints the directory
# of its programs. 1.7 is the first that tells container events over CRI. runc stays the installed one.
set -eu

cache=${HOLDFAST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/holdfast}
tree=$cache/containerd-1.7
bin=$tree/usr/bin
if [ ! -x "$bin/containerd" ]; then
    mkdir -p "$cache"
    exec 9>"$cache/containerd-1.7.lock"
    flock 9
    if [ ! -x "$bin/containerd" ]; then
        work=$(mktemp -d "$cache/fetch.XXXXXX")
        trap 'rm -rf "$work"' EXIT
        keyring=/usr/share/keyrings/debian-archive-keyring.gpg
        mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs" "$work/tree"
        echo "deb [signed-by=$keyring] http://deb.debian.org/debian trixie main" >"$work/sources.list"
        apt() {
            apt-get -q \
                -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null \
                -o Dir::Etc::preferencesparts=/dev/null -o Dir::State::lists="$work/lists" \
                -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root "$@" >&2
        }
        apt update
        (cd "$work/debs" && apt download containerd)
        dpkg-deb -x "$work"/debs/containerd_*.deb "$work/tree"
        rm -rf "$tree"
        mv "$work/tree" "$tree"
    fi
fi
"$bin/containerd" --version >/dev/null || {
    echo "hack/containerd-1.7.sh: $bin/containerd does not run on this system" >&2
    exit 1
}
echo "$bin"
