#!/bin/sh
# Provides etcd, kube-apiserver and kubectl for the tests and prints the directory that holds them, as the last
# line: $KUBEBUILDER_ASSETS where that is set, else a directory of the cache, built once from Debian 12's packages
# (some minutes, 3 GiB of disk meanwhile). Nothing is installed but what hack/deps.sh names, no service is started
# and the system's package sources stay as they are.
set -eu
hack=$(cd "$(dirname "$0")" && pwd)
. "$hack/lock.sh"

fail() {
    echo "hack/envtest.sh: $*" >&2
    exit 1
}

# The programs that a directory lacks.
missing_in() {
    for program in etcd kube-apiserver kubectl; do
        [ -x "$1/$program" ] || printf ' %s' "$program"
    done
}

# Whether its programs run here.
check() {
    for program in "etcd --version" "kube-apiserver --version" "kubectl version --client"; do
        # shellcheck disable=SC2086
        "$1"/$program >/dev/null 2>&1 || fail "$1/${program%% *} does not run on this system"
    done
}

if [ -n "${KUBEBUILDER_ASSETS:-}" ]; then
    missing=$(missing_in "$KUBEBUILDER_ASSETS")
    [ -z "$missing" ] || fail "KUBEBUILDER_ASSETS is $KUBEBUILDER_ASSETS, where there is no:$missing" \
        "(unset it to use the cache, or fill it: setup-envtest use)"
    assets=$(cd "$KUBEBUILDER_ASSETS" && pwd)
    check "$assets"
    echo "$assets"
    exit 0
fi

cache=${HOLDFAST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/holdfast}/envtest

# The way they are built; another one makes what is in caches obsolete.
recipe=2

# The newest complete directory: kubernetes-<version of Debian's source package>-r<recipe>.
cached() {
    for dir in "$cache"/kubernetes-*-r$recipe; do
        [ -n "$(missing_in "$dir")" ] || echo "$dir"
    done | sort -V | tail -1
}

build() {
    [ "$(uname -s)" = Linux ] || fail "holdfast needs Linux; this is $(uname -s)"
    for tool in apt-get dpkg-deb; do
        command -v $tool >/dev/null || fail "there is no kube-apiserver in $cache and no $tool here to build one:" \
            "let KUBEBUILDER_ASSETS name a directory with etcd, kube-apiserver and kubectl"
    done
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -r $keyring ] || fail "$keyring is missing, without it Debian's packages cannot be verified:" \
        "install debian-archive-keyring, or let KUBEBUILDER_ASSETS name the programs"
    "$hack/deps.sh" envtest >&2

    # What a killed build left; we hold the lock.
    rm -rf "$cache"/build.*
    work=$(mktemp -d "$cache/build.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    trap 'exit 1' HUP INT TERM
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs" "$work/source" "$work/tree" \
        "$work/home" "$work/assets"
    for kind in deb deb-src; do
        echo "$kind [signed-by=$keyring] http://deb.debian.org/debian bookworm main"
    done >"$work/sources.list"
    apt() {
        apt-get -q \
            -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null \
            -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
            -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" \
            -o APT::Sandbox::User=root -o Acquire::Retries=3 "$@" >&2
    }
    echo "building kube-apiserver into $cache (some minutes, once)" >&2
    apt update
    (cd "$work/source" && apt source --only-source kubernetes)
    # Debian 12's own compiler, whatever this system has: later ones need not build this source.
    (cd "$work/debs" && apt download etcd-server kubernetes-client golang-1.19-go golang-1.19-src \
        golang-github-modern-go-reflect2-dev)
    for deb in "$work"/debs/*.deb; do
        dpkg-deb -x "$deb" "$work/tree"
    done

    version=$(sed -n 's/^Version: //p' "$work"/source/kubernetes_*.dsc | head -1)
    [ -n "$version" ] || fail "no version in $work/source/kubernetes_*.dsc"
    (
        cd "$work"/source/kubernetes-*/
        # Its own reflect2 1.0.1 calls into a Go before 1.18: a server with it dies whenever it writes a map as YAML
        # or as JSON that is indented, which is what curl gets.
        reflect2=vendor/github.com/modern-go/reflect2
        rm -r $reflect2
        cp -r "$work/tree/usr/share/gocode/src/github.com/modern-go/reflect2" $reflect2
        export HOME="$work/home" GOROOT="$work/tree/usr/lib/go-1.19" GOPATH="$PWD/.go" GOCACHE="$work/home/go-build"
        export PATH="$GOROOT/bin:$PATH" CGO_ENABLED=0 GO111MODULE=off GOFLAGS= GOTOOLCHAIN=local
        # A make that calls us hands its own flags down.
        unset MAKEFLAGS MFLAGS MAKELEVEL
        make WHAT=cmd/kube-apiserver >"$work/log" 2>&1
    ) || {
        tail -30 "$work/log" >&2
        fail "kube-apiserver of Debian's kubernetes $version does not build"
    }
    cp -L "$work"/source/kubernetes-*/_output/bin/kube-apiserver "$work/assets/"
    cp "$work/tree/usr/bin/etcd" "$work/tree/usr/bin/kubectl" "$work/assets/"
    check "$work/assets"
    rm -rf "$cache/kubernetes-$version-r$recipe"
    mv "$work/assets" "$cache/kubernetes-$version-r$recipe"
    rm -rf "$work"
}

assets=$(cached)
if [ -z "$assets" ]; then
    mkdir -p "$cache"
    hold "$cache/../envtest.lock" "the build of kube-apiserver" 1800
    assets=$(cached)
    if [ -z "$assets" ]; then
        build
        assets=$(cached)
        [ -n "$assets" ] || fail "the build left nothing usable in $cache"
    fi
    release
fi
check "$assets"
echo "$assets"
