#!/bin/sh
# Packs busybox into an image that needs no registry. Two names, one content:
# holdfast.local/busybox:1 to run things, holdfast.local/pause:1 to hold sandboxes.
# Prints the archive, which is in the cache, and packed anew when busybox or this script has changed.
set -eu

busybox=$(command -v busybox) || {
    echo "hack/pack-image.sh: no busybox; run hack/deps.sh runtime" >&2
    exit 1
}
if ldd "$busybox" >/dev/null 2>&1; then
    echo "hack/pack-image.sh: $busybox is not static; run hack/deps.sh runtime" >&2
    exit 1
fi

cache=${HOLDFAST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/holdfast}/images
out=$cache/busybox-$(cat "$busybox" "$0" | sha256sum | cut -c -16).tar
if [ -f "$out" ]; then
    echo "$out"
    exit
fi
mkdir -p "$cache"
work=$(mktemp -d "$cache/packing-XXXXXX")
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root/bin" "$root/etc" "$root/tmp" "$root/proc" "$root/sys" "$root/dev" "$root/root"
chmod 1777 "$root/tmp"
cp -L "$busybox" "$root/bin/busybox"
for applet in $("$busybox" --list); do
    [ "$applet" = busybox ] || ln -s busybox "$root/bin/$applet"
done
printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n' >"$root/etc/passwd"
printf 'root:x:0:\nnogroup:x:65534:\n' >"$root/etc/group"

pack() {
    tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -C "$1" -cf "$2" .
}
mkdir "$work/image"
pack "$root" "$work/image/layer.tar"
layer=$(sha256sum "$work/image/layer.tar" | cut -d' ' -f1)
case $(uname -m) in
x86_64) arch=amd64 ;;
aarch64) arch=arm64 ;;
*) arch=$(uname -m) ;;
esac

# $1 = file, $2 = what the image runs, as JSON
config() {
    cat >"$work/image/$1" <<EOF
{"architecture":"$arch","os":"linux","created":"1970-01-01T00:00:00Z",
 "config":{"Env":["PATH=/bin"],"Cmd":$2},
 "rootfs":{"type":"layers","diff_ids":["sha256:$layer"]}}
EOF
}
config busybox.json '["sh"]'
# The shell reaps what a shared process namespace leaves behind, and ends on SIGTERM.
config pause.json '["sh","-c","trap \"exit 0\" TERM INT; while :; do sleep 86400 & wait $!; done"]'
cat >"$work/image/manifest.json" <<EOF
[{"Config":"busybox.json","RepoTags":["holdfast.local/busybox:1"],"Layers":["layer.tar"]},
 {"Config":"pause.json","RepoTags":["holdfast.local/pause:1"],"Layers":["layer.tar"]}]
EOF
pack "$work/image" "$work/image.tar"
mv "$work/image.tar" "$out"
echo "$out"
