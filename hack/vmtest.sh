#!/bin/sh
# Runs the stories of whole machines (tests/machine.rs) on the release binary's package, one after the other.
# usage: hack/vmtest.sh [NAME]...   those whose name has one of the NAMEs in it; KEEP=1 leaves a shell in the machine when its story
# has ended
# Needs root, x86_64 Linux, and QEMU, which hack/deps.sh installs; the machine is made by hack/machine.sh.
set -eu
cd "$(dirname "$0")/.."
names=$*

fail() {
    echo "make vmtest: $*" >&2
    exit 1
}
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "test machines are x86_64 Linux; this is $(uname -s) on $(uname -m); NOTHING WAS TESTED"
[ "$(id -u)" = 0 ] || fail "needs root, since the machine's disk is made of a Debian root: sudo make vmtest"
command -v cargo >/dev/null || fail "no cargo in the PATH; install Rust (https://rustup.rs)"
case $names in *[!A-Za-z0-9_:\ ]*) fail "'$names' is no part of a test's name" ;; esac
[ -z "${KEEP-}" ] || [ $# -eq 1 ] || fail "KEEP=1 leaves one machine: say which story by NAME=…"

hack/deps.sh build runtime deb machine
hack/machine.sh >/dev/null || fail "THERE IS NO MACHINE TO TEST ON (see above); nothing was tested"
hack/deb.sh tools >/dev/null || fail "THE PACKAGE CANNOT BE MADE (see above); nothing was tested"
hack/envtest.sh >/dev/null || fail "THERE IS NO KUBE-APISERVER TO TEST WITH (see above); nothing was tested"
PATH=$(hack/nextest.sh):$PATH
export PATH

begin=$(date +%s)
target=$(cargo metadata --format-version 1 --no-deps --offline | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
# HOLDFAST_MACHINE_BINARY may name another one, such as a development build, which is made sooner.
if [ -z "${HOLDFAST_MACHINE_BINARY-}" ]; then
    cargo build --release --locked
    export HOLDFAST_MACHINE_BINARY="$target/release/holdfast"
fi
is_program() { [ -x "$HOLDFAST_MACHINE_BINARY" ] || fail "HOLDFAST_MACHINE_BINARY=$HOLDFAST_MACHINE_BINARY is no program"; }
if [ -n "${KEEP-}" ] && [ "${PREPARE-}" != 1 ]; then
    is_program
    export HOLDFAST_MACHINE_KEEP=1
    exec cargo test --workspace --all-features --locked --test machine "$names" -- --nocapture --test-threads 1
fi
# The selection of hack/test.sh, so that nothing is built twice.
cargo build --workspace --all-features --locked --bins --tests
# It may be one of those.
is_program
echo "building took $(($(date +%s) - begin)) s"
# A name that is misspelt or was changed must not leave its scenario out.
scenarios=$(cargo nextest list --workspace --all-features --locked --cargo-quiet --message-format oneline \
    --ignore-default-filter -E 'binary(=machine)')
for name in $names; do
    case $scenarios in *"$name"*) ;; *)
        echo "$scenarios" | sed 's/^[^ ]* /  /' >&2
        fail "no scenario has '$name' in its name; those above exist"
        ;;
    esac
done
pattern=$(echo "$names" | tr -s ' ' '|')
exec "$target/debug/test-runner" run --no-cluster --scope 'binary(=machine)' ${names:+-E "binary(=machine) & test(/$pattern/)"}
