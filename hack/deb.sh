#!/bin/sh
# Makes the Debian package from a binary, with cargo-deb; [package.metadata.deb] in Cargo.toml says what is in it.
# usage: hack/deb.sh BINARY [OUTPUT [VERSION]]
# OUTPUT is a file or a directory (default: target/debian). FAST=1 saves time instead of bytes, for tests.
# `hack/deb.sh tools` only provides what it needs.
set -eu
cd "$(dirname "$0")/.."
. hack/lock.sh

hack/deps.sh build deb
cargo_deb=$(hack/tool.sh cargo-deb 3.8.0)
cargo_cyclonedx=$(hack/tool.sh cargo-cyclonedx 0.5.9)
[ "${1-}" != tools ] || exit 0
binary=$(realpath "${1:?usage: hack/deb.sh BINARY [OUTPUT [VERSION]]}") output=${2:-target/debian} version=${3-}

# The names that Cargo.toml gives are below target/stage, wherever cargo builds.
mkdir -p target
hold target/stage.lock "the making of a package in $PWD" 600
stage=$PWD/target/stage
rm -rf "$stage"
hack/install.sh "$binary" "$stage" /usr >/dev/null
strip --strip-unneeded --remove-section=.comment --remove-section=.note "$stage/usr/bin/holdfast"
# Where Debian's zsh looks.
mv "$stage/usr/share/zsh/site-functions" "$stage/usr/share/zsh/vendor-completions"

# What the binary is made of, for those who look up advisories: CycloneDX. The tool writes a file beside the Cargo.toml of every
# package of the workspace. Where this tree lies, and when this was done, make no difference.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || date +%s) "$cargo_cyclonedx" cyclonedx --quiet --format json \
    --spec-version 1.5 --no-build-deps --override-filename .holdfast.cdx
sed "s|path+file://$PWD#|holdfast |" .holdfast.cdx.json >"$stage/usr/share/doc/holdfast/holdfast.cdx.json"
chmod 0644 "$stage/usr/share/doc/holdfast/holdfast.cdx.json"
rm -f .holdfast.cdx.json tests/*/.holdfast.cdx.json

# The scripts know the schema of the store that this binary writes.
schema=$("$binary" version -o json | sed -n 's/.*"schema": *\([0-9]*\).*/\1/p')
mkdir -p "$stage/control"
for file in preinst postinst prerm postrm templates; do
    sed "s/@SCHEMA@/${schema:?the binary tells no schema}/" "contrib/debian/$file" >"$stage/control/$file"
done

set --
[ -z "$version" ] || set -- "$@" --deb-version "$version"
[ -z "${FAST-}" ] || set -- "$@" --fast
# Everything is in the stage already: nothing is built or stripped here.
"$cargo_deb" deb --quiet --no-build --no-strip --no-dbgsym --locked --offline --output "$output" "$@"
