#!/bin/sh
# Unpacks packages of other Debian releases beside whatever is installed, into the cache, and prints the directory of the
# programs of each. It fetches the versions that were tested last (`tested` below). If the mirror no longer has one, it takes the
# one that is there; it prints a line that begins with "WARNING: " as long as a version in the cache is not the tested one. What
# came once is kept until its directory is deleted.
#
#   hack/debian.sh RELEASE PACKAGE...
#   hack/debian.sh all                 every package below
#
#   hack/debian.sh trixie containerd   1.7, the first that tells container events over CRI
#   hack/debian.sh forky containerd    2.1 or later, the first that mounts images as volumes
#   hack/debian.sh forky kubectl       1.36 or later, which asks for WebSockets first
#
# Nothing is installed; what a package depends on is not unpacked, runc stays the installed one.
set -eu
. "$(dirname "$0")/lock.sh"

fail() {
    echo "hack/debian.sh: $*" >&2
    exit 1
}

# The version of a package of a release that all tests have passed with.
tested() {
    case $1-$2 in
    trixie-containerd) echo '1.7.24~ds1-6+deb13u1' ;;
    forky-containerd) echo '2.1.9+ds1-5' ;;
    forky-kubectl) echo '1.36.4+ds-1' ;;
    esac
}

if [ "$*" = all ]; then
    "$0" trixie containerd
    exec "$0" forky containerd kubectl
fi
if [ $# -lt 2 ]; then
    sed -n '2,16s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
case $* in *[!a-z0-9.+\ -]*) fail "'$*' are no names of a release and of packages" ;; esac
release=$1
shift

cache=${HOLDFAST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/holdfast}/debian
bin_of() { echo "$cache/$release-$1/usr/bin"; }

# The packages whose programs are not there.
missing() {
    for package; do
        [ -n "$(ls -A "$(bin_of "$package")" 2>/dev/null)" ] || printf ' %s' "$package"
    done
}

fetch() {
    for tool in apt-get dpkg-deb; do
        command -v $tool >/dev/null || fail "there is no $tool here to fetch$lacking of Debian $release with:" \
            "put the programs into $(bin_of PACKAGE)"
    done
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -r $keyring ] || fail "$keyring is missing, without it Debian's packages cannot be verified:" \
        "install debian-archive-keyring, or put the programs of$lacking into $(bin_of PACKAGE)"
    # What a killed run left; we hold the lock.
    rm -rf "$cache/fetch.$release".*
    work=$(mktemp -d "$cache/fetch.$release.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    trap 'exit 1' HUP INT TERM
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs"
    # What is installed is no candidate, whatever version it has.
    : >"$work/status"
    echo "deb [signed-by=$keyring] http://deb.debian.org/debian $release main" >"$work/sources.list"
    apt() {
        apt_get "$@" >&2
    }
    apt_get() {
        apt-get -q \
            -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null \
            -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
            -o Dir::State::lists="$work/lists" -o Dir::State::status="$work/status" -o Dir::Cache="$work/cache" \
            -o APT::Sandbox::User=root -o APT::Update::Error-Mode=any \
            -o Acquire::Retries=3 -o Acquire::Languages=none "$@"
    }
    # shellcheck disable=SC2086
    download() {
        apt update || return 1
        for package in $lacking; do
            version=$(tested "$release" "$package")
            (
                cd "$work/debs"
                apt_get --print-uris download "$package" | sed -n "s/.*[/]${package}_\([^_]*\)_.*/\1/p" |
                    sed 's/%2b/+/g; s/%3a/:/g; s/%7e/~/g' >"$package.newest"
                { [ -n "$version" ] && apt download "$package=$version"; } || apt download "$package"
            ) || return 1
        done
    }
    for pause in 5 20 60 0; do
        if download; then
            break
        fi
        [ $pause -gt 0 ] || fail "$lacking of Debian $release cannot be fetched (see above)"
        echo "hack/debian.sh: trying again in $pause s" >&2
        sleep $pause
    done
    for package in $lacking; do
        dpkg-deb -x "$work/debs/${package}"_*.deb "$work/$package"
        dpkg-deb -f "$work/debs/${package}"_*.deb Version >"$work/$package/version"
        mv "$work/debs/$package.newest" "$work/$package/newest"
        rm -rf "${cache:?}/$release-$package"
        mv "$work/$package" "$cache/$release-$package"
    done
    rm -rf "$work"
}

lacking=$(missing "$@")
if [ -n "$lacking" ]; then
    mkdir -p "$cache"
    hold "$cache/$release.lock" "the packages of Debian $release" 300
    lacking=$(missing "$@")
    if [ -n "$lacking" ]; then
        echo "fetching$lacking of Debian $release into $cache (once)" >&2
        fetch
        lacking=$(missing "$@")
        [ -z "$lacking" ] || fail "there are no programs in$lacking of Debian $release"
    fi
    release
fi
for package; do
    bin=$(bin_of "$package")
    version=$(cat "$bin/../../version" 2>/dev/null || echo unknown)
    [ "$version" = "$(tested "$release" "$package")" ] ||
        echo "WARNING: $package of Debian $release is $version; the tests were last passed with $(tested "$release" "$package")" >&2
    newest=$(cat "$bin/../../newest" 2>/dev/null || echo "$version")
    [ "$newest" = "$version" ] || echo "WARNING: Debian $release has $package $newest; the tests use $version" >&2
    # Made for another release, they may want what this one does not have. A static program is none of ldd's business.
    for program in "$bin"/*; do
        wants=$(ldd "$program" 2>&1 | grep 'not found' || true)
        [ -z "$wants" ] || fail "$program does not run on this system: $wants"
    done
    echo "$bin"
done
