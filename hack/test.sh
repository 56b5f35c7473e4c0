#!/bin/sh
# Runs all tests side by side (.config/nextest.toml) and closes with one line that counts them. Arguments are handed to
# `cargo nextest run`: hack/test.sh -E 'binary(cli)'.
# Tests of the runtime use a private containerd, which needs root and Linux; tests of the node use a private
# etcd and kube-apiserver, which hack/envtest.sh provides; tests of the package use clean Debian roots, which hack/debroot.sh
# provides; tests of other versions of containerd and kubectl use those of later Debian releases, which hack/debian.sh provides.
set -eu
cd "$(dirname "$0")/.."

if [ "$(uname -s)" != Linux ]; then
    echo "make test: holdfast runs on Linux only; this is $(uname -s)" >&2
    exit 1
fi
if [ "$(id -u)" != 0 ]; then
    echo "make test: needs root, since it runs containers on a private containerd: sudo make test" \
        "(what needs no containers: make quick)" >&2
    exit 1
fi
if ! command -v cargo >/dev/null; then
    echo "make test: no cargo in the PATH; install Rust (https://rustup.rs)" >&2
    exit 1
fi
hack/deps.sh
HOLDFAST_ENVTEST=$(hack/envtest.sh | tail -1)
if [ -z "$HOLDFAST_ENVTEST" ]; then
    echo "make test: THERE IS NO kube-apiserver TO TEST AGAINST (see above); nothing was tested" >&2
    exit 1
fi
export HOLDFAST_ENVTEST
# What the package is made and tested with; minutes the first time, so not while tests wait for it.
if ! { hack/deb.sh tools && hack/debroot.sh minbase systemd; } >/dev/null; then
    echo "make test: THE DEBIAN PACKAGE CANNOT BE TESTED (see above); nothing was tested" >&2
    exit 1
fi
if ! hack/debian.sh all >/dev/null; then
    echo "make test: OTHER VERSIONS OF containerd AND kubectl CANNOT BE TESTED (see above); nothing was tested" >&2
    exit 1
fi

PATH=$(hack/nextest.sh):$PATH
export PATH

# All at once, with the programs that tests and runner start. The same selection as the runner's, or cargo would build
# dependencies twice, for two sets of features.
begin=$(date +%s)
cargo build --workspace --all-features --locked --bins --tests
echo "building took $(($(date +%s) - begin)) s"
target=$(cargo metadata --format-version 1 --no-deps --offline | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
exec "$target/debug/test-runner" run --scope 'not binary(=machine)' "$@"
