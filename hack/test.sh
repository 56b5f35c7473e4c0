#!/bin/sh
# Runs all tests and closes with one line that counts them. Arguments are handed to `cargo test`.
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
        "(what needs no containers: cargo test --lib)" >&2
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
if ! { hack/deb.sh tools && hack/debroot.sh minbase && hack/debroot.sh systemd; } >/dev/null; then
    echo "make test: THE DEBIAN PACKAGE CANNOT BE TESTED (see above); nothing was tested" >&2
    exit 1
fi
if ! { hack/debian.sh trixie containerd && hack/debian.sh forky containerd kubectl; } >/dev/null; then
    echo "make test: OTHER VERSIONS OF containerd AND kubectl CANNOT BE TESTED (see above); nothing was tested" >&2
    exit 1
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The status of a pipe is that of its end: the status of the tests goes through a file.
{
    status=0
    cargo test --workspace --all-features --locked --no-fail-fast "$@" 2>&1 || status=$?
    echo "$status" >"$work/status"
} | tee "$work/log"

awk '
    /^test result: / {
        for (i = 1; i < NF; i++) {
            if ($(i + 1) ~ /^passed/) passed += $i
            if ($(i + 1) ~ /^failed/) failed += $i
            if ($(i + 1) ~ /^ignored/) skipped += $i
        }
    }
    END { printf "%d %d %d\n", passed, failed, skipped }
' "$work/log" >"$work/count"
read -r passed failed skipped <"$work/count"
status=$(cat "$work/status")
if [ "$failed" -gt 0 ]; then
    echo
    echo "failed:"
    sed -n 's/^test \(.*\) \.\.\. FAILED$/  \1/p' "$work/log" | sort -u
elif [ "$status" != 0 ]; then
    echo
    echo "the tests did not all run: cargo test ended with status $status"
elif [ "$passed" = 0 ]; then
    echo
    echo "no test ran"
    status=1
fi
echo "$passed passed, $failed failed, $skipped skipped"
exit "$status"
