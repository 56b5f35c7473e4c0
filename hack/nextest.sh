#!/bin/sh
# Prints the directory of cargo-nextest: that in the path, or one that is built once into the cache.
set -eu
cd "$(dirname "$0")/.."

dirname "$(command -v cargo-nextest || hack/tool.sh cargo-nextest 0.9.143)"
