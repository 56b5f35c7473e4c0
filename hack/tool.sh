#!/bin/sh
# Prints the path of a program that comes from crates.io, which is built into the cache unless it is there.
# usage: hack/tool.sh CRATE VERSION
set -eu
. "$(dirname "$0")/lock.sh"

crate=${1:?usage: hack/tool.sh CRATE VERSION} version=${2:?usage: hack/tool.sh CRATE VERSION}
cache=${HOLDFAST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/holdfast}
tool=$cache/tools/bin/$crate
mkdir -p "$cache/tools"
hold "$cache/tools/$crate.lock" "the build of $crate" 900
# What cargo has installed there, with its version: programs print theirs in many ways.
if [ ! -x "$tool" ] || ! cargo install --list --root "$cache/tools" | grep -qx "$crate v$version:"; then
    echo "building $crate $version into $cache/tools (some minutes, once)" >&2
    # A directory of its own: the toolchain of today need not suit the artefacts of this project.
    CARGO_TARGET_DIR="$cache/tools/build-$crate" cargo install --quiet --locked --force \
        --root "$cache/tools" --version "$version" "$crate" >&2 9>&-
    rm -rf "$cache/tools/build-$crate"
fi
echo "$tool"
